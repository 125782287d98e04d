//! `ai.pagoda.PagedKvAppend`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::append::AppendInputs;
use crate::context::{Attributes, Context, InputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{CacheInputs, I32, RowInputs};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Writes each user's new history rows into the pages of one layer, for one element type.
pub struct PagedKvAppend<T>(PhantomData<T>);

impl<T: OnnxElement> Operator for PagedKvAppend<T> {
    const NAME: &'static CStr = c"PagedKvAppend";
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

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(_: &Attributes) -> Result<Self, OpError> {
        Ok(Self(PhantomData))
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let append = inputs.append();
        // SAFETY: the CPU's tensors are in host memory, and the element types are those of `INPUTS`. Nothing writes to these
        // inputs while the node runs, but this call to the pool.
        let call = unsafe { append.on_host::<T>() };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = call.check()?;
        let output = append.output(context, 0)?;
        // SAFETY: as above; f32, f16 and bf16 have no invalid bit patterns.
        unsafe { append.write(&checked, &output, context) }
    }
}

impl<T: OnnxElement> Launch for PagedKvAppend<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let rows = inputs.rows.on_device()?;
        let (key, value) = (inputs.key.address(), inputs.value.address());
        let cache = inputs.cache.on_device(rows.users)?;
        let mut call = cuda::Append { element: cuda::Type::of::<T>(), rows, key, value, cache };
        call.check()?;
        let append = inputs.append();
        let output = append.output(context, 0)?;
        call.cache.pool = output.address();
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. Nothing else touches the output, which is apart from everything but the pool,
        // and from that too unless it is the pool.
        unsafe {
            append.copy_on_device::<T>(gpu, &output, stream)?;
            Ok(gpu.append(&call, stream)?)
        }
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    key: InputTensor<'a>,
    value: InputTensor<'a>,
    rows: RowInputs<'a>,
    cache: CacheInputs<'a>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let [pool, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let rows = RowInputs::read(context, &[&key, &value])?;
        let cache = CacheInputs::read(context, Some(pool), &rows)?.expect("there is a pool");
        Ok(Self { key, value, rows, cache })
    }

    fn append(&self) -> AppendInputs<'_> {
        AppendInputs { key: &self.key, value: &self.value, rows: &self.rows, cache: &self.cache }
    }
}
