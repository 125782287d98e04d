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
use crate::store::{Store, Ticket};

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
    /// How many requests were put into the queue that could be in the next batch.
    pushed: AtomicU64,
    /// A request may be next, or an instance is free.
    changed: Condvar,
}

/// A request of a batch.
struct Member {
    pending: Arc<Pending>,
    ready: Ready,
}

/// Who follows in a batch.
enum Following {
    /// This one, with the number of runs that have ended.
    One((Arc<Pending>, u64)),
    /// What there is runs without waiting for anyone.
    NotWaitedFor,
    /// None came so soon after the `pushed` ones.
    NoneCame { pushed: u64 },
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

    /// Forgets the events of a user, and says whether there were any.
    pub(super) fn forget_events(&self, user: u64) -> Result<bool> {
        let queue = self.lock();
        if queue.is_taken(user) {
            let message =
                format!("user {user} has a request that runs, or is being put into a batch: forget it after that");
            return Err(Error::new(Status::Busy, message));
        }
        // While no one can take a request, which would note again what it has found.
        Ok(self.remembered.forget(user))
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
                self.serve(workspace, Some((Arc::clone(pending), ended)), false);
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
        let attended = !self.options.max_delay.is_zero() && queue.is_attended();
        let pushed = queue.push(pending);
        if let Ok(true) = pushed {
            self.pushed.fetch_add(1, Ordering::Relaxed);
        }
        if !attended || queue.fills(self.options.max_batch as usize) {
            drop(queue);
            self.changed.notify_one();
        }
        pushed.map(drop)
    }

    /// Runs batches until the engine is closed and no request waits.
    pub(super) fn work(&self) {
        let (mut queue, mut expects) = (self.lock(), false);
        loop {
            let Some(first) = queue.next() else {
                if queue.stop && queue.waiting() == 0 {
                    return;
                }
                if std::mem::take(&mut expects) && queue.waiting() == 0 {
                    let pushed = self.pushed.load(Ordering::Relaxed);
                    drop(queue);
                    self.look_out(pushed, LOOK_ON);
                    queue = self.lock();
                } else if queue.gathering {
                    queue = self.sleep_for(queue, self.options.max_delay);
                } else {
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            let left = self.time_left(first.arrived);
            let waits = !left.is_zero() && !queue.stop && !queue.fills(self.options.max_batch as usize);
            let in_vain = queue.in_vain == Some(self.pushed.load(Ordering::Relaxed));
            // Whoever gathers takes them. But if that takes too long, or there are enough for another batch, this one does.
            if waits && (queue.gathering || in_vain) {
                queue = self.sleep_for(queue, left);
                continue;
            }
            let Some(workspace) = queue.instance() else { continue };
            queue.gathering |= waits;
            drop(queue);
            let ran = self.serve(workspace, None, waits);
            (queue, expects) = (self.lock(), ran && !self.options.model.sleep_when_idle);
        }
    }

    /// Sleeps for a time at most, or until someone wakes this thread.
    fn sleep_for<'a>(&'a self, mut queue: MutexGuard<'a, Queue>, time: Duration) -> MutexGuard<'a, Queue> {
        queue.timed += 1;
        let mut queue = self.changed.wait_timeout(queue, time).unwrap_or_else(PoisonError::into_inner).0;
        queue.timed -= 1;
        queue
    }

    /// How long a request that has `arrived` then still waits for others.
    fn time_left(&self, arrived: Instant) -> Duration {
        self.options.max_delay.saturating_sub(arrived.elapsed())
    }

    /// Waits for a request to follow the `pushed` ones, without sleeping, and says whether one did.
    fn look_out(&self, pushed: u64, time: Duration) -> bool {
        let begun = Instant::now();
        while self.pushed.load(Ordering::Relaxed) == pushed {
            if begun.elapsed() >= time {
                return false;
            }
            // Whoever wants to run here may be the one that is looked out for.
            std::thread::yield_now();
        }
        true
    }

    /// No more requests come; those that wait are answered.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Puts a batch together, runs it, says what came of it, and whether anything did. `first` is the request of a caller
    /// whose thread this is, with the number of runs that had ended when it came. `waits`: for others to run with.
    fn serve(&self, mut workspace: Workspace, first: Option<(Arc<Pending>, u64)>, waits: bool) -> bool {
        let mut outcomes = Vec::new();
        let gathered = self.gather(&mut workspace, first, waits, &mut outcomes);
        let (in_vain, batch) = (gathered.is_none(), gathered.unwrap_or_default());
        let mut users: Vec<u64> = outcomes.iter().map(|(pending, _)| pending.work.user).collect();
        users.extend(batch.iter().map(|member| member.pending.work.user));
        let ran = !batch.is_empty() || !outcomes.is_empty();
        // Whoever is first in the queue now came while another was, and woke no one (`push`).
        if !self.options.max_delay.is_zero() && !in_vain && self.lock().next().is_some() {
            self.changed.notify_one();
        }
        if !batch.is_empty() {
            self.run(&mut workspace, batch, &mut outcomes);
        }
        // Before anyone is told: whoever asks again at once finds the instance free.
        let mut queue = self.lock();
        let follow = users.into_iter().filter(|&user| queue.done(user)).count();
        self.pushed.fetch_add(follow as u64, Ordering::Relaxed);
        queue.give_back(workspace, ran || in_vain);
        // Those that were put back in vain are this thread's own to wait with.
        let more = queue.waiting() > 0 && !in_vain || queue.stop;
        drop(queue);
        if more {
            self.changed.notify_all();
        }
        // All are told before the first request is taken apart, which the others would wait for.
        let tell = |(pending, outcome): Outcome| {
            pending.end(outcome);
            pending
        };
        let told: Vec<_> = outcomes.into_iter().map(tell).collect();
        drop(told);
        ran
    }

    /// Takes requests as long as they fit into one batch, finds out what is there of their histories, and puts their rows
    /// together. If it waits for others and none come at once, or one can not be served, all are put back, so that no one is
    /// held by a thread that sleeps: `None`. So they are if one has ended by itself.
    fn gather(
        &self,
        workspace: &mut Workspace,
        first: Option<(Arc<Pending>, u64)>,
        waits: bool,
        failed: &mut Vec<Outcome>,
    ) -> Option<Vec<Member>> {
        let (mut batch, mut rows) = (Vec::<Member>::new(), 0);
        // A caller may hold a lock that the callback of another one takes.
        let callbacks = first.is_none();
        let take = || {
            let mut queue = self.lock();
            let taken = if waits { queue.gather() } else { queue.take(callbacks) }?;
            Some((taken, queue.ended))
        };
        let mut next = first.or_else(take);
        while let Some((pending, ended)) = next {
            let work = &pending.work;
            if batch.first().is_some_and(|member| !Arc::ptr_eq(&member.pending.work.serving, &work.serving)) {
                self.put_back(pending, waits);
                break;
            }
            let prepared = guarded(|| history::prepare(work, &self.remembered, &mut workspace.items));
            let refused = match prepared {
                Ok(ready) => {
                    rows += ready.rows(work);
                    if !batch.is_empty() && rows > self.options.max_batch_rows.into() {
                        ready.put_back(work);
                        self.put_back(pending, waits);
                        break;
                    }
                    if batch.is_empty() {
                        workspace.clear(work.serving.layout.features.len());
                    }
                    match add(workspace, work, &ready) {
                        Ok(()) => {
                            batch.push(Member { pending, ready });
                            None
                        }
                        Err(error) => {
                            rows -= ready.rows(work);
                            Some((pending, error))
                        }
                    }
                }
                Err(error) if error.status() == Status::Capacity && work.serving.fits(work.rows()) => {
                    let mut queue = self.lock();
                    if waits {
                        queue.ungather(&pending);
                    }
                    match queue.until_room(pending, ended, !batch.is_empty()) {
                        None => break,
                        Some(pending) => Some((pending, error)),
                    }
                }
                Err(error) => Some((pending, error)),
            };
            match refused {
                // It is one of those who are waited for, and told when the others run.
                Some((pending, _)) if waits => {
                    self.put_all_back(batch, Some(pending), Some(self.pushed.load(Ordering::Relaxed)));
                    return None;
                }
                Some((pending, error)) => failed.push((pending, Err(error))),
                None => {}
            }
            if batch.len() == self.options.max_batch as usize {
                break;
            }
            // The first is not always the one who waits for the longest: another thread may have put one back.
            let oldest = batch.iter().map(|member| member.pending.arrived).min();
            next = match oldest.filter(|_| waits) {
                None => take(),
                Some(oldest) => match self.following(oldest) {
                    Following::One(next) => Some(next),
                    Following::NotWaitedFor => None,
                    Following::NoneCame { pushed } => {
                        self.put_all_back(batch, None, Some(pushed));
                        return None;
                    }
                },
            };
        }
        if waits && batch.iter().any(|member| member.pending.limited && member.pending.has_ended()) {
            // While it waited for others, who wait for someone else now.
            self.put_all_back(batch, None, None);
            return None;
        }
        if waits {
            self.lock().end_gathering();
        }
        Some(batch)
    }

    /// Who follows in a batch that waits for others, whose oldest request has `arrived` then.
    fn following(&self, arrived: Instant) -> Following {
        loop {
            let mut queue = self.lock();
            if let Some(next) = queue.gather() {
                return Following::One((next, queue.ended));
            }
            let left = self.time_left(arrived);
            if left.is_zero() || queue.stop || queue.is_blocked() {
                return Following::NotWaitedFor;
            }
            let pushed = self.pushed.load(Ordering::Relaxed);
            drop(queue);
            if !self.look_out(pushed, left.min(LOOK_OUT)) && !self.time_left(arrived).is_zero() {
                return Following::NoneCame { pushed };
            }
        }
    }

    /// Puts a batch back that waited for others, and whoever was `refused`; `in_vain` if there is no use in waiting so after
    /// so many have come.
    fn put_all_back(&self, batch: Vec<Member>, refused: Option<Arc<Pending>>, in_vain: Option<u64>) {
        // Everyone's hold on a history ends before another thread can have the request.
        let let_go = |Member { pending, ready }: Member| {
            ready.put_back(&pending.work);
            pending
        };
        let batch = batch.into_iter().map(let_go).chain(refused).collect();
        self.lock().put_all_back(batch, in_vain);
    }

    /// Runs a batch; if that fails, its requests one by one, so that only those fail that can not be run.
    fn run(&self, workspace: &mut Workspace, batch: Vec<Member>, outcomes: &mut Vec<Outcome>) {
        let formed = Instant::now();
        self.counters.batch(batch.iter().map(|member| formed - member.pending.arrived));
        batch.iter().for_each(|member| member.ready.count(&member.pending.work));
        let others = batch.len() - 1;
        match run_together(workspace, &batch) {
            Ok((scores, took)) => {
                let mut rest = scores;
                outcomes.reserve(batch.len());
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
                    workspace.clear(member.pending.work.serving.layout.features.len());
                    let alone = std::slice::from_ref(&member);
                    let added = add(workspace, &member.pending.work, &member.ready);
                    match added.and_then(|()| run_together(workspace, alone)) {
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
                let mut tickets = Vec::new();
                let forgotten = guarded(|| serving.forget(*user, &mut tickets));
                if let Err(error) = forgotten.and(Ticket::wait_all(&tickets)) {
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

    /// Puts a request back that was taken, for a batch that `waits` for others or not.
    fn put_back(&self, pending: Arc<Pending>, waits: bool) {
        let mut queue = self.lock();
        if waits {
            queue.ungather(&pending);
        }
        queue.put_back(pending);
        drop(queue);
        // Another instance may be free.
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds the rows of a request to those of others, or leaves those as they are.
fn add(workspace: &mut Workspace, work: &Work, ready: &Ready) -> Result<()> {
    let before = workspace.sizes();
    guarded(|| workspace.add(work, ready)).inspect_err(|_| workspace.truncate(&before))
}

/// Runs requests together whose rows are in the workspace, and returns their scores.
fn run_together<'a>(workspace: &'a mut Workspace, batch: &[Member]) -> Result<(&'a [f32], Duration)> {
    let cancel = match batch {
        [alone] => alone.pending.runs_alone(),
        _ => None,
    };
    let serving = &batch[0].pending.work.serving;
    let ran = guarded(|| batch::run(workspace, serving, cancel.as_deref()).map(|ran| (ran.scores, ran.took)));
    batch.iter().for_each(|member| member.pending.has_run());
    ran
}

/// A panic is an error of the request that it happened in, and of no other.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
}

#[cfg(test)]
pub(super) mod tests;
