//! One run of the model: the rows of several requests in, their scores out.

use std::time::{Duration, Instant};

use super::history::Ready;
use super::work::Work;
use crate::error::{Error, Result, Status};
use crate::runtime::Cancel;
use crate::tensor::{Scalar, Tensor};

/// The buffers of an instance, kept from one run to the next.
#[derive(Default)]
pub(super) struct Workspace {
    /// For [`prepare`](super::history::prepare).
    pub(super) items: Vec<u64>,
    /// The keys of each feature.
    keys: Vec<Vec<i64>>,
    positions: Vec<i64>,
    times: Vec<i64>,
    candidate_rows: Vec<i64>,
    row_offsets: Vec<i32>,
    num_candidates: Vec<i32>,
    num_contextual: Vec<i32>,
    cached_len: Vec<i32>,
    page_indptr: Vec<i32>,
    page_ids: Vec<i32>,
    scores: Vec<f32>,
}

/// What came of a run.
pub(super) struct Ran<'a> {
    /// The scores of all requests, one after the other.
    pub(super) scores: &'a [f32],
    /// How long ONNX Runtime took.
    pub(super) took: Duration,
}

/// Runs requests of one model together.
pub(super) fn run<'a>(
    workspace: &'a mut Workspace,
    batch: &[(&Work, &Ready)],
    cancel: Option<&Cancel>,
) -> Result<Ran<'a>> {
    workspace.clear(batch[0].0.serving.layout.features.len());
    for (work, ready) in batch {
        workspace.add(work, ready)?;
    }
    let serving = &batch[0].0.serving;
    let tasks = serving.folder.tasks.len();
    workspace.scores.clear();
    workspace.scores.resize(workspace.candidate_rows.len() * tasks, 0.0);

    let (inputs, outputs) = (&serving.folder.inputs, &serving.folder.outputs);
    let mut tensors = Vec::with_capacity(serving.folder.features.len() + 10);
    for (feature, keys) in serving.folder.features.iter().zip(&workspace.keys) {
        tensors.push((feature.input.as_str(), over(keys)?));
    }
    for (name, numbers) in [(&inputs.positions, &workspace.positions), (&inputs.times, &workspace.times)] {
        if let Some(name) = name {
            tensors.push((name, over(numbers)?));
        }
    }
    tensors.push((&inputs.candidate_rows, over(&workspace.candidate_rows)?));
    let numbers = [
        (Some(&inputs.row_offsets), &workspace.row_offsets),
        (Some(&inputs.num_candidates), &workspace.num_candidates),
        (inputs.num_contextual.as_ref(), &workspace.num_contextual),
        (inputs.cached_len.as_ref(), &workspace.cached_len),
        (inputs.page_indptr.as_ref(), &workspace.page_indptr),
        (inputs.page_ids.as_ref(), &workspace.page_ids),
    ];
    for (name, numbers) in numbers {
        if let Some(name) = name {
            tensors.push((name, over(numbers)?));
        }
    }
    let rows = workspace.candidate_rows.len() as i64;
    // SAFETY: the buffer outlives the tensor, and no one else has it.
    let scores = unsafe { borrowed(&[rows, tasks as i64], workspace.scores.as_mut_ptr(), workspace.scores.len()) }?;
    let mut fed: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let mut bound: Vec<(&str, Option<&Tensor>)> = vec![(&outputs.scores, Some(&scores))];
    if let Some(kv) = &serving.kv {
        for (layer, (name_in, name_out)) in (0..).zip(inputs.kv_pools.iter().zip(&outputs.kv_pools)) {
            let pool = kv.pool(layer)?;
            fed.push((name_in, pool));
            bound.push((name_out, Some(pool)));
        }
    }
    let begun = Instant::now();
    // SAFETY: the buffers are this run's alone. Of the pools it writes only pages that its leases hold, beyond what
    // others may read.
    unsafe { serving.model.run_bound(&fed, &bound, cancel) }?;
    let took = begun.elapsed();
    drop((tensors, scores));
    if let Some(bad) = workspace.scores.iter().find(|score| !score.is_finite()) {
        let message = format!("the model gave the score {bad}: its weights are damaged, or too large for its numbers");
        return Err(Error::new(Status::Runtime, message));
    }
    Ok(Ran { scores: &workspace.scores, took })
}

impl Workspace {
    fn clear(&mut self, features: usize) {
        self.keys.resize_with(features, Vec::new);
        self.keys
            .iter_mut()
            .chain([&mut self.positions, &mut self.times, &mut self.candidate_rows])
            .for_each(Vec::clear);
        let Self { row_offsets, num_candidates, num_contextual, cached_len, page_indptr, page_ids, .. } = self;
        for numbers in [row_offsets, num_candidates, num_contextual, cached_len, page_indptr, page_ids] {
            numbers.clear();
        }
        self.row_offsets.push(0);
        self.page_indptr.push(0);
    }

    /// Adds the rows of one request.
    fn add(&mut self, work: &Work, ready: &Ready) -> Result<()> {
        let layout = &work.serving.layout;
        let (user_keys, events, rows) = (ready.user_keys(work), ready.events(work), work.rows());
        let resolve = |feature: usize, key: i64| layout.features[feature].resolve(key, layout.no_key);
        let mut failed = None;
        for row in ready.cached..rows {
            self.keys.iter_mut().for_each(|keys| keys.push(layout.no_key));
            let at = self.positions.len();
            let keys = &mut self.keys;
            let time = layout.history_row(row, user_keys, events, |feature, key| match resolve(feature, key) {
                Ok(key) => keys[feature][at] = key,
                Err(error) => failed = Some(error),
            });
            self.positions.push(row as i64);
            self.times.push(time);
        }
        if let Some(error) = failed {
            return Err(error.about("events"));
        }
        for candidate in work.candidates.chunks_exact(layout.of_candidate.len()) {
            self.keys.iter_mut().for_each(|keys| keys.push(layout.no_key));
            let (at, keys) = (self.positions.len(), &mut self.keys);
            layout.candidate_row(candidate, |feature, key| keys[feature][at] = key);
            self.candidate_rows.push(at as i64);
            self.positions.push(rows as i64);
            self.times.push(work.time);
        }
        self.row_offsets.push(self.positions.len() as i32);
        self.num_candidates.push(work.num_candidates as i32);
        self.num_contextual.push(layout.begin_rows() as i32);
        self.cached_len.push(ready.cached as i32);
        if let Some(lease) = &ready.lease {
            self.page_ids.extend_from_slice(lease.page_ids().as_slice()?);
        }
        self.page_indptr.push(self.page_ids.len() as i32);
        Ok(())
    }
}

/// A tensor over a buffer, to be read.
fn over<T: Scalar>(numbers: &[T]) -> Result<Tensor> {
    // SAFETY: an input is not written to, and the tensors of a run are gone before its buffers change.
    unsafe { borrowed(&[numbers.len() as i64], numbers.as_ptr().cast_mut(), numbers.len()) }
}

/// # Safety
/// The memory outlives the tensor, and is written by no one else while a run uses it.
unsafe fn borrowed<T: Scalar>(dims: &[i64], data: *mut T, len: usize) -> Result<Tensor> {
    // SAFETY: by contract; the memory has so many elements.
    unsafe { Tensor::from_memory(T::TYPE, dims, data.cast(), len * size_of::<T>(), Box::new(())) }
}
