//! The buffers of an instance: the rows of a batch, and its run.

use std::time::{Duration, Instant};

use super::super::exec::{self, BoundModel, Dim, Input, Sizes, Values};
use super::history::PreparedHistory;
use super::open_model::OpenModel;
use super::prepared_request::PreparedRequest;
use crate::error::{Error, Result, Status};
use crate::kv::KvCache;
use crate::runtime::Cancel;

/// The buffers of an instance. The next batch reuses them.
#[derive(Default)]
pub(super) struct Workspace {
    /// For [`prepare`](super::history::prepare).
    pub(super) fingerprints: Vec<u64>,
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

/// The result of a run.
pub(super) struct RunResult<'a> {
    /// The scores of all requests, in order.
    pub(super) scores: &'a [f32],
    /// The run time of ONNX Runtime.
    pub(super) run_time: Duration,
}

/// Runs the batch in the workspace.
pub(super) fn run<'a>(
    workspace: &'a mut Workspace,
    serving: &OpenModel,
    cancel: Option<&Cancel>,
) -> Result<RunResult<'a>> {
    let tasks = serving.folder.tasks.len();
    workspace.scores.clear();
    workspace.scores.resize(workspace.candidate_rows.len() * tasks, 0.0);

    let mut scores = std::mem::take(&mut workspace.scores);
    let begun = Instant::now();
    let ran = run_model(workspace, serving, &mut scores, cancel);
    let run_time = begun.elapsed();
    workspace.scores = scores;
    ran?;
    // Without an early exit the compiler can vectorise the loop.
    let finite = workspace.scores.iter().fold(true, |all, score| all & score.is_finite());
    if !finite && let Some(bad) = workspace.scores.iter().find(|score| !score.is_finite()) {
        let message = format!("the model gave the score {bad}: its weights are damaged, or too large for its numbers");
        return Err(Error::new(Status::Runtime, message));
    }
    Ok(RunResult { scores: &workspace.scores, run_time })
}

/// Runs the model on the rows in the workspace.
fn run_model(workspace: &Workspace, serving: &OpenModel, scores: &mut [f32], cancel: Option<&Cancel>) -> Result<()> {
    let (names, outputs) = (&serving.folder.inputs, &serving.folder.outputs);
    let inputs = workspace.inputs(serving);
    let bound = BoundModel {
        model: &serving.model,
        kv: serving.kv.as_ref(),
        pools_ready: serving.kv.as_ref().is_none_or(KvCache::is_still),
        pools: pairs(&names.kv_pools, &outputs.kv_pools),
        scales: pairs(&names.kv_scales, &outputs.kv_scales),
        output: &outputs.scores,
        width: serving.folder.tasks.len(),
        device_output: None,
        others: Vec::new(),
        read: Vec::new(),
        tensors: Vec::new(),
    };
    // SAFETY: only this run uses the buffers. It writes only to pages of its own leases, behind the rows that other
    // runs may read.
    unsafe { exec::run(&bound, serving.graphs.as_ref(), &workspace.sizes(), &inputs, scores, cancel) }.map(drop)
}

/// Names of graph inputs, each with that of its graph output.
fn pairs<'a>(inputs: &'a [String], outputs: &'a [String]) -> Vec<(&'a str, &'a str)> {
    inputs.iter().map(String::as_str).zip(outputs.iter().map(String::as_str)).collect()
}

impl Workspace {
    /// The inputs of the model, without the pools.
    fn inputs<'a>(&'a self, serving: &'a OpenModel) -> Vec<Input<'a>> {
        let names = &serving.folder.inputs;
        let mut inputs = Vec::with_capacity(serving.folder.features.len() + 10);
        for (feature, keys) in serving.folder.features.iter().zip(&self.keys) {
            let dim = Dim::Rows(serving.layout.no_key);
            inputs.push(Input { name: &feature.input, numbers: Values::I64(keys), dim, inner: &[] });
        }
        let candidates = Some(&names.candidate_rows);
        let longs = [
            (names.positions.as_ref(), &self.positions, Dim::Rows(0)),
            (names.times.as_ref(), &self.times, Dim::Rows(0)),
            (candidates, &self.candidate_rows, Dim::Outputs),
        ];
        let shorts = [
            (Some(&names.row_offsets), &self.row_offsets, Dim::Bounds),
            (Some(&names.num_candidates), &self.num_candidates, Dim::Sequences),
            (names.num_contextual.as_ref(), &self.num_contextual, Dim::Sequences),
            (names.cached_len.as_ref(), &self.cached_len, Dim::Sequences),
            (names.page_indptr.as_ref(), &self.page_indptr, Dim::Bounds),
            (names.page_ids.as_ref(), &self.page_ids, Dim::Pages),
        ];
        let longs = longs.into_iter().map(|(name, numbers, dim)| (name, Values::I64(numbers), dim));
        let shorts = shorts.into_iter().map(|(name, numbers, dim)| (name, Values::I32(numbers), dim));
        let named = longs
            .chain(shorts)
            .filter_map(|(name, numbers, dim)| name.map(|name| Input { name, numbers, dim, inner: &[] }));
        inputs.extend(named);
        inputs
    }

    pub(super) fn sizes(&self) -> Sizes {
        Sizes {
            sequences: self.num_candidates.len(),
            rows: self.positions.len(),
            outputs: self.candidate_rows.len(),
            pages: self.page_ids.len(),
            // Nothing asks.
            shortest: 0,
            longest: self.positions.len(),
        }
    }

    /// Empties the buffers for a model with this number of features.
    pub(super) fn clear(&mut self, features: usize) {
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

    /// Truncates the buffers to these sizes.
    pub(super) fn truncate(&mut self, to: &Sizes) {
        self.keys
            .iter_mut()
            .chain([&mut self.positions, &mut self.times])
            .for_each(|numbers| numbers.truncate(to.rows));
        self.candidate_rows.truncate(to.outputs);
        for numbers in [&mut self.num_candidates, &mut self.num_contextual, &mut self.cached_len] {
            numbers.truncate(to.sequences);
        }
        for bounds in [&mut self.row_offsets, &mut self.page_indptr] {
            bounds.truncate(to.sequences + 1);
        }
        self.page_ids.truncate(to.pages);
    }

    /// Adds the rows of one request. An error may leave some of them; see [`Self::truncate`].
    pub(super) fn add(&mut self, work: &PreparedRequest, ready: &PreparedHistory) -> Result<()> {
        let layout = &work.serving.layout;
        let (at, rows) = (self.positions.len(), ready.cached..work.rows());
        let new = (rows.end - rows.start) as usize;
        let all = at + new + work.num_candidates;
        let history = layout.history_rows(rows.clone(), ready.user_keys(work), ready.events(work));
        self.keys.iter_mut().for_each(|keys| keys.resize(all, layout.no_key));
        history.write_keys(at, &mut self.keys, ready.has_known_keys(work)).map_err(|error| error.about("events"))?;
        layout.candidate_rows(&work.candidates, at + new, &mut self.keys);
        if work.serving.folder.inputs.times.is_some() {
            history.times(&mut self.times);
            self.times.resize(all, work.time);
        }
        self.positions.extend(rows.start as i64..rows.end as i64);
        self.positions.resize(all, rows.end as i64);
        self.candidate_rows.extend((at + new) as i64..all as i64);
        self.row_offsets.push(self.positions.len() as i32);
        self.num_candidates.push(work.num_candidates as i32);
        self.num_contextual.push(layout.begin_rows() as i32);
        self.cached_len.push(ready.cached as i32);
        if let Some(lease) = &ready.lease {
            self.page_ids.extend(lease.pages().map(|page| page as i32));
        }
        self.page_indptr.push(self.page_ids.len() as i32);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::event_log::{EventLog, SentEvents};
    use super::super::history::prepare;
    use super::super::tests::{options, request, serving};
    use super::*;

    /// The rows of a workspace behind the first ones.
    fn rows_behind(workspace: &Workspace, first: &Sizes) -> Vec<Vec<i64>> {
        let of_rows = workspace.keys.iter().chain([&workspace.positions, &workspace.times]);
        of_rows.map(|numbers| numbers[first.rows..].to_vec()).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "opens a model")]
    fn rows_depend_neither_on_the_rows_before_them_nor_on_whether_all_keys_are_known() {
        let serving = serving(&options(), None);
        let remembered = EventLog::new(1 << 20, &serving.layout.signature);
        let mut workspace = Workspace::default();
        // The whole history; new events; some events again; some changed, so that the earlier ones are recalled; the
        // whole history again; nothing new; a change where a page begins.
        let steps: [(u64, &[i64], bool); 7] = [
            (0, &[3, 4, 5, 6, 7], false),
            (5, &[8, 9], true),
            (6, &[9, 10, 11], true),
            (8, &[2, 3, 4], true),
            (0, &[3, 4, 5, 6, 7, 8, 9, 10, 2, 3, 4, 5], false),
            (12, &[], true),
            (7, &[5, 5], true),
        ];
        for (start, items, keys_left_out) in steps {
            let mut request = request(1, items);
            request.start = (start > 0).then_some(start);
            if keys_left_out {
                request.user_keys.clear();
            }
            let mut work = PreparedRequest::new(&serving, &request).unwrap();
            let ready = prepare(&work, &remembered, &mut workspace.fingerprints).unwrap();
            assert!(items.is_empty() || !workspace.fingerprints.is_empty(), "histories are compared");
            assert_eq!(
                ready.has_known_keys(&work),
                start != 8,
                "its own events are used unless the history is recalled"
            );
            workspace.clear(serving.layout.features.len());
            let nothing = workspace.sizes();
            workspace.add(&work, &ready).unwrap();
            let alone = workspace.sizes();
            assert_eq!(alone.rows as u64, ready.rows(&work));
            work.known_events = false;
            workspace.add(&work, &ready).unwrap();
            let both = workspace.sizes();
            assert_eq!((both.sequences, both.outputs, both.pages), (2, 2 * alone.outputs, 2 * alone.pages));
            let behind = rows_behind(&workspace, &alone);
            workspace.truncate(&alone);
            assert_eq!(workspace.sizes(), alone);
            assert_eq!(behind, rows_behind(&workspace, &nothing), "from {start} on");
            ready.commit().unwrap();
            remembered.record(&SentEvents::new(&work), &serving.layout.signature);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "opens a model")]
    fn rows_of_a_request_that_can_not_be_added_are_removed() {
        let serving = serving(&options(), None);
        let remembered = EventLog::new(1 << 20, &serving.layout.signature);
        let mut workspace = Workspace::default();
        let ready = |user: u64, workspace: &mut Workspace| {
            let work = PreparedRequest::new(&serving, &request(user, &[3, 4, 5])).unwrap();
            let ready = prepare(&work, &remembered, &mut workspace.fingerprints).unwrap();
            (work, ready)
        };
        let [(first, of_first), (mut second, of_second)] = [1, 2].map(|user| ready(user, &mut workspace));
        workspace.clear(serving.layout.features.len());
        workspace.add(&first, &of_first).unwrap();
        let (sizes, rows) = (workspace.sizes(), workspace.keys.clone());
        let all = |workspace: &Workspace| {
            let Workspace { row_offsets, num_contextual, cached_len, page_indptr, .. } = workspace;
            [row_offsets, num_contextual, cached_len, page_indptr].map(Vec::clone)
        };
        let before = all(&workspace);
        // As if the events had been sent to another version with a larger table.
        second.known_events = false;
        *second.events.iter_mut().rev().nth(1).unwrap() = 1 << 40;
        let error = workspace.add(&second, &of_second).unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("events")), "{error}");
        workspace.truncate(&sizes);
        assert_eq!((workspace.sizes(), &workspace.keys, all(&workspace)), (sizes, &rows, before));
        second.events = first.events.clone();
        workspace.add(&second, &of_second).unwrap();
        assert_eq!(workspace.sizes().rows, 2 * sizes.rows);
    }
}
