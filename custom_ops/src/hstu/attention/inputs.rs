//! The inputs of a call, and the outputs that fit them.

use pagoda_kernels::KvFormat;

use super::super::inputs::{AppendInputs, CacheInputs, RowInputs};
use crate::ort::{InputTensor, KernelContext, OpError, OutputTensor};

/// The number of the pool among the inputs.
pub(super) const POOL: usize = 8;

/// That of its scales.
pub(super) const SCALES: usize = 10;

/// The inputs of the cache, from input 5 on.
pub(super) const CACHE: [&str; 4] = ["cached_len", "page_indptr", "page_ids", "kv_pool"];

pub(super) fn no_cache(missing: &str) -> OpError {
    OpError::invalid(format!(
        "kv_pool_out: this output takes the inputs {}, and {missing} is missing: give all four or leave the output out",
        CACHE.join(", ")
    ))
}

/// The inputs of a call, with consistent shapes.
pub(super) struct Inputs<'a> {
    pub(super) query: InputTensor<'a>,
    pub(super) key: InputTensor<'a>,
    pub(super) value: InputTensor<'a>,
    pub(super) rows: RowInputs<'a>,
    pub(super) cache: Option<CacheInputs<'a>>,
    pub(super) num_contextual: Option<InputTensor<'a>>,
    /// Of a quantised pool.
    pub(super) scales: Option<InputTensor<'a>>,
}

impl<'a> Inputs<'a> {
    pub(super) fn read(context: &'a KernelContext, format: KvFormat) -> Result<Self, OpError> {
        let [query, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let rows = RowInputs::read(context, &[&query, &key, &value])?;
        let cache = CacheInputs::read(context, context.optional_input(POOL)?, &rows, format)?;
        let num_contextual = context.optional_input(9)?;
        if let Some(contextual) = &num_contextual {
            contextual.shape::<1>()?;
        }
        let scales = context.optional_input(SCALES)?.filter(|_| format != KvFormat::Native);
        if let (Some(scales), Some(cache)) = (&scales, &cache) {
            scales.expect_shape(&cache.scales_shape(&rows, format))?;
        }
        Ok(Self { query, key, value, rows, cache, num_contextual, scales })
    }

    /// The elements of the pool; none without a cache.
    ///
    /// # Safety
    /// As for [`InputTensor::slice`].
    pub(super) unsafe fn pool<T>(&self) -> &'a [T] {
        // SAFETY: by contract.
        self.cache.as_ref().map_or(&[], |cache| unsafe { cache.pool.slice() })
    }

    /// The inputs of the append, for a node that appends.
    pub(super) fn append(&self) -> Result<AppendInputs<'_>, OpError> {
        let cache = self.cache.as_ref().ok_or_else(|| no_cache("each of them"))?;
        Ok(AppendInputs { key: &self.key, value: &self.value, rows: &self.rows, cache })
    }

    /// The output pool. It is the input pool itself, or disjoint from it; it is disjoint from everything else.
    pub(super) fn pool_output(
        &self,
        append: &AppendInputs<'_>,
        output: &OutputTensor,
        context: &KernelContext,
    ) -> Result<OutputTensor, OpError> {
        let pool = append.output(context, 1)?;
        pool.check_disjoint([&self.query])?;
        pool.check_disjoint(&self.num_contextual)?;
        pool.check_disjoint(&self.scales)?;
        pool.check_disjoint_output(output)?;
        Ok(pool)
    }

    /// The output, which must be disjoint from every input.
    pub(super) fn output(&self, context: &KernelContext) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &self.query.dims)?;
        output.check_disjoint([&self.query, &self.key, &self.value])?;
        output.check_disjoint(self.rows.tensors())?;
        if let Some(cache) = &self.cache {
            output.check_disjoint(cache.tensors())?;
            output.check_disjoint([&cache.pool])?;
        }
        output.check_disjoint(&self.num_contextual)?;
        output.check_disjoint(&self.scales)?;
        Ok(output)
    }

    /// The output for the scales of a quantised pool. It is those of the input itself, or disjoint from them; it is disjoint from
    /// everything else.
    pub(super) fn scales_output(
        &self,
        scales: &InputTensor<'_>,
        others: [&OutputTensor; 2],
        context: &KernelContext,
    ) -> Result<OutputTensor, OpError> {
        let made = context.output(2, &scales.dims)?;
        made.check_disjoint([&self.query, &self.key, &self.value])?;
        made.check_disjoint(self.rows.tensors())?;
        made.check_disjoint(&self.num_contextual)?;
        if let Some(cache) = &self.cache {
            made.check_disjoint(cache.tensors())?;
            made.check_disjoint([&cache.pool])?;
        }
        if !std::ptr::eq(scales.data, made.data) {
            made.check_disjoint([scales])?;
        }
        for other in others {
            made.check_disjoint_output(other)?;
        }
        Ok(made)
    }
}
