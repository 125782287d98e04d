//! A model and the tensors that every batch binds to it.

use std::sync::Arc;

use crate::kv::KvCache;
use crate::runtime::Model;
use crate::tensor::Tensor;

/// A model and what is bound to it beside the inputs of a batch.
pub(in super::super) struct BoundModel<'a> {
    pub(in super::super) model: &'a Arc<Model>,
    pub(in super::super) kv: Option<&'a KvCache>,
    /// Whether no copy into the pools that the batch reads is in flight.
    pub(in super::super) pools_ready: bool,
    /// The names of each layer's pool, as graph input and as graph output.
    pub(in super::super) pools: Vec<(&'a str, &'a str)>,
    /// The name of the output. It has `width` numbers for each requested row.
    pub(in super::super) output: &'a str,
    pub(in super::super) width: usize,
    /// Another output, and the tensor that it is written into. CUDA graphs do not have it.
    pub(in super::super) other: Option<(&'a str, Tensor)>,
}
