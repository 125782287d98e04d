//! The scheduler: worker threads take jobs from the queue, run them in batches, and deliver the outcomes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::deadlines::Deadlines;
use super::pending::Pending;
use super::queue::Queue;
use super::{Counters, Job, Member, Outcome, Runner, Start, Timing, time_left};
use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard, Worker};

/// How long a worker spins for the next job after a batch before it sleeps. `sleep_when_idle` turns this off.
const SPIN_AFTER_BATCH: Duration = Duration::from_micros(200);

/// The limits of batches and of the queue.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct BatchLimits {
    /// The number of batches that run at the same time.
    pub(in super::super) instances: u32,
    /// Maximum number of jobs in a batch.
    pub(in super::super) max_batch: u32,
    /// Maximum number of rows in a batch. A single job may have more.
    pub(in super::super) max_rows: u32,
    /// The coalescing window: how long a job waits for others to share its batch.
    pub(in super::super) max_delay: Duration,
    /// Maximum number of waiting jobs.
    pub(in super::super) queue: u32,
    /// Whether idle workers sleep at once instead of spinning first.
    pub(in super::super) sleep_when_idle: bool,
}

/// The state that the worker threads of one engine share.
pub(in super::super) struct Scheduler<R: Runner> {
    pub(in super::super) runner: R,
    pub(in super::super) counters: Arc<Counters>,
    pub(in super::super) deadlines: Arc<Deadlines<R::Job>>,
    pub(super) limits: BatchLimits,
    queue: Mutex<Queue<R::Job, R::Workspace>>,
    /// The number of jobs that became ready so far.
    pub(super) pushed: AtomicU64,
    /// Signalled when a job becomes ready or an instance becomes idle.
    pub(super) changed: Condvar,
}

/// The worker threads of a scheduler.
pub(in super::super) struct Workers(Vec<Worker>);

impl Workers {
    /// Waits for their ends, after [`Scheduler::stop`]. A callback that drops the engine runs on one of them, which
    /// does not wait for itself.
    pub(in super::super) fn join(&mut self) {
        self.0.clear();
    }
}

impl<R: Runner> Scheduler<R> {
    pub(in super::super) fn new(runner: R, limits: BatchLimits) -> Self {
        Self {
            runner,
            counters: Arc::new(Counters::new()),
            deadlines: Arc::default(),
            limits,
            queue: Mutex::new(Queue::new(limits.instances, limits.queue)),
            pushed: AtomicU64::new(0),
            changed: Condvar::new(),
        }
    }

    /// Starts a worker thread for each instance.
    pub(in super::super) fn start(self: &Arc<Self>, name: &str) -> Result<Workers> {
        let mut workers = Workers(Vec::new());
        for number in 0..self.limits.instances {
            let scheduler = Arc::clone(self);
            let worker = Worker::spawn(format!("{name}-{number}"), "run batches on", move || scheduler.work());
            // `workers` joins the threads that have started, so they have to stop first.
            workers.0.push(worker.inspect_err(|_| self.stop())?);
        }
        Ok(workers)
    }

    /// The number of waiting jobs.
    pub(in super::super) fn waiting(&self) -> usize {
        self.lock().still_waiting()
    }

    /// Calls `work` while no worker can take a job of this key. `None` if one runs or is being added to a batch.
    pub(in super::super) fn with_idle_key<T>(&self, key: <R::Job as Job>::Key, work: impl FnOnce() -> T) -> Option<T> {
        let queue = self.lock();
        (!queue.is_taken(key)).then(work)
    }

    /// Runs a job on this thread if the queue is empty and an instance is idle. Otherwise appends it to the queue. A
    /// job that can end early is always queued: a thread that runs a batch can not return before the run ends.
    pub(in super::super) fn run_or_queue(&self, pending: &Arc<Pending<R::Job>>) -> Result<()> {
        let mut queue = self.lock();
        let at_once =
            self.limits.max_delay.is_zero() && !pending.can_end_early && self.runner.can_run_on_caller(&pending.job);
        let workspace = if at_once { queue.take_instance_for(pending.job.key()) } else { None };
        match workspace {
            None => self.push(queue, Arc::clone(pending)),
            Some(workspace) => {
                let ended = queue.runs_ended;
                drop(queue);
                self.run_next_batch(workspace, Start::OnCaller((Arc::clone(pending), ended)));
                Ok(())
            }
        }
    }

    /// Appends a job to the queue.
    pub(in super::super) fn queue(&self, pending: Arc<Pending<R::Job>>) -> Result<()> {
        self.push(self.lock(), pending)
    }

    fn push(
        &self,
        mut queue: MutexGuard<'_, Queue<R::Job, R::Workspace>>,
        pending: Arc<Pending<R::Job>>,
    ) -> Result<()> {
        // The first job has woken a worker, which waits for the coalescing window. Later jobs do not wake it again,
        // except the one that fills the batch.
        let attended = !self.limits.max_delay.is_zero() && queue.is_attended();
        let pushed = queue.push(pending);
        if let Ok(true) = pushed {
            self.pushed.fetch_add(1, Ordering::Relaxed);
        }
        if !attended || queue.can_fill(self.limits.max_batch as usize) {
            drop(queue);
            self.changed.notify_one();
        }
        pushed.map(drop)
    }

    /// The loop of a worker thread: runs batches until the scheduler is stopped and the queue is empty.
    pub(in super::super) fn work(&self) {
        let (mut queue, mut just_ran) = (self.lock(), false);
        loop {
            let Some(first) = queue.next_runnable() else {
                if queue.stop && queue.waiting() == 0 {
                    return;
                }
                if std::mem::take(&mut just_ran) && queue.waiting() == 0 {
                    let pushed = self.pushed.load(Ordering::Relaxed);
                    drop(queue);
                    self.spin(pushed, SPIN_AFTER_BATCH);
                    queue = self.lock();
                } else if queue.coalescing {
                    queue = self.sleep_for(queue, self.limits.max_delay);
                } else {
                    queue.sleepers += 1;
                    self.changed.wait(&mut queue);
                    queue.sleepers -= 1;
                }
                continue;
            };
            let left = time_left(self.limits.max_delay, first.arrived);
            let (max_batch, in_window) = (self.limits.max_batch as usize, !left.is_zero() && !queue.stop);
            let full = in_window && queue.can_fill(max_batch);
            let coalesce = in_window && !full;
            let no_arrivals = queue.no_arrivals_since == Some(self.pushed.load(Ordering::Relaxed));
            // The coalescing worker takes these jobs. This worker takes them if that takes too long, or if they fill
            // another batch.
            if coalesce && (queue.coalescing || no_arrivals) {
                queue = self.sleep_for(queue, left);
                continue;
            }
            let Some(workspace) = queue.take_instance() else { continue };
            queue.coalescing |= coalesce;
            let start = match (full, coalesce) {
                (true, _) => Start::Claimed(queue.claim(max_batch)),
                (_, true) => Start::Coalesce,
                _ => Start::Queue,
            };
            drop(queue);
            let ran = self.run_next_batch(workspace, start);
            (queue, just_ran) = (self.lock(), ran && !self.limits.sleep_when_idle);
        }
    }

    /// Sleeps until another thread wakes this one, at most for `time`.
    fn sleep_for<'a>(
        &'a self,
        mut queue: MutexGuard<'a, Queue<R::Job, R::Workspace>>,
        time: Duration,
    ) -> MutexGuard<'a, Queue<R::Job, R::Workspace>> {
        queue.timed_sleepers += 1;
        self.changed.wait_for(&mut queue, time);
        queue.timed_sleepers -= 1;
        queue
    }

    /// Spins until the count of arrivals differs from `pushed`. Returns false after `time`.
    pub(super) fn spin(&self, pushed: u64, time: Duration) -> bool {
        let begun = Instant::now();
        while self.pushed.load(Ordering::Relaxed) == pushed {
            if begun.elapsed() >= time {
                return false;
            }
            // The thread that pushes the next job may need this core.
            std::thread::yield_now();
        }
        true
    }

    /// Stops the workers after the waiting jobs have run.
    pub(in super::super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Forms a batch, runs it, and delivers the outcomes. Returns whether there were any.
    fn run_next_batch(&self, mut workspace: R::Workspace, start: Start<R::Job>) -> bool {
        let mut outcomes = Vec::new();
        let formed = self.form_batch(&mut workspace, start, &mut outcomes);
        let (put_back, batch) = (formed.is_none(), formed.unwrap_or_default());
        let mut keys: Vec<_> = outcomes.iter().map(|(pending, _)| pending.job.key()).collect();
        keys.extend(batch.iter().map(|member| member.pending.job.key()));
        let ran = !batch.is_empty() || !outcomes.is_empty();
        // The job that is now first in the queue arrived behind another one, and woke no worker (`push`).
        if !self.limits.max_delay.is_zero() && !put_back && self.lock().next_runnable().is_some() {
            self.changed.notify_one();
        }
        if !batch.is_empty() {
            self.run_batch(&mut workspace, batch, &mut outcomes);
        }
        // Before the outcomes are delivered: a caller that sends its next request at once finds an idle instance.
        let mut queue = self.lock();
        let follow = keys.into_iter().filter(|&key| queue.release_key(key)).count();
        self.pushed.fetch_add(follow as u64, Ordering::Relaxed);
        queue.return_instance(workspace, ran || put_back);
        // This worker itself waits for jobs that it has put back.
        let more = queue.waiting() > 0 && !put_back || queue.stop;
        drop(queue);
        if more {
            self.changed.notify_all();
        }
        // Delivers all outcomes before the first job is dropped, which takes time.
        let deliver = |(pending, outcome): Outcome<R::Job>| {
            pending.end(outcome);
            pending
        };
        let delivered: Vec<_> = outcomes.into_iter().map(deliver).collect();
        drop(delivered);
        ran
    }

    /// Runs a batch. If that fails, runs its jobs one by one, so that only the ones that can not run fail.
    pub(in super::super) fn run_batch(
        &self,
        workspace: &mut R::Workspace,
        batch: Vec<Member<R>>,
        outcomes: &mut Vec<Outcome<R::Job>>,
    ) {
        let formed = Instant::now();
        self.counters.count_batch(batch.iter().map(|member| formed - member.pending.arrived));
        batch.iter().for_each(|member| self.runner.before_run(&member.pending.job, &member.prepared));
        let others = batch.len() - 1;
        match self.run_members(workspace, &batch) {
            Ok((outputs, took)) => {
                let committed = batch
                    .into_iter()
                    .zip(outputs)
                    .map(|(member, output)| self.commit(member, output, (formed, took), others));
                outcomes.extend(committed);
            }
            Err(error) if others == 0 => {
                outcomes.extend(batch.into_iter().map(|member| (member.pending, Err(error.clone()))));
            }
            Err(error) => {
                log::warn!("a batch of {} requests failed and is run one by one: {error}", others + 1);
                outcomes.extend(batch.into_iter().map(|member| self.run_alone(workspace, member, formed)));
            }
        }
    }

    fn run_alone(&self, workspace: &mut R::Workspace, member: Member<R>, formed: Instant) -> Outcome<R::Job> {
        self.runner.clear(workspace, &member.pending.job);
        let added = self.runner.add(workspace, &member.pending.job, &member.prepared);
        match added.and_then(|()| self.run_members(workspace, std::slice::from_ref(&member))) {
            Ok((mut outputs, took)) => match outputs.pop() {
                Some(output) => self.commit(member, output, (formed, took), 0),
                None => unreachable!("a run gives an output for each job"),
            },
            Err(error) => (member.pending, Err(error)),
        }
    }

    fn run_members(&self, workspace: &mut R::Workspace, batch: &[Member<R>]) -> Result<(Vec<R::Output>, Duration)> {
        let cancel = match batch {
            [alone] => alone.pending.begin_single_run(),
            _ => None,
        };
        let ran = super::catch_panic(|| self.runner.run(workspace, batch, cancel.as_deref()));
        batch.iter().for_each(|member| member.pending.end_single_run());
        ran
    }

    fn commit(
        &self,
        Member { pending, prepared }: Member<R>,
        output: R::Output,
        (formed, run_time): (Instant, Duration),
        batched_with: usize,
    ) -> Outcome<R::Job> {
        let timing = Timing { queue_time: formed - pending.arrived, run_time, batched_with };
        let response = self.runner.commit(&pending.job, prepared, output, timing);
        (pending, Ok(response))
    }

    pub(in super::super) fn lock(&self) -> MutexGuard<'_, Queue<R::Job, R::Workspace>> {
        self.queue.lock()
    }
}
