//! The slots of a step: what the graph is told of them, and what it returns.

use pagoda_kernels::KV_NORMS;

use super::super::exec::{self, DeviceTensor, Dim, Input, Values};
use super::kv_policy::SlotCall;
use super::open_model::OpenModel;
use super::policy::{OpenPolicy, Slots};
use super::sequence::Sequence;
use crate::device::Gpu;
use crate::error::{Error, Result, Status};
use crate::kv::policy::{DeviceSlots, Ranking, SlotPlan, SlotValues, SlotsShape};
use crate::tensor::{ElementType, Tensor};

/// The inputs and outputs of a step for the slots of its sequences, `[layer]`; one layer where they do not differ.
#[derive(Default)]
pub(super) struct SlotBuffers {
    /// `[sequence][layer]`; those of sequences that are no more are kept for their memory.
    plans: Vec<Vec<SlotPlan>>,
    sequences: usize,
    ranking: Ranking,
    write_slots: Vec<Vec<i32>>,
    token_pos: Vec<Vec<i32>>,
    /// Of every layer.
    weights: Vec<Vec<f32>>,
    /// Of every layer, `[rows, heads, KV_NORMS]`; empty where the policy needs none of them.
    norms: Vec<Vec<f32>>,
    /// Those of one sequence, apart.
    lengths: Vec<f32>,
    errors: Vec<f32>,
    of_rows: Vec<i64>,
    /// Of every layer.
    of_slots: Vec<[i64; 2]>,
    /// What was written, where it is logged.
    pub(super) log: Vec<SlotCall>,
    /// Present if a GPU decides: the slots and these buffers are in its memory.
    device: Option<DeviceSlots>,
    /// With it: the rows of each sequence.
    rows: Vec<usize>,
    of_norms: Vec<i64>,
}

impl SlotBuffers {
    /// For steps of so many sequences and rows. Slots are in GPU memory if the model runs there, as far as it has room.
    pub(super) fn new(model: &OpenModel, max_batch: usize, max_rows: usize) -> Self {
        let open = model.policy.as_ref().filter(|open| open.has_device_rule());
        let device = model.device_id.zip(open).and_then(|(device, open)| {
            let shape = SlotsShape {
                heads: open.heads,
                lens: open.state_lens().to_vec(),
                states: max_batch,
                rows: max_rows,
                needs: open.needs(),
            };
            let gpu = Gpu::shared(device as usize).map_err(Into::into);
            gpu.and_then(|gpu| DeviceSlots::new(gpu, shape))
                .inspect_err(|error| log::warn!("{} decides on the CPU: {error}", open.kind()))
                .ok()
        });
        Self { device, ..Self::default() }
    }

    /// Whether a GPU decides.
    pub(super) fn are_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// Brings the slots of a sequence to where decisions are made.
    pub(super) fn place(&self, slots: &mut Slots) -> Result<()> {
        if let (Some(device), None) = (&self.device, &slots.state) {
            slots.state = Some(device.place(&slots.layers)?);
        }
        Ok(())
    }

    /// Copies what is in the slots of a sequence to the host, and gives up their place on the GPU.
    pub(super) fn save(&self, slots: &mut Slots) -> Result<()> {
        match (&self.device, slots.state.take()) {
            (Some(device), Some(state)) => device.save(&state, &mut slots.layers),
            _ => Ok(()),
        }
    }

    /// Plans the rows of a step.
    pub(super) fn fill<'a>(
        &mut self,
        open: &OpenPolicy,
        batch: impl Iterator<Item = (&'a Sequence, usize)>,
    ) -> Result<()> {
        self.of_rows = vec![open.heads as i64];
        self.of_slots.clear();
        self.of_slots.extend(open.lens.iter().map(|&len| [open.heads as i64, len as i64]));
        if let Some(device) = &mut self.device {
            self.of_norms = vec![open.heads as i64, KV_NORMS as i64];
            self.rows.clear();
            let missing = || Error::new(Status::Internal, "a sequence without slots on the GPU");
            let mut planned = Vec::new();
            for (sequence, rows) in batch {
                let slots = sequence.slots.as_ref().ok_or_else(missing)?;
                let state = slots.state.as_ref().ok_or_else(missing)?;
                planned.push((state, &*slots.chosen.policy, &slots.layers[..], rows));
                self.rows.push(rows);
            }
            return device.plan(planned.into_iter());
        }
        let Self { plans, ranking, write_slots, token_pos, .. } = self;
        write_slots.iter_mut().for_each(Vec::clear);
        token_pos.iter_mut().for_each(Vec::clear);
        self.sequences = 0;
        for (sequence, rows) in batch {
            let slots =
                sequence.slots.as_ref().ok_or_else(|| Error::new(Status::Internal, "a sequence without slots"))?;
            if plans.len() == self.sequences {
                plans.push(Vec::new());
            }
            let plans = &mut plans[self.sequences];
            let policy = &*slots.chosen.policy;
            let layers = slots.layers.len();
            plans.resize_with(layers, SlotPlan::default);
            write_slots.resize_with(layers, Vec::new);
            token_pos.resize_with(layers, Vec::new);
            for (layer, (slots, plan)) in slots.layers.iter().zip(plans).enumerate() {
                slots.plan_into(policy, rows, ranking, plan)?;
                write_slots[layer].extend_from_slice(&plan.write_slots);
                slots.token_pos_after(plan, &mut token_pos[layer]);
            }
            self.sequences += 1;
        }
        self.weights.resize_with(open.names.len(), Vec::new);
        for (buffer, len) in self.weights.iter_mut().zip(&open.lens).filter(|_| open.needs().weights) {
            buffer.resize(self.sequences * open.heads * len, 0.0);
        }
        let rows = self.write_slots.first().map_or(0, Vec::len);
        let norms = if open.needs_norms() { open.names.len() } else { 0 };
        self.norms.resize_with(norms, Vec::new);
        self.norms.iter_mut().for_each(|norms| norms.resize(rows * KV_NORMS, 0.0));
        Ok(())
    }

    /// The inputs of the graph.
    pub(super) fn inputs<'a>(&'a self, open: &'a OpenPolicy) -> impl Iterator<Item = Input<'a>> {
        let of_layer = |all: &'a [Vec<i32>], layer: usize| Values::I32(&all[layer.min(all.len() - 1)]);
        let names = if self.are_on_device() { &[][..] } else { &open.names };
        names.iter().enumerate().flat_map(move |(layer, names)| {
            let write_slots = of_layer(&self.write_slots, layer);
            let token_pos = of_layer(&self.token_pos, layer);
            let of_slots = &self.of_slots[layer];
            [
                Input { name: &names.write_slots, numbers: write_slots, dim: Dim::Rows(0), inner: &self.of_rows },
                Input { name: &names.token_pos, numbers: token_pos, dim: Dim::Sequences, inner: of_slots },
            ]
        })
    }

    /// The outputs of the graph: tensors over the buffers of weights and norms, which must outlive them.
    pub(super) fn outputs<'a>(&mut self, open: &'a OpenPolicy) -> Result<Vec<(&'a str, Tensor)>> {
        let mut outputs = Vec::new();
        if self.are_on_device() {
            return Ok(outputs);
        }
        for ((names, buffer), len) in open.names.iter().zip(&mut self.weights).zip(&open.lens) {
            let Some(name) = &names.key_weights else { continue };
            let dims = [self.sequences as i64, open.heads as i64, *len as i64];
            // SAFETY: the buffer outlives the tensor, and nothing else uses it during the run.
            let tensor = unsafe { exec::tensor_in_place(&dims, buffer.as_mut_ptr(), buffer.len()) };
            outputs.push((name.as_str(), tensor?));
        }
        for (names, buffer) in open.names.iter().zip(&mut self.norms) {
            let Some(name) = &names.kv_norms else { continue };
            let rows = buffer.len() / (open.heads * KV_NORMS);
            let dims = [rows as i64, open.heads as i64, KV_NORMS as i64];
            // SAFETY: as above.
            let tensor = unsafe { exec::tensor_in_place(&dims, buffer.as_mut_ptr(), buffer.len()) };
            outputs.push((name.as_str(), tensor?));
        }
        Ok(outputs)
    }

    /// The inputs and outputs of the graph that are in GPU memory.
    pub(super) fn tensors<'a>(&'a self, open: &'a OpenPolicy) -> Vec<DeviceTensor<'a>> {
        let Some(device) = &self.device else { return Vec::new() };
        let mut all = Vec::new();
        for (layer, names) in open.names.iter().enumerate() {
            let tensors = device.tensors()[layer.min(device.tensors().len() - 1)];
            let of_slots = &self.of_slots[layer];
            let mut add = |name: Option<&'a String>, at: usize, is_output: bool, dim: Dim, inner: &'a [i64]| {
                let element = if is_output { ElementType::F32 } else { ElementType::I32 };
                let memory = device.memory();
                all.extend(name.map(|name| DeviceTensor { name, is_output, element, memory, at, dim, inner }));
            };
            add(Some(&names.write_slots), tensors.write_slots, false, Dim::Rows(0), &self.of_rows);
            add(Some(&names.token_pos), tensors.token_pos, false, Dim::Sequences, of_slots);
            add(names.key_weights.as_ref(), tensors.weights, true, Dim::Sequences, of_slots);
            add(names.kv_norms.as_ref(), tensors.norms, true, Dim::Rows(0), &self.of_norms);
        }
        all
    }

    /// The step has run on the GPU.
    fn commit_on_device<'a>(
        &mut self,
        open: &OpenPolicy,
        sequences: impl Iterator<Item = (u64, Option<&'a mut Slots>)>,
    ) -> Result<()> {
        let Some(device) = &mut self.device else { return Ok(()) };
        let all: usize = self.rows.iter().sum();
        let layers = if open.has_log() { 0..device.tensors().len() } else { 0..0 };
        let chosen = layers.map(|layer| device.chosen(layer, all)).collect::<Result<Vec<_>>>()?;
        device.commit()?;
        let mut first = 0;
        for (&rows, (number, slots)) in self.rows.iter().zip(sequences) {
            let own = first * open.heads..(first + rows) * open.heads;
            first += rows;
            let Some(Slots { chosen: policy, layers, .. }) = slots else { continue };
            if open.has_log() {
                self.log.push(SlotCall {
                    sequence: number,
                    position: layers[0].seen() as u64,
                    rows: rows as u32,
                    slots: chosen.iter().map(|chosen| chosen[own.clone()].to_vec()).collect(),
                });
            }
            layers.iter_mut().for_each(|layer| layer.advance(&*policy.policy, rows));
        }
        Ok(())
    }

    /// The step has run: the slots of its sequences, given in the order of the batch, are as they were planned.
    pub(super) fn commit<'a>(
        &mut self,
        open: &OpenPolicy,
        sequences: impl Iterator<Item = (u64, Option<&'a mut Slots>)>,
    ) -> Result<()> {
        if self.are_on_device() {
            return self.commit_on_device(open, sequences);
        }
        let Self { plans, weights, norms, lengths, errors, .. } = self;
        let mut first = 0;
        for (index, (plans, (number, slots))) in plans[..self.sequences].iter().zip(sequences).enumerate() {
            let count = plans.first().map_or(0, |plan| plan.write_slots.len());
            let own = first..first + count;
            first += count;
            let Some(slots) = slots else { continue };
            if open.has_log() {
                self.log.push(SlotCall {
                    sequence: number,
                    position: slots.seen() as u64,
                    rows: (count / open.heads) as u32,
                    slots: plans.iter().map(|plan| plan.slots.clone()).collect(),
                });
            }
            let Slots { chosen, layers, .. } = slots;
            for (layer, (plan, slots)) in plans.iter().zip(layers).enumerate() {
                let size = open.heads * open.lens[layer];
                let weights = if open.needs().weights { &weights[layer][index * size..][..size] } else { &[][..] };
                lengths.clear();
                errors.clear();
                if let Some(norms) = norms.get(layer) {
                    let own = &norms.as_chunks::<KV_NORMS>().0[own.clone()];
                    lengths.extend(own.iter().map(|[length, _, _]| length));
                    errors.extend(own.iter().map(|[_, key, value]| key + value));
                }
                slots.commit(&*chosen.policy, plan, weights, SlotValues { lengths: &*lengths, errors: &*errors })?;
            }
        }
        Ok(())
    }
}
