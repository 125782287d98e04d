//! A model and the tensors that every batch binds to it.

use std::sync::Arc;

use crate::error::Result;
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
    /// The same of its scales, where pages are quantised.
    pub(in super::super) scales: Vec<(&'a str, &'a str)>,
    /// The name of the output. It has `width` numbers for each requested row.
    pub(in super::super) output: &'a str,
    pub(in super::super) width: usize,
}

impl<'a> BoundModel<'a> {
    /// The names of every pool, and of every layer's scales, as graph input and as graph output, and the tensor that both are.
    pub(in super::super) fn pages(&self) -> Result<Vec<(&'a str, &'a str, &'a Arc<Tensor>)>> {
        let Some(kv) = self.kv else { return Ok(Vec::new()) };
        let mut all = Vec::with_capacity(self.pools.len() + self.scales.len());
        for (layer, &(input, output)) in (0..).zip(&self.pools) {
            all.push((input, output, kv.pool(layer)?));
        }
        for (layer, &(input, output)) in (0..).zip(&self.scales) {
            all.extend(kv.scales(layer)?.map(|scales| (input, output, scales)));
        }
        Ok(all)
    }
}
