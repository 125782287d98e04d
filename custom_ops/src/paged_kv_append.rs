//! `ai.pagoda.PagedKvAppend`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cpu;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
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
        // SAFETY: the CPU's tensors are in host memory, and the element types are those of `INPUTS`. Nothing writes to these
        // inputs while the node runs; no slice is made of the pool, which may be the output's buffer.
        let append = unsafe {
            pagoda_kernels::PagedKvAppend {
                rows: inputs.rows.on_host(),
                key: inputs.key.slice::<T>(),
                value: inputs.value.slice(),
                pages: inputs.cache.on_host(),
            }
        };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = append.check()?;
        let (pool, output) = (&inputs.cache.pool, inputs.output(context)?);
        let len: usize = pool.dims.iter().product();
        if len == 0 {
            return Ok(());
        }
        if !std::ptr::eq(pool.data, output.data) {
            // SAFETY: both hold `len` elements and are apart.
            unsafe { cpu::copy(pool.slice::<T>(), std::slice::from_raw_parts_mut(output.data.cast(), len), context) };
        }
        // SAFETY: the output holds `len` elements, all of them written: by the copy, or because it is the input; it is
        // apart from everything else.
        let output = unsafe { std::slice::from_raw_parts_mut(output.data.cast::<T>(), len) };
        Ok(checked.run(output, context)?)
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
        let (pool, output) = (&inputs.cache.pool, inputs.output(context)?);
        // SAFETY (both): tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does
        // not let go of them before the stream is done. Nothing else touches the output, which is apart from everything but
        // the pool, and from that too unless it is the pool.
        let bytes = pool.dims.iter().product::<usize>() * size_of::<T>();
        if bytes > 0 && !std::ptr::eq(pool.data, output.data) {
            // SAFETY: as above.
            unsafe {
                cuda::hold_for_arrivals(pool.address(), stream)?;
                gpu.copy(output.address(), pool.address(), bytes, stream)?;
            }
        }
        call.cache.pool = output.address();
        // SAFETY: as above.
        Ok(unsafe { gpu.append(&call, stream) }?)
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

    /// The output, which may be the pool as a whole and must not lie over anything else.
    fn output(&self, context: &Context) -> Result<OutputTensor, OpError> {
        let pool = &self.cache.pool;
        let output = context.output(0, &pool.dims)?;
        output.apart_from([&self.key, &self.value])?;
        output.apart_from(self.rows.tensors())?;
        output.apart_from(self.cache.tensors())?;
        if !std::ptr::eq(pool.data, output.data) {
            output.apart_from([pool])?;
        }
        Ok(output)
    }
}
