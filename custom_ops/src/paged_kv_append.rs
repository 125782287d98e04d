//! `ai.pagoda.PagedKvAppend`.

use std::ffi::CStr;
use std::marker::PhantomData;

use ort_sys::ONNXTensorElementDataType as OnnxType;
use pagoda_kernels::batch::{Pages, Rows};
use pagoda_kernels::cpu;

use crate::context::{Attributes, Context};
use crate::element::OnnxElement;
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

const I32: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

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
        let [pool, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let [row_offsets, num_candidates] = [context.input(3)?, context.input(4)?];
        let [cached_len, page_indptr, page_ids] = [context.input(5)?, context.input(6)?, context.input(7)?];

        let [total_rows, heads, head_size] = key.shape()?;
        if value.shape::<3>()? != [total_rows, heads, head_size] {
            return Err(OpError::invalid(format!(
                "value: shape {:?} differs from that of key, {:?}",
                value.dims, key.dims
            )));
        }
        let [pool_pages, page_size] = pool.pool_shape(heads, head_size)?;
        for tensor in [&row_offsets, &num_candidates, &cached_len, &page_indptr, &page_ids] {
            tensor.shape::<1>()?;
        }
        // SAFETY: the element types are those of `INPUTS`. Nothing writes to these inputs while the node runs; no
        // slice is made of the pool, which may be the output's buffer.
        let append = unsafe {
            let (row_offsets, num_candidates) = (row_offsets.slice(), num_candidates.slice());
            let (cached_len, page_indptr, page_ids) = (cached_len.slice(), page_indptr.slice(), page_ids.slice());
            pagoda_kernels::PagedKvAppend {
                rows: Rows { row_offsets, num_candidates, total_rows, heads, head_size },
                key: key.slice::<T>(),
                value: value.slice(),
                pages: Pages { cached_len, page_indptr, page_ids, pool_pages, page_size },
            }
        };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = append.check()?;
        let output = context.output(0, &pool.dims)?;
        output.apart_from([&key, &value, &row_offsets, &num_candidates, &cached_len, &page_indptr, &page_ids])?;
        let len: usize = pool.dims.iter().product();
        if len == 0 {
            return Ok(());
        }
        if !std::ptr::eq(pool.data, output.data) {
            output.apart_from([&pool])?;
            // SAFETY: both hold `len` elements and are apart.
            unsafe { cpu::copy(pool.slice::<T>(), std::slice::from_raw_parts_mut(output.data.cast(), len), context) };
        }
        // SAFETY: the output holds `len` elements, all of them written: by the copy, or because it is the input; it is
        // apart from everything else.
        let output = unsafe { std::slice::from_raw_parts_mut(output.data.cast::<T>(), len) };
        Ok(checked.run(output, context)?)
    }
}
