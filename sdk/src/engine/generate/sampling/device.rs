//! Sampling on the GPU (kernels/cuda/llm/sampling.cuh): logits stay there, and only tokens come back.
//!
//! A step uploads the options of its rows with their masks and a list of the tokens that penalties, biases and bans are
//! about, launches one kernel, and waits for it. The kernel writes its results into pinned memory. Nothing is allocated.
//!
//! Rows that the kernel does not take are copied to the host and sampled there: those with more likeliest tokens than it
//! counts, those whose tokens to edit do not fit into the list, and those without any token left, whose error needs
//! all logits.

use std::ops::Range;
use std::sync::Arc;

use pagoda_kernels::cuda::{Sampling, SamplingResult, SamplingRow, TokenEdit};

use super::logprobs::TokenLogprobs;
use super::sampler::Sampler;
use crate::device::{CUdeviceptr, DeviceMemory, Gpu, PinnedMemory, SideStream};
use crate::error::Result;

/// The edits of all rows of a step: 2 MiB.
const MOST_EDITS: usize = 1 << 18;

/// A row of logits to sample.
#[derive(Clone, Copy)]
pub struct ToSample<'a> {
    /// Its row in [`DeviceSampler::logits`].
    pub row: usize,
    /// How its token is chosen.
    pub sampler: &'a Sampler,
    /// As for [`Sampler::sample`].
    pub position: u64,
    /// How many of the likeliest tokens are wanted, if log probabilities are.
    pub logprobs: Option<u32>,
    /// As for [`Sampler::sample`].
    pub mask: Option<&'a [u32]>,
}

/// A token that was sampled. It was not observed by its sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log probabilities, if they are wanted.
    pub logprobs: Option<TokenLogprobs>,
}

/// Samples rows of logits in GPU memory.
pub struct DeviceSampler {
    gpu: &'static Gpu,
    stream: SideStream,
    vocab: usize,
    /// For how many rows there is room.
    rows: usize,
    logits: Arc<DeviceMemory>,
    /// Rows, then edits, as they are uploaded.
    staging: PinnedMemory,
    uploaded: DeviceMemory,
    /// Masks, a row for each that has one, and how many there are.
    mask_staging: PinnedMemory,
    masks: DeviceMemory,
    mask_rows: usize,
    results: PinnedMemory,
    scratch: DeviceMemory,
    /// Which of the given rows the call has, in its order, and whether they want log probabilities.
    taken: Vec<(usize, bool)>,
}

impl DeviceSampler {
    /// Takes memory for `rows` rows of `vocab` logits.
    ///
    /// # Errors
    /// Those of the driver, e.g. CAPACITY if there is not enough memory.
    pub fn new(gpu: &'static Gpu, rows: usize, vocab: usize) -> Result<Self> {
        let bytes = edits_at(rows) + MOST_EDITS * size_of::<TokenEdit>();
        Ok(Self {
            stream: SideStream::new(gpu)?,
            logits: Arc::new(DeviceMemory::zeroed(gpu, rows * vocab * size_of::<f32>())?),
            staging: PinnedMemory::zeroed(gpu, bytes)?,
            uploaded: DeviceMemory::zeroed(gpu, bytes)?,
            mask_staging: PinnedMemory::zeroed(gpu, rows * mask_bytes(vocab))?,
            masks: DeviceMemory::zeroed(gpu, rows * mask_bytes(vocab))?,
            mask_rows: 0,
            results: PinnedMemory::zeroed(gpu, rows * size_of::<SamplingResult>())?,
            scratch: DeviceMemory::zeroed(gpu, gpu.sampling_scratch_bytes(rows, vocab))?,
            taken: Vec::with_capacity(rows),
            gpu,
            vocab,
            rows,
        })
    }

    /// Where the logits have to be, row by row.
    pub fn logits(&self) -> &Arc<DeviceMemory> {
        &self.logits
    }

    /// Samples rows, and writes to `sampled` what each got: `None` for `None`, and where the CPU has to sample. The logits must
    /// be there, and all runs that write them must have ended.
    ///
    /// # Errors
    /// RUNTIME if the GPU fails.
    pub fn sample<'a>(
        &mut self,
        rows: impl Iterator<Item = Option<ToSample<'a>>>,
        sampled: &mut Vec<Option<Sampled>>,
    ) -> Result<()> {
        sampled.clear();
        let edit_count = self.stage(rows.inspect(|_| sampled.push(None)));
        let row_count = self.taken.len();
        if row_count == 0 {
            return Ok(());
        }
        let used = match edit_count {
            0 => row_count * size_of::<SamplingRow>(),
            _ => edits_at(self.rows) + edit_count * size_of::<TokenEdit>(),
        };
        let uploaded = self.uploaded.address();
        let call = Sampling {
            logits: self.logits.address(),
            logits_rows: self.rows,
            vocab: self.vocab,
            rows: uploaded,
            row_count,
            edits: uploaded + edits_at(self.rows) as CUdeviceptr,
            edit_count,
            masks: self.masks.address(),
            mask_rows: self.mask_rows,
            results: self.results.address(),
            scratch: self.scratch.address(),
        };
        // SAFETY: every memory is as long as the call says and belongs to this object, which `&mut self` has alone; the run
        // that wrote the logits has ended. It is waited for below.
        unsafe {
            self.stream.upload(uploaded, self.staging.data(), used)?;
            if self.mask_rows > 0 {
                let used = self.mask_rows * mask_bytes(self.vocab);
                self.stream.upload(self.masks.address(), self.mask_staging.data(), used)?;
            }
            self.gpu.sample(&call, self.stream.raw())?;
        }
        self.stream.wait()?;
        for (at, &(index, logprobs)) in self.taken.iter().enumerate() {
            // SAFETY: inside the memory, because there are no more rows than `rows`; the kernel that writes it has ended.
            let result = unsafe { self.results.data().cast::<SamplingResult>().add(at).read_volatile() };
            sampled[index] = read(&result, logprobs);
        }
        Ok(())
    }

    /// Copies rows of the logits to the host.
    ///
    /// # Errors
    /// RUNTIME if the GPU fails.
    pub fn fetch(&self, rows: Range<usize>, to: &mut [f32]) -> Result<()> {
        let row_bytes = self.vocab * size_of::<f32>();
        assert_eq!((rows.len() * self.vocab, rows.end <= self.rows), (to.len(), true));
        let from = self.logits.address() + (rows.start * row_bytes) as CUdeviceptr;
        // SAFETY: inside the memory, by the line above; nothing writes there between runs. It is waited for below.
        unsafe { self.stream.download(to.as_mut_ptr().cast(), from, size_of_val(to)) }?;
        Ok(self.stream.wait()?)
    }

    /// Writes the rows that the kernel takes, and their edits, to be uploaded. Returns the number of edits.
    fn stage<'a>(&mut self, rows: impl Iterator<Item = Option<ToSample<'a>>>) -> usize {
        self.taken.clear();
        self.mask_rows = 0;
        let mut edits = Edits { to: self.edits(), len: 0, full: false };
        for (index, row) in rows.enumerate() {
            let Some(row) = row.filter(|row| row.row < self.rows && self.taken.len() < self.rows) else { continue };
            let begin = edits.len;
            match describe(&row, &mut edits) {
                Some(mut described) => {
                    described.mask = self.stage_mask(row.mask);
                    // SAFETY: inside the memory, because `taken` has fewer than `rows`; nothing reads it now.
                    unsafe { self.staging.data().cast::<SamplingRow>().add(self.taken.len()).write(described) };
                    self.taken.push((index, row.logprobs.is_some()));
                }
                None => (edits.len, edits.full) = (begin, false),
            }
        }
        edits.len
    }

    /// Writes a mask, to be uploaded. Returns its row.
    fn stage_mask(&mut self, mask: Option<&[u32]>) -> i32 {
        let Some(mask) = mask else { return -1 };
        let (row, words) = (self.mask_rows, self.vocab.div_ceil(32));
        // SAFETY: inside the memory, because there are no more masks than rows; nothing reads it now.
        let to =
            unsafe { std::slice::from_raw_parts_mut(self.mask_staging.data().cast::<u32>().add(row * words), words) };
        to.copy_from_slice(&mask[..words]);
        self.mask_rows += 1;
        row as i32
    }

    fn edits(&self) -> *mut TokenEdit {
        // SAFETY: inside the memory.
        unsafe { self.staging.data().add(edits_at(self.rows)).cast() }
    }
}

fn mask_bytes(vocab: usize) -> usize {
    vocab.div_ceil(32) * size_of::<u32>()
}

/// Where the edits begin behind so many rows.
fn edits_at(rows: usize) -> usize {
    (rows * size_of::<SamplingRow>()).next_multiple_of(16)
}

/// The list of edits, in pinned memory with room for [`MOST_EDITS`].
struct Edits {
    to: *mut TokenEdit,
    len: usize,
    full: bool,
}

impl Edits {
    /// Appends edits while there is room. Returns their number.
    fn extend(&mut self, edits: impl Iterator<Item = TokenEdit>) -> i32 {
        let begin = self.len;
        for edit in edits {
            if self.len == MOST_EDITS {
                self.full = true;
                break;
            }
            // SAFETY: there is room, and nothing reads it now.
            unsafe { self.to.add(self.len).write(edit) };
            self.len += 1;
        }
        (self.len - begin) as i32
    }
}

/// A row as the kernel gets it. `None` if the kernel does not take it.
fn describe(row: &ToSample<'_>, edits: &mut Edits) -> Option<SamplingRow> {
    let (sampler, options) = (row.sampler, &row.sampler.options);
    let top_n = row.logprobs.map_or(Some(-1), |top| i32::try_from(top).ok())?;
    if top_n > Sampling::MOST_TOP as i32 {
        return None;
    }
    let first_edit = edits.len as i32;
    let bias = |&(token, bias): &(u32, f32)| TokenEdit { token, value: bias.to_bits() };
    let biases = edits.extend(options.logit_bias.iter().map(bias));
    let seen = sampler.seen.iter().flat_map(|seen| seen.iter());
    let seen = edits.extend(seen.map(|seen| TokenEdit { token: seen.token, value: seen.outputs }));
    let followers = sampler.ngrams.iter().flat_map(|ngrams| ngrams.followers());
    let eos = sampler.eos.iter().copied().filter(|_| sampler.bans_eos());
    let bans = edits.extend(followers.chain(eos).map(|token| TokenEdit { token, value: 0 }));
    let top_k = i32::try_from(options.top_k).unwrap_or(0);
    (!edits.full).then_some(SamplingRow {
        seed: sampler.seed,
        position: row.position,
        row: row.row as i32,
        first_edit,
        biases,
        seen,
        bans,
        mask: -1,
        forced: sampler.forced().map_or(-1, |token| token as i32),
        top_k,
        top_n,
        temperature: if options.is_greedy() { 0.0 } else { options.temperature },
        top_p: options.top_p,
        min_p: options.min_p,
        repetition: options.repetition_penalty,
        presence: options.presence_penalty,
        frequency: options.frequency_penalty,
        unused: 0,
    })
}

fn read(result: &SamplingResult, wants_logprobs: bool) -> Option<Sampled> {
    let token = u32::try_from(result.token).ok()?;
    let logprobs = wants_logprobs.then(|| {
        let tops = result.top_tokens.iter().copied().zip(result.top_logprobs);
        let top = tops.take(result.top_count.max(0) as usize).collect();
        TokenLogprobs { logprob: result.logprob, rank: result.rank as u32, top }
    });
    Some(Sampled { token, logprobs })
}
