//! The slots of a step: what the graph is told of them, and what it returns.

use super::super::exec::{self, Dim, Input, Values};
use super::policy::{OpenPolicy, Slots};
use super::sequence::Sequence;
use crate::error::{Error, Result, Status};
use crate::kv::policy::{SlotPlan, SlotValues};
use crate::tensor::Tensor;

/// The inputs and outputs of a step for the slots of its sequences, `[layer]`; one layer where they do not differ.
#[derive(Default)]
pub(super) struct SlotBuffers {
    /// `[sequence][layer]`
    plans: Vec<Vec<SlotPlan>>,
    write_slots: Vec<Vec<i32>>,
    token_pos: Vec<Vec<i32>>,
    /// Of every layer.
    weights: Vec<Vec<f32>>,
    of_rows: Vec<i64>,
    of_slots: Vec<i64>,
}

impl SlotBuffers {
    /// Plans the rows of a step.
    pub(super) fn fill<'a>(
        &mut self,
        open: &OpenPolicy,
        batch: impl Iterator<Item = (&'a Sequence, usize)>,
    ) -> Result<()> {
        self.plans.clear();
        for (sequence, rows) in batch {
            let slots =
                sequence.slots.as_ref().ok_or_else(|| Error::new(Status::Internal, "a sequence without slots"))?;
            self.plans.push(slots.layers.iter().map(|layer| layer.plan(&*open.policy, rows)).collect::<Result<_>>()?);
        }
        let layers = self.plans.first().map_or(0, Vec::len);
        self.write_slots.resize_with(layers, Vec::new);
        self.token_pos.resize_with(layers, Vec::new);
        for layer in 0..layers {
            let (write_slots, token_pos) = (&mut self.write_slots[layer], &mut self.token_pos[layer]);
            write_slots.clear();
            token_pos.clear();
            for plans in &self.plans {
                write_slots.extend(&plans[layer].write_slots);
                token_pos.extend(&plans[layer].token_pos);
            }
        }
        let weights = if open.needs_weights() { self.plans.len() * open.heads * open.len } else { 0 };
        self.weights.resize_with(open.names.len(), Vec::new);
        self.weights.iter_mut().for_each(|buffer| buffer.resize(weights, 0.0));
        self.of_rows = vec![open.heads as i64];
        self.of_slots = vec![open.heads as i64, open.len as i64];
        Ok(())
    }

    /// The inputs of the graph.
    pub(super) fn inputs<'a>(&'a self, open: &'a OpenPolicy) -> impl Iterator<Item = Input<'a>> {
        let of_layer = |all: &'a [Vec<i32>], layer: usize| Values::I32(&all[layer.min(all.len() - 1)]);
        open.names.iter().enumerate().flat_map(move |(layer, names)| {
            let write_slots = of_layer(&self.write_slots, layer);
            let token_pos = of_layer(&self.token_pos, layer);
            [
                Input { name: &names.write_slots, numbers: write_slots, dim: Dim::Rows(0), inner: &self.of_rows },
                Input { name: &names.token_pos, numbers: token_pos, dim: Dim::Sequences, inner: &self.of_slots },
            ]
        })
    }

    /// The outputs of the graph: tensors over the buffers of weights, which must outlive them.
    pub(super) fn outputs<'a>(&mut self, open: &'a OpenPolicy) -> Result<Vec<(&'a str, Tensor)>> {
        let dims = [self.plans.len() as i64, open.heads as i64, open.len as i64];
        let with_names = open.names.iter().filter_map(|names| names.key_weights.as_deref()).zip(&mut self.weights);
        let output = |(name, buffer): (&'a str, &mut Vec<f32>)| {
            // SAFETY: the buffer outlives the tensor, and nothing else uses it during the run.
            let tensor = unsafe { exec::tensor_in_place(&dims, buffer.as_mut_ptr(), buffer.len()) };
            tensor.map(|tensor| (name, tensor))
        };
        with_names.map(output).collect()
    }

    /// The step has run: the slots of its sequences, given in the order of the batch, are as they were planned.
    pub(super) fn commit<'a>(
        &mut self,
        open: &OpenPolicy,
        sequences: impl Iterator<Item = Option<&'a mut Slots>>,
    ) -> Result<()> {
        let size = open.heads * open.len;
        for (index, (plans, slots)) in self.plans.drain(..).zip(sequences).enumerate() {
            let Some(slots) = slots else { continue };
            for (layer, (plan, slots)) in plans.into_iter().zip(&mut slots.layers).enumerate() {
                let weights = if open.needs_weights() { &self.weights[layer][index * size..][..size] } else { &[][..] };
                slots.commit(&*open.policy, plan, weights, SlotValues::default())?;
            }
        }
        Ok(())
    }
}
