//! `ai.pagoda.PagedKvAppend`: writes new rows into the paged KV cache.

use std::marker::PhantomData;

use pagoda_kernels::KvFormat;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use super::inputs::{AppendInputs, CacheInputs, RowInputs};
use crate::ort::{
    I32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, Shape,
    ShapeInferContext,
};

/// The append of each user's new history rows to the pages of one layer, for one element type.
pub struct PagedKvAppend<T>(PhantomData<T>);

impl<T: OnnxElement> Operator for PagedKvAppend<T> {
    const INPUTS: &'static [Input] = &[
        Input::required("kv_pool", T::ONNX),
        Input::required("key", T::ONNX),
        Input::required("value", T::ONNX),
        Input::required("row_offsets", I32),
        Input::required("num_candidates", I32),
        Input::required("cached_len", I32),
        Input::required("page_indptr", I32),
        Input::required("page_ids", I32),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("kv_pool_out", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(_: &KernelInfo) -> Result<Self, OpError> {
        Ok(Self(PhantomData))
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let append = inputs.append();
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing writes to an
        // input of a running node, except that this call may write the pool.
        let call = unsafe { append.on_host::<T>() };
        // The check precedes the output: an invalid call must not write a buffer that the caller bound.
        let checked = call.check()?;
        let output = append.output(context, 0)?;
        // SAFETY: as above. f32, f16 and bf16 have no invalid bit patterns.
        unsafe { append.write(&checked, &output, context) }
    }
}

impl<T: OnnxElement> Launch for PagedKvAppend<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let rows = inputs.rows.on_device()?;
        let (key, value) = (inputs.key.address(), inputs.value.address());
        let cache = inputs.cache.on_device(rows.users)?;
        let mut call = cuda::Append { element: cuda::Type::of::<T>(), rows, key, value, cache };
        call.check()?;
        let append = inputs.append();
        let output = append.output(context, 0)?;
        call.cache.pool = output.address();
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. Nothing else uses the output. It is disjoint from every input, or it is the pool itself.
        unsafe {
            append.copy_on_device::<T>(gpu, &output, stream)?;
            Ok(gpu.append(&call, stream)?)
        }
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    key: InputTensor<'a>,
    value: InputTensor<'a>,
    rows: RowInputs<'a>,
    cache: CacheInputs<'a>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let [pool, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let rows = RowInputs::read(context, &[&key, &value])?;
        let cache = CacheInputs::read(context, Some(pool), &rows, KvFormat::Native)?.expect("there is a pool");
        Ok(Self { key, value, rows, cache })
    }

    fn append(&self) -> AppendInputs<'_> {
        AppendInputs { key: &self.key, value: &self.value, rows: &self.rows, cache: &self.cache }
    }
}
