//! `ai.pagoda.HstuAttention`.

use std::ffi::CStr;
use std::marker::PhantomData;

use ort_sys::ONNXTensorElementDataType as OnnxType;
use pagoda_kernels::batch::{Pages, Rows};

use crate::context::{Attributes, Context};
use crate::element::OnnxElement;
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

const I32: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

/// Attention of each user's new rows over the paged history and the rows themselves, for one element type.
pub struct HstuAttention<T> {
    alpha: f32,
    scaling_seqlen: i64,
    target_group_size: i64,
    max_attn_len: i64,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuAttention<T> {
    const NAME: &'static CStr = c"HstuAttention";
    const INPUTS: &'static [Input] = &[
        Input::required("query", T::ONNX),
        Input::required("key", T::ONNX),
        Input::required("value", T::ONNX),
        Input::required("row_offsets", I32),
        Input::required("num_candidates", I32),
        Input::optional("cached_len", I32),
        Input::optional("page_indptr", I32),
        Input::optional("page_ids", I32),
        Input::optional("kv_pool", T::ONNX),
        Input::optional("num_contextual", I32),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("output", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let scaling_seqlen = attributes.int(c"scaling_seqlen")?.ok_or_else(|| {
            OpError::invalid("HstuAttention: the attribute scaling_seqlen (an int of at least 1) is missing")
        })?;
        let operator = Self {
            alpha: attributes.float(c"alpha")?.unwrap_or(0.0),
            scaling_seqlen,
            target_group_size: attributes.int(c"target_group_size")?.unwrap_or(1),
            max_attn_len: attributes.int(c"max_attn_len")?.unwrap_or(0),
            element: PhantomData,
        };
        // An empty batch checks the attributes alone, so that a bad one fails when the model is opened.
        operator
            .with_inputs(Rows { row_offsets: &[0], num_candidates: &[], total_rows: 0, heads: 1, head_size: 1 })
            .check()?;
        Ok(operator)
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let [query, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let [row_offsets, num_candidates] = [context.input(3)?, context.input(4)?];
        let [cached_len, page_indptr, page_ids] =
            [context.optional_input(5)?, context.optional_input(6)?, context.optional_input(7)?];
        let [kv_pool, num_contextual] = [context.optional_input(8)?, context.optional_input(9)?];

        let [total_rows, heads, head_size] = query.shape()?;
        for rows in [&key, &value] {
            if rows.shape::<3>()? != [total_rows, heads, head_size] {
                return Err(OpError::invalid(format!(
                    "{}: shape {:?} differs from that of query, {:?}",
                    rows.name, rows.dims, query.dims
                )));
            }
        }
        for tensor in [Some(&row_offsets), Some(&num_candidates), cached_len.as_ref(), page_indptr.as_ref()]
            .into_iter()
            .chain([page_ids.as_ref(), num_contextual.as_ref()])
            .flatten()
        {
            tensor.shape::<1>()?;
        }
        // SAFETY (every `slice` below): the element types are those of `INPUTS`, and nothing writes to an input of a
        // running node: the pool's writer, PagedKvAppend, is another node that ran before or runs after.
        let cache = match (&cached_len, &page_indptr, &page_ids, &kv_pool) {
            (None, None, None, None) => None,
            (Some(cached_len), Some(page_indptr), Some(page_ids), Some(kv_pool)) => {
                let [pool_pages, page_size] = kv_pool.pool_shape(heads, head_size)?;
                // SAFETY: as above.
                let (cached_len, page_indptr, page_ids, pool) =
                    unsafe { (cached_len.slice(), page_indptr.slice(), page_ids.slice(), kv_pool.slice()) };
                Some((Pages { cached_len, page_indptr, page_ids, pool_pages, page_size }, pool))
            }
            _ => {
                return Err(OpError::invalid(
                    "cached_len, page_indptr, page_ids and kv_pool go together: give all four or none",
                ));
            }
        };
        // SAFETY: as above.
        let attention = unsafe {
            let (row_offsets, num_candidates) = (row_offsets.slice(), num_candidates.slice());
            pagoda_kernels::HstuAttention {
                query: query.slice::<T>(),
                key: key.slice(),
                value: value.slice(),
                cache,
                num_contextual: num_contextual.as_ref().map(|tensor| tensor.slice()),
                ..self.with_inputs(Rows { row_offsets, num_candidates, total_rows, heads, head_size })
            }
        };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = attention.check()?;
        let output = context.output(0, &query.dims)?;
        output.apart_from([&query, &key, &value, &row_offsets, &num_candidates])?;
        output.apart_from([&cached_len, &page_indptr, &page_ids, &kv_pool, &num_contextual].into_iter().flatten())?;
        if attention.query.is_empty() {
            return Ok(());
        }
        // SAFETY: ONNX Runtime gives the output room for these dimensions, and it is apart from every input; f32, f16
        // and bf16 have no invalid bit patterns, and the kernel writes every element before it is read.
        let output = unsafe { std::slice::from_raw_parts_mut(output.data.cast::<T>(), attention.query.len()) };
        Ok(checked.run(output, context)?)
    }
}

impl<T: OnnxElement> HstuAttention<T> {
    fn with_inputs<'a>(&self, rows: Rows<'a>) -> pagoda_kernels::HstuAttention<'a, T> {
        pagoda_kernels::HstuAttention {
            rows,
            query: &[],
            key: &[],
            value: &[],
            cache: None,
            num_contextual: None,
            alpha: self.alpha,
            scaling_seqlen: self.scaling_seqlen,
            target_group_size: self.target_group_size,
            max_attn_len: self.max_attn_len,
        }
    }
}
