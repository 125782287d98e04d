//! A model and the tensors that every batch binds to it.

use std::ops::Range;
use std::sync::Arc;

use super::inputs::{Dim, Sizes};
use crate::device::{CUdeviceptr, DeviceMemory};
use crate::error::Result;
use crate::kv::KvCache;
use crate::runtime::Model;
use crate::tensor::{ElementType, Tensor};

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
    /// Where the output of large batches stays on the GPU; `None`: all outputs go to the host.
    pub(in super::super) device_output: Option<DeviceOutput<'a>>,
    /// Other inputs, which the run only reads. CUDA graphs do not have them.
    pub(in super::super) read: Vec<(&'a str, &'a Arc<Tensor>)>,
    /// Other outputs, and the tensors that they are written into. CUDA graphs do not have them.
    pub(in super::super) others: Vec<(&'a str, Tensor)>,
    /// Other inputs and outputs, in GPU memory. They are the same for all batches but for their sizes.
    pub(in super::super) tensors: Vec<DeviceTensor<'a>>,
}

/// An input or an output in GPU memory, which has room for the largest batch.
pub(in super::super) struct DeviceTensor<'a> {
    pub(in super::super) name: &'a str,
    pub(in super::super) is_output: bool,
    pub(in super::super) element: ElementType,
    pub(in super::super) memory: &'a Arc<DeviceMemory>,
    /// Where it begins in the memory, in bytes.
    pub(in super::super) at: usize,
    pub(in super::super) dim: Dim,
    /// The other dimensions, after `dim`.
    pub(in super::super) inner: &'a [i64],
}

impl DeviceTensor<'_> {
    /// The tensor of a batch.
    pub(super) fn of(&self, sizes: &Sizes) -> Result<Tensor> {
        let dims: Vec<i64> = std::iter::once(sizes.of(self.dim) as i64).chain(self.inner.iter().copied()).collect();
        Tensor::on_device(self.element, &dims, self.memory, self.at)
    }

    /// Where the tensor of a batch is.
    pub(super) fn addresses(&self, sizes: &Sizes) -> Range<CUdeviceptr> {
        let numbers = self.inner.iter().fold(sizes.of(self.dim), |numbers, &dim| numbers * dim as usize);
        let first = self.memory.address() + self.at as CUdeviceptr;
        first..first + (numbers * self.element.bits() / 8) as CUdeviceptr
    }
}

/// Memory on the GPU for the output of batches of at least `least_rows` rows.
#[derive(Clone, Copy)]
pub(in super::super) struct DeviceOutput<'a> {
    pub(in super::super) memory: &'a Arc<DeviceMemory>,
    pub(in super::super) least_rows: usize,
}

/// Where the output of a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) enum Placed {
    /// In the buffer of the host.
    #[default]
    Host,
    /// In [`BoundModel::device_output`].
    Device,
}

impl<'a> BoundModel<'a> {
    /// The memory that so many rows of output stay in.
    pub(super) fn output_on_device(&self, rows: usize) -> Option<&Arc<DeviceMemory>> {
        let DeviceOutput { memory, least_rows } = self.device_output?;
        let bytes = rows.saturating_mul(self.width).saturating_mul(size_of::<f32>());
        (rows >= least_rows && bytes <= memory.bytes()).then_some(memory)
    }

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
