//! What is bound to a model beside the inputs of a batch.

use std::sync::Arc;

use crate::kv::KvCache;
use crate::runtime::Model;

/// A model with what is bound to it beside the inputs of a batch.
pub(in super::super) struct BoundModel<'a> {
    pub(in super::super) model: &'a Arc<Model>,
    pub(in super::super) kv: Option<&'a KvCache>,
    /// Whether nothing is on its way into the pools that the batch reads.
    pub(in super::super) settled: bool,
    /// The names of each layer's pool, as it goes in and comes out.
    pub(in super::super) pools: Vec<(&'a str, &'a str)>,
    /// The name of the output, which has `width` numbers for each row that is asked for.
    pub(in super::super) output: &'a str,
    pub(in super::super) width: usize,
}
