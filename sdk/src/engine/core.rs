//! What the threads of an engine share, and how they answer requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::batch::{self, Workspace};
use super::clock::Clock;
use super::history::{self, Ready};
use super::options::EngineOptions;
use super::pending::Pending;
use super::queue::Queue;
use super::remembered::{Remembered, Sent};
use super::request::RankResponse;
use super::serving::Serving;
use super::stats::Counters;
use super::work::Work;
use crate::error::{Error, Result, Status};
use crate::store::Store;

/// How long whoever waits for others to run with looks out for the next one before it sleeps: those that belong together
/// come within microseconds, and to be woken takes longer.
const LOOK_OUT: Duration = Duration::from_micros(20);

/// How long a thread that has answered looks out for the next request before it sleeps, unless threads are to sleep.
const LOOK_ON: Duration = Duration::from_micros(200);

/// What the threads of an engine share.
pub(super) struct Core {
    pub(super) options: EngineOptions,
    pub(super) store: Option<Arc<dyn Store>>,
    pub(super) serving: RwLock<Arc<Serving>>,
    pub(super) remembered: Remembered,
    pub(super) counters: Arc<Counters>,
    pub(super) clock: Arc<Clock>,
    queue: Mutex<Queue>,
    /// How many requests were put into the queue.
    pushed: AtomicU64,
    /// A request may be next, or an instance is free.
    changed: Condvar,
}

/// A request of a batch.
struct Member {
    pending: Arc<Pending>,
    ready: Ready,
}

/// What came of a request.
type Outcome = (Arc<Pending>, Result<RankResponse>);

impl Core {
    pub(super) fn new(options: EngineOptions, store: Option<Arc<dyn Store>>, serving: Arc<Serving>) -> Self {
        Self {
            remembered: Remembered::new(options.remember_events, &serving.layout.signature),
            queue: Mutex::new(Queue::new(options.instances, options.queue)),
            pushed: AtomicU64::new(0),
            options,
            store,
            serving: RwLock::new(serving),
            counters: Arc::new(Counters::new()),
            clock: Arc::default(),
            changed: Condvar::new(),
        }
    }

    /// What is served now.
    pub(super) fn current(&self) -> Arc<Serving> {
        Arc::clone(&self.serving.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting()
    }

    /// Runs a request on this thread if nothing is in its way. Otherwise it is put at the end of the queue, as is one
    /// that something may end early: whoever runs a batch can not leave it.
    pub(super) fn run_or_queue(&self, pending: &Arc<Pending>) -> Result<()> {
        let mut queue = self.lock();
        // Whoever is to wait for others does so in the queue. A caller's thread would have to capture graphs of its own.
        let graphs = pending.work.serving.graphs.is_some();
        let at_once = self.options.max_delay.is_zero() && !pending.limited && !graphs;
        let workspace = if at_once { queue.at_once(pending.work.user) } else { None };
        match workspace {
            None => self.push(queue, Arc::clone(pending)),
            Some(workspace) => {
                let ended = queue.ended;
                drop(queue);
                self.serve(workspace, Some((Arc::clone(pending), ended)));
                Ok(())
            }
        }
    }

    /// Puts a request at the end of the queue.
    pub(super) fn queue(&self, pending: Arc<Pending>) -> Result<()> {
        self.push(self.lock(), pending)
    }

    fn push(&self, mut queue: MutexGuard<'_, Queue>, pending: Arc<Pending>) -> Result<()> {
        // Whoever is first in the queue has woken a thread, which waits for others to run with: it is not woken again for
        // each of them, but by the last that fits in.
        let attended = !self.options.max_delay.is_zero() && queue.next().is_some();
        let pushed = queue.push(pending);
        self.pushed.fetch_add(1, Ordering::Relaxed);
        if !attended || queue.fills(self.options.max_batch as usize) {
            drop(queue);
            self.changed.notify_one();
        }
        pushed
    }

    /// Runs batches until the engine is closed and no request waits.
    pub(super) fn work(&self) {
        let (mut queue, mut looked_out, mut expects) = (self.lock(), None, false);
        loop {
            let Some(first) = queue.next() else {
                if queue.stop && queue.waiting() == 0 {
                    return;
                }
                if std::mem::take(&mut expects) && queue.waiting() == 0 {
                    let pushed = Some(self.pushed.load(Ordering::Relaxed));
                    drop(queue);
                    self.look_out(pushed, LOOK_ON);
                    queue = self.lock();
                } else {
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            let left = self.options.max_delay.saturating_sub(first.arrived.elapsed());
            if !left.is_zero() && !queue.stop && !queue.fills(self.options.max_batch as usize) {
                if let Some(pending) = queue.to_make() {
                    drop(queue);
                    pending.work.make_ahead();
                    // This may be the last to have it, and all that it has takes time to let go of.
                    drop(pending);
                    queue = self.lock();
                    continue;
                }
                let pushed = Some(self.pushed.load(Ordering::Relaxed));
                if looked_out != pushed {
                    drop(queue);
                    self.look_out(pushed, left.min(LOOK_OUT));
                    // All may be otherwise by now.
                    (queue, looked_out) = (self.lock(), pushed);
                    continue;
                }
                queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let Some(workspace) = queue.instance() else { continue };
            drop(queue);
            self.serve(workspace, None);
            (queue, expects) = (self.lock(), !self.options.model.sleep_when_idle);
        }
    }

    /// Waits for a request to follow the `pushed` ones, without sleeping.
    fn look_out(&self, pushed: Option<u64>, time: Duration) {
        let begun = Instant::now();
        while Some(self.pushed.load(Ordering::Relaxed)) == pushed && begun.elapsed() < time {
            // Whoever wants to run here may be the one that is looked out for.
            std::thread::yield_now();
        }
    }

    /// No more requests come; those that wait are answered.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Puts a batch together, runs it, and says what came of it. `first` is the request of a caller whose thread this
    /// is, with the number of runs that had ended when it came.
    fn serve(&self, mut workspace: Workspace, first: Option<(Arc<Pending>, u64)>) {
        let mut outcomes = Vec::new();
        let batch = self.gather(&mut workspace, first, &mut outcomes);
        let mut users: Vec<u64> = outcomes.iter().map(|(pending, _)| pending.work.user).collect();
        users.extend(batch.iter().map(|member| member.pending.work.user));
        let ran = !batch.is_empty() || !outcomes.is_empty();
        // Whoever is first in the queue now came while another was, and woke no one (`push`).
        if !self.options.max_delay.is_zero() && self.lock().next().is_some() {
            self.changed.notify_one();
        }
        if !batch.is_empty() {
            self.run(&mut workspace, batch, &mut outcomes);
        }
        // Before anyone is told: whoever asks again at once finds the instance free.
        let mut queue = self.lock();
        users.into_iter().for_each(|user| queue.done(user));
        queue.give_back(workspace, ran);
        let more = queue.waiting() > 0 || queue.stop;
        drop(queue);
        if more {
            self.changed.notify_all();
        }
        for (pending, outcome) in outcomes {
            pending.end(outcome);
        }
    }

    /// Takes requests as long as they fit into one batch, and finds out what is there of their histories.
    fn gather(
        &self,
        workspace: &mut Workspace,
        first: Option<(Arc<Pending>, u64)>,
        failed: &mut Vec<Outcome>,
    ) -> Vec<Member> {
        let (mut batch, mut rows) = (Vec::<Member>::new(), 0);
        // A caller may hold a lock that the callback of another one takes.
        let callbacks = first.is_none();
        let mut next = first.or_else(|| self.take(callbacks));
        while let Some((pending, ended)) = next {
            let work = &pending.work;
            if batch.first().is_some_and(|member| !Arc::ptr_eq(&member.pending.work.serving, &work.serving)) {
                self.put_back(pending);
                break;
            }
            let prepared = guarded(|| history::prepare(work, &self.remembered, &mut workspace.items));
            match prepared {
                Ok(ready) => {
                    rows += ready.rows(work);
                    if !batch.is_empty() && rows > self.options.max_batch_rows.into() {
                        drop(ready);
                        self.put_back(pending);
                        break;
                    }
                    batch.push(Member { pending, ready });
                }
                Err(error) if error.status() == Status::Capacity && work.serving.fits(work.rows()) => {
                    match self.lock().until_room(pending, ended, !batch.is_empty()) {
                        None => break,
                        Some(pending) => failed.push((pending, Err(error))),
                    }
                }
                Err(error) => failed.push((pending, Err(error))),
            }
            next = if batch.len() < self.options.max_batch as usize { self.take(callbacks) } else { None };
        }
        batch
    }

    /// Runs a batch; if that fails, its requests one by one, so that only those fail that can not be run.
    fn run(&self, workspace: &mut Workspace, batch: Vec<Member>, outcomes: &mut Vec<Outcome>) {
        let formed = Instant::now();
        self.counters.batch(batch.iter().map(|member| formed - member.pending.arrived));
        let others = batch.len() - 1;
        match run_together(workspace, &batch) {
            Ok((scores, took)) => {
                let mut rest = scores;
                for member in batch {
                    let work = &member.pending.work;
                    let (own, after) = rest.split_at(work.num_candidates * work.serving.folder.tasks.len());
                    rest = after;
                    outcomes.push(self.settle(member, own.to_vec(), (formed, took), others));
                }
            }
            Err(error) if others == 0 => {
                outcomes.extend(batch.into_iter().map(|member| (member.pending, Err(error.clone()))));
            }
            Err(error) => {
                log::warn!("a batch of {} requests failed and is run one by one: {error}", others + 1);
                for member in batch {
                    match run_together(workspace, std::slice::from_ref(&member)) {
                        Ok((scores, took)) => outcomes.push(self.settle(member, scores.to_vec(), (formed, took), 0)),
                        Err(error) => outcomes.push((member.pending, Err(error))),
                    }
                }
            }
        }
    }

    /// Keeps what a request has brought and what was computed of it, and makes the response.
    fn settle(
        &self,
        Member { pending, ready }: Member,
        scores: Vec<f32>,
        (formed, took): (Instant, Duration),
        others: usize,
    ) -> Outcome {
        let work = &pending.work;
        let Work { serving, user, .. } = work;
        let (cached, computed) = (ready.cached, work.rows() - ready.cached);
        match guarded(|| ready.commit()) {
            Ok(()) => self.remembered.note(&Sent::new(work), &serving.layout.signature),
            Err(error) => {
                // The scores are right all the same. But what is known is not what the caller has told by now.
                log::warn!("user {user}: what was computed is not kept, and the user is forgotten: {error}");
                if let Err(error) = guarded(|| serving.forget(*user)) {
                    log::error!("user {user} could not be forgotten: {error}");
                }
                self.remembered.forget(*user);
            }
        }
        self.counters.rows(cached, computed);
        let response = RankResponse {
            scores,
            tasks: serving.folder.tasks.len(),
            version: Arc::clone(&serving.version),
            cached_rows: cached,
            computed_rows: computed,
            batched_with: others,
            queue_time: formed - pending.arrived,
            run_time: took,
        };
        (pending, Ok(response))
    }

    /// The next request, with the number of runs that have ended.
    fn take(&self, callbacks: bool) -> Option<(Arc<Pending>, u64)> {
        let mut queue = self.lock();
        let taken = queue.take(callbacks)?;
        Some((taken, queue.ended))
    }

    fn put_back(&self, pending: Arc<Pending>) {
        self.lock().put_back(pending);
        // Another instance may be free.
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs requests together and returns their scores.
fn run_together<'a>(workspace: &'a mut Workspace, batch: &[Member]) -> Result<(&'a [f32], Duration)> {
    let cancel = match batch {
        [alone] => alone.pending.runs_alone(),
        _ => None,
    };
    let requests: Vec<_> = batch.iter().map(|member| (&member.pending.work, &member.ready)).collect();
    let ran = guarded(|| batch::run(workspace, &requests, cancel.as_deref()).map(|ran| (ran.scores, ran.took)));
    batch.iter().for_each(|member| member.pending.has_run());
    ran
}

/// A panic is an error of the request that it happened in, and of no other.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
}

#[cfg(test)]
pub(super) mod tests;
