//! Continuous batching: which sequences run, and the steps that run them.
//!
//! Every step runs one row of each sequence that decodes and chunks of prompts together. A sequence joins when there are
//! pages for it, and leaves with its last token. When pages run out, the sequence of least precedence is preempted: its keys
//! and values stay in the cache as long as there is room, then go to the store or are computed again.

mod beams;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::beams::Places;
use super::super::batching::catch_panic;
use super::answers::{Answers, Ended};
use super::draft::{DraftModel, Speculation};
use super::grammar::MaskWorker;
use super::kv_policy::SlotCall;
use super::open_model::OpenModel;
use super::options::GeneratorOptions;
use super::pace::Pace;
use super::plan::{self, Precedence};
use super::prefixes;
use super::request::FinishReason;
use super::sampling::Scratch;
use super::sequence::{Logits, Maxima, Sequence};
use super::sessions::Sessions;
use super::slot_sessions::SlotSessions;
use super::stats::Counters;
use super::workspace::Workspace;
use crate::error::{Error, Result, Status};
use crate::kv::{KvLease, KvRequest, Owner};
use crate::store::Ticket;

/// How often a sequence may find its keys and values in use before it fails.
const BUSY_STEPS: u32 = 1000;
/// How many sequences that wait for others are passed over in one step.
const MOST_SKIPPED: usize = 256;

/// The sequences of a generator.
pub(super) struct Scheduler {
    model: Arc<OpenModel>,
    sessions: Sessions,
    slot_sessions: SlotSessions,
    counters: Arc<Counters>,
    max_batch: usize,
    max_rows: usize,
    stretch: f32,
    share_prefixes: bool,
    waiting: BTreeMap<Precedence, Sequence>,
    running: BTreeMap<Precedence, Sequence>,
    workspace: Workspace,
    scratch: Scratch,
    /// Started with the first grammar.
    masks: Option<MaskWorker>,
    pace: Pace,
    speculation: Arc<Speculation>,
    draft_model: Option<DraftModel>,
    busy_steps: u32,
    /// The time of this step that the model took.
    in_model: Duration,
    /// The answers that got tokens in this step, and whose readers are not woken yet.
    to_wake: Vec<Arc<Answers>>,
}

impl Scheduler {
    pub(super) fn new(
        model: Arc<OpenModel>,
        options: &GeneratorOptions,
        sessions: Sessions,
        slot_sessions: SlotSessions,
        counters: Arc<Counters>,
        (speculation, draft_model): (Arc<Speculation>, Option<DraftModel>),
    ) -> Self {
        Self {
            workspace: Workspace::new(&model, options.max_batch as usize, options.max_batch_tokens as usize),
            sessions,
            slot_sessions,
            counters,
            max_batch: options.max_batch as usize,
            max_rows: options.max_batch_tokens as usize,
            stretch: options.max_stretch,
            share_prefixes: options.share_prefixes && model.policy.is_none(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            scratch: Scratch::default(),
            masks: None,
            pace: Pace::default(),
            speculation,
            draft_model,
            busy_steps: 0,
            in_model: Duration::ZERO,
            to_wake: Vec::new(),
            model,
        }
    }

    pub(super) fn add(&mut self, sequence: Sequence) {
        self.waiting.insert(sequence.precedence, sequence);
    }

    /// The sequences that wait, and those that run.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// The earliest deadline of a sequence that waits.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.waiting.values().filter_map(|sequence| sequence.answers.deadline()).min()
    }

    /// Ends all sequences as cancelled.
    pub(super) fn cancel_all(&mut self) {
        while let Some((_, sequence)) = self.waiting.pop_first().or_else(|| self.running.pop_first()) {
            self.end(sequence, Ok(FinishReason::Cancelled));
        }
        self.sessions.finish();
    }

    /// Runs one step. Returns whether anything was computed.
    pub(super) fn step(&mut self) -> bool {
        let begun = Instant::now();
        self.end_early();
        self.admit();
        let Some((batch, lease)) = self.prepare() else { return false };
        let decoding = batch.iter().filter(|(key, _)| self.running[key].need().rows == 1).count();
        let drafted: usize = batch.iter().map(|(key, rows)| self.running[key].drafted(*rows)).sum();
        let rows: usize = batch.iter().map(|(_, rows)| rows).sum();
        self.in_model = Duration::ZERO;
        self.run(&batch, lease);
        let took = begun.elapsed();
        self.counters.step(took, self.in_model, batch.len(), rows);
        // Drafting has a price of its own.
        let took = took.saturating_sub(self.draft_model.as_ref().map_or(Duration::ZERO, DraftModel::took));
        match (drafted, rows - decoding - drafted) {
            (0, of_prompts) => self.pace.measured(decoding, of_prompts, took),
            (_, 0) => self.pace.measured_drafts(drafted, took),
            // What each took of it is not known.
            _ => {}
        }
        // A reader that is woken may take this thread's core.
        self.to_wake.drain(..).for_each(|answers| answers.wake());
        true
    }

    /// Ends what was cancelled or has timed out.
    fn end_early(&mut self) {
        let now = Instant::now();
        for of_waiting in [true, false] {
            let sequences = if of_waiting { &mut self.waiting } else { &mut self.running };
            let ends = |sequence: &Sequence| match sequence.answers.has_failed() {
                // The error of another answer has ended the request.
                true => Some(FinishReason::Cancelled),
                false => sequence.ends_early(now),
            };
            let ended: Vec<_> = sequences.iter().filter_map(|(&key, sequence)| Some((key, ends(sequence)?))).collect();
            for (key, reason) in ended {
                let sequences = if of_waiting { &mut self.waiting } else { &mut self.running };
                if let Some(sequence) = sequences.remove(&key) {
                    self.end(sequence, Ok(reason));
                }
            }
        }
    }

    /// Admits sequences in order, while there are pages for them.
    fn admit(&mut self) {
        if self.waiting.is_empty() || self.running.len() >= self.max_batch {
            return;
        }
        let mut owners: HashSet<Owner> = self.running.values().map(|sequence| sequence.owner).collect();
        let mut computing = HashSet::new();
        self.running.values().for_each(|sequence| self.note_pages(sequence, &mut computing));
        let mut pages: u64 = self.running.values().map(|sequence| self.own_pages(sequence)).sum();
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut places = Places::of(self.running.values());
        let mut keys = places.waiting(&waiting);
        keys.extend(waiting.keys().take(self.max_batch + MOST_SKIPPED));
        let mut admitted = Vec::new();
        for key in keys {
            let Some(sequence) = waiting.get_mut(&key) else { continue };
            if places.with(sequence) > self.max_batch {
                break;
            }
            // Such a sequence waits for another one that runs, and those behind it may go before it.
            if owners.contains(&sequence.owner)
                || sequence.choice > 0 && self.model.policy.is_none() && !sequence.answers.is_prompt_done()
                || self.page_ends(sequence).any(|end| computing.contains(&end))
            {
                continue;
            }
            // Beams that are brought in one after the other may push out each other.
            let waits = owners.is_empty() || places.has(sequence);
            let Self { model, slot_sessions, share_prefixes, .. } = self;
            if !sequence.looked_up && !prefixes::look_up(model, slot_sessions, sequence, *share_prefixes, waits) {
                continue;
            }
            sequence.looked_up = true;
            // A sequence that is alone fits, or it was refused. Without its other beams a search would wait for ever.
            if !waits && pages + self.pages_to_join(sequence) > self.model.pages {
                break;
            }
            pages += self.own_pages(sequence);
            places.take(sequence);
            owners.insert(sequence.owner);
            self.note_pages(sequence, &mut computing);
            admitted.push(key);
        }
        for key in admitted {
            if let Some(mut sequence) = waiting.remove(&key) {
                if sequence.clock.started.is_none() {
                    sequence.clock.started = Some(Instant::now());
                    self.counters.cached(sequence.cached);
                }
                self.running.insert(key, sequence);
            }
        }
        self.waiting = waiting;
    }

    /// The pages that a sequence takes, and shares with no other. With a policy all that it ever takes: slots that are
    /// overwritten can not be computed again as they were, so that it must not be preempted.
    fn own_pages(&self, sequence: &Sequence) -> u64 {
        let tokens = match self.model.policy {
            Some(_) => sequence.prompt + sequence.ends.max_new_tokens,
            None => sequence.tokens.len() + 1,
        };
        self.model.pages_of(tokens) - sequence.shared_pages
    }

    /// Notes the pages that a sequence computes, so that others wait for them instead of computing them, too.
    fn note_pages(&self, sequence: &Sequence, computing: &mut HashSet<u64>) {
        if self.share_prefixes && sequence.need().rows > 1 {
            let done = sequence.cached / self.model.folder.kv.page_size as usize;
            computing.extend(self.page_ends(sequence).skip(done));
        }
    }

    /// The items at the ends of a sequence's pages, which stand for all that comes before them.
    fn page_ends<'a>(&self, sequence: &'a Sequence) -> impl Iterator<Item = u64> + use<'a> {
        let page = self.model.folder.kv.page_size as usize;
        sequence.cacheable().iter().skip(page - 1).step_by(page).copied()
    }

    /// Divides the rows of a step among the running sequences, and takes pages for them. `None` if there is nothing to run.
    fn prepare(&mut self) -> Option<(Vec<(Precedence, usize)>, KvLease)> {
        if self.speculation.take_cleared() {
            self.pace.forget_drafts();
            self.draft_model.iter_mut().for_each(DraftModel::forget_costs);
            self.counters.clear_drafts();
            self.running.values_mut().chain(self.waiting.values_mut()).for_each(Sequence::forget_drafts);
        }
        let drafting = self.draft_model.as_ref().map_or(0.0, DraftModel::seconds);
        let mut costs = self.pace.costs(self.running.len(), drafting).filter(|_| self.speculation.is_on());
        loop {
            for sequence in self.running.values_mut() {
                // It was evicted while it waited, or by another thread.
                if (self.model.kv.lookup(&[sequence.owner])[0].length as usize) < sequence.cached_slots() {
                    prefixes::look_up(&self.model, &mut self.slot_sessions, sequence, self.share_prefixes, true);
                }
                sequence.guess(costs);
            }
            if let Some(draft_model) = &mut self.draft_model {
                // A sequence alone has no others to stall.
                let prompt_rows = if self.running.len() > 1 { self.pace.chunk(self.stretch) } else { usize::MAX };
                draft_model.draft(&self.model.kv, &mut self.running, prompt_rows);
            }
            let policy = self.model.policy.as_ref();
            let needs: Vec<_> = self.running.values().map(|sequence| sequence.need_by(policy)).collect();
            let rows = plan::divide(&needs, self.max_rows, self.pace.chunk(self.stretch));
            let batch: Vec<_> = self.running.keys().copied().zip(rows).filter(|(_, rows)| *rows > 0).collect();
            if batch.is_empty() {
                return None;
            }
            let requests: Vec<KvRequest<'_>> =
                batch.iter().map(|(key, rows)| self.running[key].kv_request(*rows)).collect();
            let prepared = catch_panic(|| self.model.kv.prepare_for_run(&requests));
            drop(requests);
            match prepared {
                Ok(lease) => {
                    self.busy_steps = 0;
                    return Some((batch, lease));
                }
                // No sequence leaves for another one's guesses.
                Err(_) if batch.iter().any(|(key, rows)| self.running[key].drafted(*rows) > 0) => costs = None,
                Err(error) => self.make_room(&batch, error),
            }
        }
    }

    /// Has one sequence leave the batch whose pages could not be had.
    fn make_room(&mut self, batch: &[(Precedence, usize)], error: Error) {
        let (&(last, _), others) = batch.split_last().expect("a batch has sequences");
        let of_argument = error.argument().and_then(|argument| argument.strip_prefix("requests["));
        let index = of_argument.and_then(|rest| rest.split(']').next()).and_then(|index| index.parse::<usize>().ok());
        match (error.status(), index.and_then(|index| batch.get(index))) {
            (Status::Capacity, _) if !others.is_empty() => {
                // Also one that got no rows in this step: its pages are the first to leave.
                let youngest = self.running.keys().next_back().copied().unwrap_or(last);
                self.preempt(youngest);
            }
            // Another thread has changed what is cached of it.
            (Status::InvalidArgument, Some((key, _))) if self.busy_steps < BUSY_STEPS => {
                self.busy_steps += 1;
                if let Some(sequence) = self.running.get_mut(key) {
                    prefixes::look_up(&self.model, &mut self.slot_sessions, sequence, self.share_prefixes, true);
                }
            }
            (Status::Busy, _) if self.busy_steps < BUSY_STEPS => {
                self.busy_steps += 1;
                std::thread::yield_now();
            }
            (_, Some(&(key, _))) => self.fail(key, error),
            _ => self.fail(last, error),
        }
    }

    /// Puts a sequence back among those that wait. What is cached of it can be evicted from now on.
    fn preempt(&mut self, key: Precedence) {
        if let Some(mut sequence) = self.running.remove(&key) {
            (sequence.looked_up, sequence.committed, sequence.shared_pages) = (false, false, 0);
            sequence.drop_draft();
            // Their place on the GPU is for another.
            sequence.slots = None;
            self.counters.preempted();
            self.waiting.insert(key, sequence);
        }
    }

    fn fail(&mut self, key: Precedence, error: Error) {
        if let Some(sequence) = self.running.remove(&key) {
            self.end(sequence, Err(error));
        }
    }

    /// Runs the model on a batch, and takes the next tokens.
    fn run(&mut self, batch: &[(Precedence, usize)], mut lease: KvLease) {
        let placed = batch.iter().try_for_each(|(key, _)| {
            let slots = self.running.get_mut(key).and_then(|sequence| sequence.slots.as_mut());
            slots.map_or(Ok(()), |slots| self.workspace.slots.place(slots))
        });
        let sequences = batch.iter().map(|(key, rows)| (&self.running[key], *rows));
        let filled = placed.and_then(|()| catch_panic(|| self.workspace.fill(&self.model, sequences, &lease)));
        self.begin_masks(batch);
        let begun = Instant::now();
        let ran = filled.and_then(|()| catch_panic(|| self.workspace.run(&self.model)));
        self.in_model += begun.elapsed();
        let ran = ran.and_then(|()| lease.wait(None));
        let ran = ran.and_then(|()| self.commit_slots(batch));
        if let Err(error) = ran {
            self.drop_leases(lease);
            self.run_one_by_one(batch, error);
            return;
        }
        let vocab = self.model.folder.vocab_size as usize;
        let sequences = batch.iter().map(|(key, rows)| (&self.running[key], *rows));
        match catch_panic(|| self.workspace.sample(sequences, vocab)) {
            Ok(tokens) => self.counters.sampled_on_gpu(tokens),
            Err(error) => {
                self.drop_leases(lease);
                return batch.iter().for_each(|&(key, _)| self.fail(key, error.clone()));
            }
        }
        let cached: Vec<_> = batch.iter().map(|(key, _)| self.running[key].cached).collect();
        let outcomes = self.advance(batch);
        // Of a draft only what was right is committed.
        for (index, ((key, rows), before)) in batch.iter().zip(cached).enumerate() {
            let sequence = &self.running[key];
            if sequence.cached - before < *rows {
                lease.keep_first(index, &sequence.items.get()[before..sequence.cached]);
            }
        }
        if let Some(draft_model) = &mut self.draft_model {
            draft_model.verified(&self.running);
        }
        let committed = lease.commit().map(drop);
        for (&(key, _), outcome) in batch.iter().zip(outcomes) {
            match committed.clone().and(outcome) {
                Ok(None) => {}
                Ok(Some(reason)) => {
                    let sequence = self.running.remove(&key).expect("it runs");
                    self.end(sequence, Ok(reason));
                }
                // A beam ends with all others of its search, which have no reason of their own.
                Err(error) => self.fail(key, error),
            }
        }
        self.advance_searches(batch);
    }

    /// A step has failed. While leases hold its sequences, these can neither run again nor leave.
    fn drop_leases(&mut self, lease: KvLease) {
        drop(lease);
        self.draft_model.iter_mut().for_each(DraftModel::abandon);
    }

    /// Has the masks computed that the batch will need, while the model runs.
    fn begin_masks(&mut self, batch: &[(Precedence, usize)]) {
        for (key, rows) in batch {
            let Some(constraint) = self.running[key].mask_needed(*rows) else { continue };
            if self.masks.is_none() {
                match MaskWorker::start() {
                    Ok(worker) => self.masks = Some(worker),
                    Err(error) => return log::warn!("masks are computed after the model has run: {error}"),
                }
            }
            self.masks.iter().for_each(|masks| masks.begin(constraint));
        }
    }

    /// The slots that steps have written since this was last called, where they are logged.
    pub(super) fn take_slot_log(&mut self) -> Vec<SlotCall> {
        std::mem::take(&mut self.workspace.slots.log)
    }

    /// Takes over the slots that a step has written.
    fn commit_slots(&mut self, batch: &[(Precedence, usize)]) -> Result<()> {
        let model = Arc::clone(&self.model);
        let Some(policy) = &model.policy else { return Ok(()) };
        // In the order of the batch, which is that of the keys.
        let keys: HashSet<_> = batch.iter().map(|(key, _)| *key).collect();
        let slots =
            self.running.iter_mut().filter(|(key, _)| keys.contains(key)).map(|(key, it)| (key.1, it.slots.as_mut()));
        self.workspace.slots.commit(policy, slots)
    }

    /// After a batch has failed, runs its sequences alone, so that only the ones that can not run fail.
    fn run_one_by_one(&mut self, batch: &[(Precedence, usize)], error: Error) {
        if let [(key, _)] = *batch {
            return self.fail(key, error);
        }
        log::warn!("a step of {} sequences failed and is run one by one: {error}", batch.len());
        if self.model.policy.is_some() {
            // What was in the slots of this step may be overwritten: its sequences begin anew, one after the other.
            batch.iter().for_each(|&(key, _)| self.preempt(key));
            return;
        }
        for &(key, rows) in batch {
            // It may have ended with another beam.
            let Some(sequence) = self.running.get(&key) else { continue };
            let prepared = catch_panic(|| self.model.kv.prepare_for_run(&[sequence.kv_request(rows)]));
            match prepared {
                Ok(lease) => self.run(&[(key, rows)], lease),
                Err(error) => self.fail(key, error),
            }
        }
    }

    /// The rows of a batch are computed: takes the next tokens. Returns which sequences end, and why.
    fn advance(&mut self, batch: &[(Precedence, usize)]) -> Vec<Result<Option<FinishReason>>> {
        let vocab = self.model.folder.vocab_size as usize;
        let logits = std::mem::take(&mut self.workspace.logits);
        let mut all_sampled = std::mem::take(&mut self.workspace.sampled);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut rest = &logits[..];
        let all_maxima = std::mem::take(&mut self.workspace.maxima);
        let blocks = all_maxima.len() / (logits.len() / vocab).max(1);
        let mut rest_of_maxima = &all_maxima[..];
        let mut outcomes = Vec::with_capacity(batch.len());
        for (&(key, rows), sampled) in batch.iter().zip(&mut all_sampled) {
            let sequence = self.running.get_mut(&key).expect("a batch is of sequences that run");
            let (drafted, before) = (sequence.drafted(rows), sequence.cached);
            let with_logits = rows - sequence.logits_from(rows);
            let (own, maxima);
            (own, rest) = rest.split_at(with_logits * vocab);
            (maxima, rest_of_maxima) = rest_of_maxima.split_at(with_logits * blocks);
            let own = Logits { rows: own, vocab, maxima: Maxima { values: maxima, blocks } };
            sequence.committed = true;
            self.to_wake.push(Arc::clone(&sequence.answers));
            outcomes.push(catch_panic(|| sequence.advance(rows, own, sampled.take(), &mut scratch)));
            self.counters.drafted(drafted, (sequence.cached - before + drafted).saturating_sub(rows));
        }
        (self.workspace.logits, self.workspace.maxima, self.scratch) = (logits, all_maxima, scratch);
        self.workspace.sampled = all_sampled;
        outcomes
    }

    /// Ends a sequence, and its request with the last one.
    fn end(&mut self, mut sequence: Sequence, reason: Result<FinishReason>) {
        if sequence.beam.is_some() {
            return self.end_search(sequence, reason);
        }
        self.counters.ended(&reason, sequence.tokens.len() - sequence.prompt);
        self.draft_model.iter().for_each(|draft_model| draft_model.forget(sequence.owner));
        let computed = sequence.computed;
        let is_session = sequence.is_session;
        let kept = (is_session && self.model.policy.is_some()).then(|| self.keep_slots(&mut sequence, reason.is_ok()));
        let outcome = reason.map(|reason| sequence.answer(reason));
        let (answers, choice) = (Arc::clone(&sequence.answers), sequence.choice as usize);
        let Some(Ended { outcome, owners }) = answers.end(choice, sequence.owner, outcome, computed) else { return };
        if is_session {
            self.sessions.end(owners[0], answers, outcome, kept);
            return;
        }
        if !self.share_prefixes {
            for owner in owners {
                self.forget(owner);
            }
        }
        answers.deliver(outcome);
    }

    /// Keeps the slots of a session for its next turn. Those of a step that has failed may be overwritten: what was stored before
    /// counts then.
    fn keep_slots(&mut self, sequence: &mut Sequence, is_whole: bool) -> Result<Vec<Ticket>> {
        let saved =
            sequence.slots.as_mut().filter(|_| is_whole).map_or(Ok(()), |slots| self.workspace.slots.save(slots));
        if is_whole && saved.is_ok() {
            return self.slot_sessions.keep(&self.model, sequence);
        }
        self.forget(sequence.owner);
        saved.map(|()| Vec::new())
    }

    /// Removes what no other sequence can use.
    fn forget(&self, owner: Owner) {
        if let Err(error) = self.model.kv.forget(owner, &mut Vec::new()) {
            log::warn!("the keys and values of a sequence that has ended stay until they are evicted: {error}");
        }
    }
}
