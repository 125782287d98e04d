//! The buffers of a step: the model's inputs and its logits.

use pagoda_kernels::OUTPUT_BLOCK;

use super::super::exec::{self, BoundModel, DeviceOutput, Dim, Input, Placed, Sizes, Values};
use super::draft::MainPages;
use super::forms::{FormRunner, SequenceKey, Step};
use super::open_model::OpenModel;
use super::sampling::{DeviceSampler, Sampled, ToSample};
use super::sequence::Sequence;
use super::slot_buffers::SlotBuffers;
use crate::device::Gpu;
use crate::error::Result;
use crate::folder::generate::MainModel;
use crate::kv::KvLease;

/// From so many rows of logits on, tokens are sampled on the GPU. A batch that runs as a CUDA graph has as many as its shape.
const ROWS_ON_GPU: usize = 8;

/// The buffers of a step. They are reused by the next one.
#[derive(Default)]
pub(super) struct Workspace {
    input_ids: Vec<i32>,
    positions: Vec<i32>,
    row_offsets: Vec<i32>,
    cached_len: Vec<i32>,
    page_indptr: Vec<i32>,
    page_ids: Vec<i32>,
    logits_rows: Vec<i32>,
    /// The sequences, in order.
    keys: Vec<SequenceKey>,
    /// Present if the graph has another form than the paged one.
    form: Option<FormRunner>,
    /// The logits of `logits_rows`, in order, unless they are on the GPU.
    pub(super) logits: Vec<f32>,
    placed: Placed,
    /// Present if the model runs on a GPU, in batches that are large enough.
    on_gpu: Option<DeviceSampler>,
    /// What was sampled on the GPU for each sequence of the batch.
    pub(super) sampled: Vec<Option<Sampled>>,
    /// The largest of each [`OUTPUT_BLOCK`] logits of a row; empty where the graph does not give them.
    pub(super) maxima: Vec<f32>,
    /// With a policy: the slots of the step.
    pub(super) slots: SlotBuffers,
    /// For a draft model that reads them: the pages of the model that it drafts for.
    pub(super) main: Option<MainPages>,
}

impl Workspace {
    /// For a model that runs in batches of up to `max_batch` sequences and `max_rows` rows.
    pub(super) fn new(model: &OpenModel, max_batch: usize, max_rows: usize) -> Self {
        let device = model.device_id.filter(|_| max_batch >= ROWS_ON_GPU);
        let sampler = device.and_then(|device| {
            let gpu = Gpu::shared(device as usize).map_err(Into::into);
            gpu.and_then(|gpu| DeviceSampler::new(gpu, max_batch, model.folder.vocab_size as usize))
                .inspect_err(|error| log::warn!("tokens are sampled on the CPU: {error}"))
                .ok()
        });
        let slots = SlotBuffers::new(model, max_batch, max_rows.max(max_batch));
        Self { on_gpu: sampler, slots, form: FormRunner::new(model), ..Self::default() }
    }

    /// Fills the buffers with the rows of a step.
    pub(super) fn fill<'a>(
        &mut self,
        model: &OpenModel,
        batch: impl Iterator<Item = (&'a Sequence, usize)> + Clone,
        lease: &KvLease,
    ) -> Result<()> {
        if let Some(policy) = &model.policy {
            self.slots.fill(policy, batch.clone())?;
        }
        if self.form.is_some() {
            // Operators of the paged form wait for each layer; here the host reads pages.
            lease.wait(None)?;
        }
        self.begin();
        for ((sequence, rows), pages) in batch.zip(lease.pages_of_owners()) {
            let (begin, slots) = (sequence.cached, sequence.cached_slots());
            let key = (sequence.precedence, sequence.owner);
            self.push(key, sequence.next_tokens(rows), begin, slots, sequence.logits_from(rows), pages);
        }
        self.finish();
        Ok(())
    }

    /// Empties the buffers.
    pub(super) fn begin(&mut self) {
        let Self { input_ids, positions, row_offsets, cached_len, page_indptr, page_ids, logits_rows, .. } = self;
        for numbers in [&mut *input_ids, positions, row_offsets, cached_len, page_indptr, page_ids, logits_rows] {
            numbers.clear();
        }
        row_offsets.push(0);
        page_indptr.push(0);
        self.keys.clear();
    }

    /// Adds the rows of a sequence: its tokens from position `begin` on. The logits of those from `logits_from` on are needed.
    pub(super) fn push(
        &mut self,
        key: SequenceKey,
        tokens: impl Iterator<Item = u32>,
        begin: usize,
        cached: usize,
        logits_from: usize,
        pages: impl Iterator<Item = u32>,
    ) {
        self.keys.push(key);
        let at = self.input_ids.len();
        self.input_ids.extend(tokens.map(|token| token as i32));
        let rows = self.input_ids.len() - at;
        self.positions.extend((begin..begin + rows).map(|position| position as i32));
        self.logits_rows.extend((logits_from..rows).map(|row| (at + row) as i32));
        self.row_offsets.push(self.input_ids.len() as i32);
        self.cached_len.push(cached as i32);
        self.page_ids.extend(pages.map(|page| page as i32));
        self.page_indptr.push(self.page_ids.len() as i32);
    }

    /// All rows are there.
    pub(super) fn finish(&mut self) {
        // The first chunks of a prompt need no logits, but not every graph runs without any.
        if self.logits_rows.is_empty() {
            self.logits_rows.extend(self.input_ids.len().checked_sub(1).map(|row| row as i32));
        }
    }

    fn sizes(&self) -> Sizes {
        let rows_each =
            || self.row_offsets.windows(2).map(|bounds| (bounds[1] - bounds[0]) as usize).filter(|rows| *rows > 0);
        Sizes {
            sequences: self.cached_len.len(),
            rows: self.input_ids.len(),
            outputs: self.logits_rows.len(),
            pages: self.page_ids.len(),
            shortest: rows_each().min().unwrap_or(0),
            longest: rows_each().max().unwrap_or(0),
        }
    }

    /// Runs the model on the rows.
    pub(super) fn run(&mut self, model: &OpenModel) -> Result<()> {
        if self.form.is_some() {
            return self.run_form(model);
        }
        let (names, outputs) = (&model.folder.inputs, &model.folder.outputs);
        let width = model.folder.vocab_size as usize;
        let mut logits = std::mem::take(&mut self.logits);
        logits.resize(self.logits_rows.len() * width, 0.0);
        let blocks = width.div_ceil(OUTPUT_BLOCK);
        let maxima_name = model.logits_max();
        self.maxima.resize(if maxima_name.is_some() { self.logits_rows.len() * blocks } else { 0 }, 0.0);
        let dims = [self.logits_rows.len() as i64, blocks as i64];
        let other = maxima_name.map(|name| {
            // SAFETY: the buffer outlives the tensor, and nothing else uses it.
            unsafe { exec::tensor_in_place(&dims, self.maxima.as_mut_ptr(), self.maxima.len()) }
                .map(|tensor| (name, tensor))
        });
        let mut others = Vec::from_iter(other.transpose()?);
        if let Some(policy) = &model.policy {
            others.extend(self.slots.outputs(policy)?);
        }
        let bound = BoundModel {
            model: &model.model,
            kv: Some(&model.kv),
            pools_ready: model.kv.is_still(),
            pools: pairs(&names.kv_pools, &outputs.kv_pools),
            scales: pairs(&names.kv_scales, &outputs.kv_scales),
            output: &outputs.logits,
            width,
            device_output: self
                .on_gpu
                .as_ref()
                .map(|sampler| DeviceOutput { memory: sampler.logits(), least_rows: ROWS_ON_GPU }),
            read: self.of_main(model).map_or_else(|| Ok(Vec::new()), |(main, names)| main.pools(names))?,
            others,
            tensors: model.policy.as_ref().map_or_else(Vec::new, |policy| self.slots.tensors(policy)),
        };
        let inputs = self.inputs(model);
        // A captured graph has its tensors on the GPU.
        let graphs = model.graphs.as_ref().filter(|_| model.policy.is_none() || self.slots.are_on_device());
        // SAFETY: only this run uses the buffers. It writes only to pages of its own lease, behind the rows that other
        // sequences may read.
        let ran = unsafe { exec::run(&bound, graphs, &self.sizes(), &inputs, &mut logits, None) };
        drop(inputs);
        self.logits = logits;
        self.placed = ran?;
        Ok(())
    }

    /// The same for a graph in another form than the paged one.
    fn run_form(&mut self, model: &OpenModel) -> Result<()> {
        let Self { form, input_ids, row_offsets, cached_len, page_indptr, page_ids, logits_rows, keys, logits, .. } =
            self;
        logits.resize(logits_rows.len() * model.folder.vocab_size as usize, 0.0);
        let step = Step { input_ids, row_offsets, cached_len, page_indptr, page_ids, logits_rows, keys };
        form.as_mut().map_or(Ok(()), |form| form.run(model, &step, logits))
    }

    /// Samples the tokens of the batch into `sampled`, if its logits are on the GPU. The logits that nothing was sampled from go
    /// to the host. Returns how many tokens were sampled.
    pub(super) fn sample<'a>(
        &mut self,
        batch: impl Iterator<Item = (&'a Sequence, usize)> + Clone,
        vocab: usize,
    ) -> Result<usize> {
        let Some(sampler) = self.on_gpu.as_mut().filter(|_| self.placed == Placed::Device) else {
            self.sampled.clear();
            self.sampled.resize(batch.count(), None);
            return Ok(0);
        };
        let rows_of = |(sequence, rows): (&Sequence, usize)| rows - sequence.logits_from(rows);
        let masks: Vec<_> = batch.clone().map(|(sequence, rows)| sequence.mask(rows)).collect();
        let mut masks = masks.iter();
        let mut row = 0;
        let to_sample = batch.clone().map(|(sequence, rows)| {
            let first = row;
            row += rows_of((sequence, rows));
            let mask = masks.next().and_then(Option::as_deref);
            // For a beam search, and where the prompt's log probabilities are wanted, the host needs all logits. What a grammar forces
            // needs none.
            let on_gpu = row == first + 1 && !sequence.needs_prompt_logits() && sequence.beam.is_none();
            (on_gpu && sequence.constraint.is_some() == mask.is_some()).then(|| ToSample {
                row: first,
                sampler: &sequence.sampler,
                position: sequence.next_position(),
                logprobs: sequence.logprobs,
                mask,
            })
        });
        sampler.sample(to_sample, &mut self.sampled)?;
        let mut row = 0;
        for (sequence, sampled) in batch.zip(&self.sampled) {
            let rows = row..row + rows_of(sequence);
            row = rows.end;
            if sampled.is_none() && !rows.is_empty() {
                sampler.fetch(rows.clone(), &mut self.logits[rows.start * vocab..rows.end * vocab])?;
            }
        }
        Ok(self.sampled.iter().flatten().count())
    }

    fn inputs<'a>(&'a self, model: &'a OpenModel) -> Vec<Input<'a>> {
        let names = &model.folder.inputs;
        let all = [
            (Some(&names.input_ids), &self.input_ids, Dim::Rows(0)),
            (names.positions.as_ref(), &self.positions, Dim::Rows(0)),
            (Some(&names.row_offsets), &self.row_offsets, Dim::Bounds),
            (Some(&names.cached_len), &self.cached_len, Dim::Sequences),
            (Some(&names.page_indptr), &self.page_indptr, Dim::Bounds),
            (Some(&names.page_ids), &self.page_ids, Dim::Pages),
            (Some(&names.logits_rows), &self.logits_rows, Dim::Outputs),
        ];
        let input = |(name, numbers, dim): (Option<&'a String>, &'a Vec<i32>, Dim)| {
            name.map(|name| Input { name, numbers: Values::I32(numbers), dim, inner: &[] })
        };
        let slots = model.policy.as_ref().map(|policy| self.slots.inputs(policy));
        let of_main = self.of_main(model).map(|(main, names)| main.inputs(names));
        let others = slots.into_iter().flatten().chain(of_main.into_iter().flatten());
        all.into_iter().filter_map(input).chain(others).collect()
    }

    /// The pages of the main model, and the names that the graph has for them.
    fn of_main<'a>(&'a self, model: &'a OpenModel) -> Option<(&'a MainPages, &'a MainModel)> {
        self.main.as_ref().zip(model.folder.main.as_ref())
    }
}

/// Names of graph inputs with those of the outputs for the same tensors.
fn pairs<'a>(inputs: &'a [String], outputs: &'a [String]) -> Vec<(&'a str, &'a str)> {
    inputs.iter().map(String::as_str).zip(outputs.iter().map(String::as_str)).collect()
}
