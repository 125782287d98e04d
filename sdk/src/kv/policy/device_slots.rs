//! The slots of sequences in GPU memory: plans are made there, and scores never leave it while a sequence runs.

use std::sync::Arc;

use pagoda_kernels::KV_NORMS;
use pagoda_kernels::cuda::{PolicyLayer, PolicyStep, SlotPolicies};

use super::cache_policy::{CachePolicy, DeviceRule, Needs};
use super::layer_slots::LayerSlots;
use crate::device::{CUdeviceptr, DeviceMemory, Gpu, PinnedMemory, SideStream};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;

/// The alignment of tensors in bytes.
const ALIGNMENT: usize = 256;

/// What memory [`DeviceSlots`] takes.
#[derive(Clone, Debug)]
pub struct SlotsShape {
    /// Heads of a layer.
    pub heads: usize,
    /// Slots of each head, for each layer.
    pub lens: Vec<usize>,
    /// Sequences whose slots are there at a time, and the most of a step.
    pub states: usize,
    /// The most rows of a step.
    pub rows: usize,
    /// What the policies need.
    pub needs: Needs,
}

/// Where the tensors of a step are in the memory of [`DeviceSlots`], in bytes, for one layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotTensors {
    /// i32 `[rows, heads]`: an input of `PagedAttention`, which a plan writes.
    pub write_slots: usize,
    /// i32 `[sequences, heads, len]`: the same.
    pub token_pos: usize,
    /// f32 `[sequences, heads, len]`: the output `key_weights`, where the policies need weights.
    pub weights: usize,
    /// f32 `[rows, heads, KV_NORMS]`: the output `kv_norms`, where the policies need lengths or errors.
    pub norms: usize,
    /// i32 `[rows, heads]`: the slots of the rows, for a log.
    chosen: usize,
}

/// What is known of the slots of one layer, `[states, heads, len]`, in bytes; 0 where the policies do not need it.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    positions: usize,
    scores: usize,
    lengths: usize,
    errors: usize,
    places: usize,
}

/// The slots of sequences in GPU memory.
///
/// A step is [`plan`](Self::plan), a run of the model with [`tensors`](Self::tensors), and [`commit`](Self::commit). Without the
/// last, all is as it was before. Counts of tokens and slots stay on the host, in [`LayerSlots`]: they do not depend on scores, so
/// nothing waits for those. Decisions are those of [`LayerSlots::plan`] with the same scores.
#[derive(Debug)]
pub struct DeviceSlots {
    gpu: &'static Gpu,
    stream: SideStream,
    shape: SlotsShape,
    memory: Arc<DeviceMemory>,
    known: Vec<Known>,
    tensors: Vec<SlotTensors>,
    /// `[layers]` of [`PolicyLayer`].
    layers: DeviceMemory,
    /// `[layers, sequences]` of [`PolicyStep`], as they are uploaded.
    staging: PinnedMemory,
    steps: DeviceMemory,
    /// Sequences of the plan.
    sequences: usize,
    free: Arc<Mutex<Vec<usize>>>,
}

/// The place of a sequence in [`DeviceSlots`]. It is free again when this is dropped.
#[derive(Debug)]
pub struct SlotState {
    number: usize,
    free: Arc<Mutex<Vec<usize>>>,
}

impl Drop for SlotState {
    fn drop(&mut self) {
        self.free.lock().push(self.number);
    }
}

impl DeviceSlots {
    /// Takes the memory.
    ///
    /// # Errors
    /// Those of the driver, e.g. CAPACITY if there is not enough memory.
    pub fn new(gpu: &'static Gpu, shape: SlotsShape) -> Result<Self> {
        let SlotsShape { heads, ref lens, states, rows, needs } = shape;
        let mut bytes = ALIGNMENT;
        let mut take = |numbers: usize, needed: bool| {
            let at = bytes;
            bytes += (numbers * size_of::<f32>()).next_multiple_of(ALIGNMENT) * usize::from(needed);
            if needed { at } else { 0 }
        };
        let (mut known, mut tensors) = (Vec::new(), Vec::new());
        for &len in lens {
            let all = states * heads * len;
            known.push(Known {
                positions: take(all, true),
                scores: take(all, needs.weights),
                lengths: take(all, needs.lengths),
                errors: take(all, needs.errors),
                places: take(all, true),
            });
            tensors.push(SlotTensors {
                write_slots: take(rows * heads, true),
                token_pos: take(all, true),
                weights: take(all, needs.weights),
                norms: take(rows * heads * KV_NORMS, needs.lengths || needs.errors),
                chosen: take(rows * heads, true),
            });
        }
        let memory = Arc::new(DeviceMemory::zeroed(gpu, bytes)?);
        let address = |at: usize| if at == 0 { 0 } else { memory.address() + at as CUdeviceptr };
        let layers = known.iter().zip(&tensors).zip(lens).map(|((known, tensors), &len)| PolicyLayer {
            positions: address(known.positions),
            scores: address(known.scores),
            lengths: address(known.lengths),
            errors: address(known.errors),
            places: address(known.places),
            write_slots: address(tensors.write_slots),
            chosen: address(tensors.chosen),
            token_pos: address(tensors.token_pos),
            weights: address(tensors.weights),
            norms: address(tensors.norms),
            len: len as i32,
            unused: 0,
        });
        let layers: Vec<PolicyLayer> = layers.collect();
        let on_device = DeviceMemory::zeroed(gpu, size_of_val(&layers[..]))?;
        // SAFETY: structs without padding, as bytes; nothing else uses the memory.
        unsafe { on_device.write(0, bytes_of(&layers)) }?;
        let step_bytes = lens.len() * states * size_of::<PolicyStep>();
        Ok(Self {
            stream: SideStream::new(gpu)?,
            layers: on_device,
            staging: PinnedMemory::zeroed(gpu, step_bytes)?,
            steps: DeviceMemory::zeroed(gpu, step_bytes)?,
            sequences: 0,
            free: Arc::new(Mutex::new((0..states).rev().collect())),
            gpu,
            memory,
            known,
            tensors,
            shape,
        })
    }

    /// The memory that [`tensors`](Self::tensors) are in.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// The tensors of a step, for each layer.
    pub fn tensors(&self) -> &[SlotTensors] {
        &self.tensors
    }

    /// A place for a sequence, with what is known of its slots.
    ///
    /// # Errors
    /// CAPACITY if all places are taken. RUNTIME if the GPU fails.
    pub fn place(&self, slots: &[LayerSlots]) -> Result<SlotState> {
        let number = self.free.lock().pop().ok_or_else(|| {
            let message = format!("the slots of {} sequences are on the GPU already", self.shape.states);
            Error::new(Status::Capacity, message)
        })?;
        let state = SlotState { number, free: Arc::clone(&self.free) };
        // Of a sequence that has not begun nothing is read.
        if slots.first().is_some_and(|slots| slots.seen() > 0) {
            self.stream.wait()?;
            for (known, slots) in self.known.iter().zip(slots) {
                let identity: Vec<u32>;
                let places = if slots.places.is_empty() {
                    identity = (0..slots.heads).flat_map(|_| 0..slots.len as u32).collect();
                    &identity
                } else {
                    &slots.places
                };
                self.write(&state, slots, known.positions, bytes_of(&slots.token_pos))?;
                self.write(&state, slots, known.places, bytes_of(places))?;
                self.write(&state, slots, known.scores, bytes_of(&slots.scores))?;
                self.write(&state, slots, known.lengths, bytes_of(&slots.lengths))?;
                self.write(&state, slots, known.errors, bytes_of(&slots.errors))?;
            }
        }
        Ok(state)
    }

    /// Copies what is known of a sequence's slots to the host, behind everything that was committed.
    ///
    /// # Errors
    /// RUNTIME if the GPU fails; then `slots` are of no use.
    pub fn save(&self, state: &SlotState, slots: &mut [LayerSlots]) -> Result<()> {
        self.stream.wait()?;
        for (known, slots) in self.known.iter().zip(slots) {
            let first = state.number * slots.heads * slots.len * size_of::<f32>();
            let read = |at: usize, to: &mut [u8]| match at {
                at if at == 0 || to.is_empty() => Ok(()),
                // SAFETY: the stream was waited for, and only steps write there.
                at => unsafe { self.memory.read(at + first, to) },
            };
            read(known.positions, bytes_of_mut(&mut slots.token_pos))?;
            read(known.places, bytes_of_mut(&mut slots.places))?;
            read(known.scores, bytes_of_mut(&mut slots.scores))?;
            read(known.lengths, bytes_of_mut(&mut slots.lengths))?;
            read(known.errors, bytes_of_mut(&mut slots.errors))?;
        }
        Ok(())
    }

    /// Chooses the slots of a step's rows: of each sequence its place, its policy, its slots and the number of its rows, in the order
    /// of the batch. What is known of the slots stays as it is. The tensors are there when this returns.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for more rows than a policy or the memory takes. UNSUPPORTED for a policy without a rule for GPUs. RUNTIME if
    /// the GPU fails.
    pub fn plan<'a>(
        &mut self,
        batch: impl Iterator<Item = (&'a SlotState, &'a dyn CachePolicy, &'a [LayerSlots], usize)>,
    ) -> Result<()> {
        self.sequences = 0;
        let (mut steps, mut row) = (Vec::new(), 0);
        for (state, policy, slots, rows) in batch {
            for slots in slots {
                let most = slots.most_rows(policy, usize::MAX);
                if rows == 0 || rows > most {
                    let message = format!("{rows} tokens in a call, which may have 1 to {most} now");
                    return Err(Error::invalid("rows", message));
                }
                steps.push(step(state, policy, slots, row..row + rows)?);
            }
            self.sequences += 1;
            row += rows;
        }
        if row > self.shape.rows || self.sequences > self.shape.states {
            let message = format!("{row} rows of {} sequences, for which there is no memory", self.sequences);
            return Err(Error::invalid("rows", message));
        }
        let layers = self.shape.lens.len();
        for (index, step) in steps.into_iter().enumerate() {
            let at = index % layers * self.sequences + index / layers;
            // SAFETY: inside the memory, by the check; the last upload from it was waited for.
            unsafe { self.staging.data().cast::<PolicyStep>().add(at).write(step) };
        }
        let used = layers * self.sequences * size_of::<PolicyStep>();
        // SAFETY: every memory is as long as the call says and belongs to this object, which `&mut self` has alone; runs that use its
        // tensors have ended. It is waited for below.
        unsafe {
            self.stream.upload(self.steps.address(), self.staging.data(), used)?;
            self.gpu.plan_slots(&self.call(), self.stream.raw())?;
        }
        Ok(self.stream.wait()?)
    }

    /// Takes the last plan over: the model has run with it, and has written weights and norms. What is copied from here, and the next
    /// plan, come behind it. The caller counts the tokens of the slots that it planned with.
    ///
    /// # Errors
    /// RUNTIME if the GPU fails.
    pub fn commit(&mut self) -> Result<()> {
        // SAFETY: as above.
        Ok(unsafe { self.gpu.commit_slots(&self.call(), self.stream.raw()) }?)
    }

    /// The slots of the last plan's rows, `[rows, heads]`, in one layer.
    ///
    /// # Errors
    /// RUNTIME if the GPU fails.
    pub fn chosen(&self, layer: usize, rows: usize) -> Result<Vec<u32>> {
        let mut chosen = vec![0_u32; rows * self.shape.heads];
        self.stream.wait()?;
        // SAFETY: the stream was waited for, and only plans write there.
        unsafe { self.memory.read(self.tensors[layer].chosen, bytes_of_mut(&mut chosen)) }?;
        Ok(chosen)
    }

    fn call(&self) -> SlotPolicies {
        SlotPolicies {
            layers: self.layers.address(),
            layer_count: self.shape.lens.len(),
            steps: self.steps.address(),
            sequences: self.sequences,
            heads: self.shape.heads,
            states: self.shape.states,
            total_rows: self.shape.rows,
        }
    }

    fn write(&self, state: &SlotState, slots: &LayerSlots, at: usize, from: &[u8]) -> Result<()> {
        let first = state.number * slots.heads * slots.len * size_of::<f32>();
        if at == 0 || from.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream was waited for, and the place is the sequence's own.
        Ok(unsafe { self.memory.write(at + first, from) }?)
    }
}

/// What a step does with one layer of a sequence.
fn step(
    state: &SlotState,
    policy: &dyn CachePolicy,
    slots: &LayerSlots,
    rows: std::ops::Range<usize>,
) -> Result<PolicyStep> {
    let rule = policy.device_rule(slots.len).ok_or_else(|| {
        let message = format!("{policy:?} has no rule for GPUs (CachePolicy::device_rule)");
        Error::new(Status::Unsupported, message)
    })?;
    let of_sequence = PolicyStep {
        state: state.number as i32,
        row: rows.start as i32,
        rows: rows.len() as i32,
        seen: slots.seen as i32,
        first: slots.first as i32,
        weighs: policy.needs().weights.into(),
        ..PolicyStep::default()
    };
    Ok(match rule {
        DeviceRule::Ring { kept } => PolicyStep { rule: 0, kept: kept as i32, ..of_sequence },
        DeviceRule::Lowest { scores, score_share } => PolicyStep {
            rule: 1,
            grace: scores.grace as i32,
            keep_initial: scores.keep_initial_fraction,
            normalise: scores.normalise.into(),
            by_length: scores.by_length.into(),
            by_error: score_share.is_some().into(),
            score_share: score_share.unwrap_or(1.0),
            ..of_sequence
        },
    })
}

fn bytes_of<T: Copy>(numbers: &[T]) -> &[u8] {
    // SAFETY: numbers, and structs of them without padding, seen as bytes.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn bytes_of_mut<T: Copy>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; every pattern of bits is a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
