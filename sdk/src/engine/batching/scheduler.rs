//! The scheduler: worker threads take jobs from the queue, run them in batches, and tell their callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::deadlines::Deadlines;
use super::pending::Pending;
use super::queue::Queue;
use super::{Counters, Job, Member, Outcome, Runner, Taken, Timing, time_left};
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long a worker that has just run a batch spins for the next job before it sleeps, unless workers are to sleep.
const SPIN_AFTER_BATCH: Duration = Duration::from_micros(200);

/// How jobs are put together.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct BatchLimits {
    /// How many batches run at the same time.
    pub(in super::super) instances: u32,
    /// The most jobs of a batch.
    pub(in super::super) max_batch: u32,
    /// The most rows of a batch; a single job may have more.
    pub(in super::super) max_rows: u32,
    /// The coalescing window: how long a job waits for others to run with.
    pub(in super::super) max_delay: Duration,
    /// The most jobs that wait.
    pub(in super::super) queue: u32,
    /// Whether workers sleep at once when there is nothing to do.
    pub(in super::super) sleep_when_idle: bool,
}

/// What the worker threads of one engine share.
pub(in super::super) struct Scheduler<R: Runner> {
    pub(in super::super) runner: R,
    pub(in super::super) counters: Arc<Counters>,
    pub(in super::super) deadlines: Arc<Deadlines<R::Job>>,
    pub(super) limits: BatchLimits,
    queue: Mutex<Queue<R::Job, R::Workspace>>,
    /// How many jobs were put into the queue that could be in the next batch.
    pub(super) pushed: AtomicU64,
    /// A job may be next, or an instance is free.
    pub(super) changed: Condvar,
}

/// The worker threads of a scheduler.
pub(in super::super) struct Workers(Vec<JoinHandle<()>>);

impl Workers {
    /// Waits for their ends, after [`Scheduler::stop`]. A callback that closes the engine is on one of them, and does not
    /// wait for itself.
    pub(in super::super) fn join(&mut self) {
        for thread in self.0.drain(..).filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic has been reported where it happened.
            let _ = thread.join();
        }
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
            let thread = Builder::new().name(format!("{name}-{number}")).spawn(move || scheduler.work());
            match thread {
                Ok(thread) => workers.0.push(thread),
                Err(error) => {
                    self.stop();
                    workers.join();
                    return Err(Error::new(Status::Capacity, format!("no thread to run batches on: {error}")));
                }
            }
        }
        Ok(workers)
    }

    /// How many jobs wait.
    pub(in super::super) fn waiting(&self) -> usize {
        self.lock().waiting()
    }

    /// Does something while no job of a key can be taken; `None` if one runs or is being put into a batch.
    pub(in super::super) fn unless_taken<T>(&self, key: <R::Job as Job>::Key, work: impl FnOnce() -> T) -> Option<T> {
        let queue = self.lock();
        (!queue.is_taken(key)).then(work)
    }

    /// Runs a job on this thread if nothing is in its way. Otherwise it is put at the end of the queue, as is one that
    /// something may end early: the thread that runs a batch can not leave it.
    pub(in super::super) fn run_or_queue(&self, pending: &Arc<Pending<R::Job>>) -> Result<()> {
        let mut queue = self.lock();
        let at_once = self.limits.max_delay.is_zero() && !pending.limited && self.runner.runs_on_caller(&pending.job);
        let workspace = if at_once { queue.at_once(pending.job.key()) } else { None };
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

    /// Puts a job at the end of the queue.
    pub(in super::super) fn queue(&self, pending: Arc<Pending<R::Job>>) -> Result<()> {
        self.push(self.lock(), pending)
    }

    fn push(
        &self,
        mut queue: MutexGuard<'_, Queue<R::Job, R::Workspace>>,
        pending: Arc<Pending<R::Job>>,
    ) -> Result<()> {
        // The first job in the queue has woken a worker, which waits for others to run with it. The others do not wake it
        // again, but the last that fits into the batch does.
        let attended = !self.limits.max_delay.is_zero() && queue.is_attended();
        let pushed = queue.push(pending);
        if let Ok(true) = pushed {
            self.pushed.fetch_add(1, Ordering::Relaxed);
        }
        if !attended || queue.fills(self.limits.max_batch as usize) {
            drop(queue);
            self.changed.notify_one();
        }
        pushed.map(drop)
    }

    /// What a worker does: runs batches until the scheduler is stopped and no job waits.
    pub(in super::super) fn work(&self) {
        let (mut queue, mut expects) = (self.lock(), false);
        loop {
            let Some(first) = queue.next() else {
                if queue.stop && queue.waiting() == 0 {
                    return;
                }
                if std::mem::take(&mut expects) && queue.waiting() == 0 {
                    let pushed = self.pushed.load(Ordering::Relaxed);
                    drop(queue);
                    self.spin(pushed, SPIN_AFTER_BATCH);
                    queue = self.lock();
                } else if queue.gathering {
                    queue = self.sleep_for(queue, self.limits.max_delay);
                } else {
                    self.changed.wait(&mut queue);
                }
                continue;
            };
            let left = time_left(self.limits.max_delay, first.arrived);
            let waits = !left.is_zero() && !queue.stop && !queue.fills(self.limits.max_batch as usize);
            let in_vain = queue.in_vain == Some(self.pushed.load(Ordering::Relaxed));
            // The worker that gathers takes them. If that takes too long, or there are enough for another batch, this
            // one does.
            if waits && (queue.gathering || in_vain) {
                queue = self.sleep_for(queue, left);
                continue;
            }
            let Some(workspace) = queue.instance() else { continue };
            queue.gathering |= waits;
            drop(queue);
            let ran = self.serve(workspace, None, waits);
            (queue, expects) = (self.lock(), ran && !self.limits.sleep_when_idle);
        }
    }

    /// Sleeps for a time at most, or until another thread wakes this one.
    fn sleep_for<'a>(
        &'a self,
        mut queue: MutexGuard<'a, Queue<R::Job, R::Workspace>>,
        time: Duration,
    ) -> MutexGuard<'a, Queue<R::Job, R::Workspace>> {
        queue.timed += 1;
        self.changed.wait_for(&mut queue, time);
        queue.timed -= 1;
        queue
    }

    /// Spins until a job follows the `pushed` ones, and says whether one did.
    pub(super) fn spin(&self, pushed: u64, time: Duration) -> bool {
        let begun = Instant::now();
        while self.pushed.load(Ordering::Relaxed) == pushed {
            if begun.elapsed() >= time {
                return false;
            }
            // A thread that wants to run on this core may be the one that brings the job.
            std::thread::yield_now();
        }
        true
    }

    /// No more jobs come; those that wait are run.
    pub(in super::super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Puts a batch together, runs it, tells what came of it, and says whether anything did. `first` is the job of a
    /// caller whose thread this is. `waits`: for others to run with.
    fn serve(&self, mut workspace: R::Workspace, first: Option<Taken<R::Job>>, waits: bool) -> bool {
        let mut outcomes = Vec::new();
        let gathered = self.gather(&mut workspace, first, waits, &mut outcomes);
        let (in_vain, batch) = (gathered.is_none(), gathered.unwrap_or_default());
        let mut keys: Vec<_> = outcomes.iter().map(|(pending, _)| pending.job.key()).collect();
        keys.extend(batch.iter().map(|member| member.pending.job.key()));
        let ran = !batch.is_empty() || !outcomes.is_empty();
        // The job that is first in the queue now came while another was, and woke no worker (`push`).
        if !self.limits.max_delay.is_zero() && !in_vain && self.lock().next().is_some() {
            self.changed.notify_one();
        }
        if !batch.is_empty() {
            self.run(&mut workspace, batch, &mut outcomes);
        }
        // Before anyone is told: a caller that asks again at once finds the instance free.
        let mut queue = self.lock();
        let follow = keys.into_iter().filter(|&key| queue.done(key)).count();
        self.pushed.fetch_add(follow as u64, Ordering::Relaxed);
        queue.give_back(workspace, ran || in_vain);
        // Jobs that were put back in vain are this worker's own to wait with.
        let more = queue.waiting() > 0 && !in_vain || queue.stop;
        drop(queue);
        if more {
            self.changed.notify_all();
        }
        // All are told before the first job is taken apart, which the others would wait for.
        let tell = |(pending, outcome): Outcome<R::Job>| {
            pending.end(outcome);
            pending
        };
        let told: Vec<_> = outcomes.into_iter().map(tell).collect();
        drop(told);
        ran
    }

    /// Runs a batch; if that fails, its jobs one by one, so that only those fail that can not be run.
    pub(in super::super) fn run(
        &self,
        workspace: &mut R::Workspace,
        batch: Vec<Member<R>>,
        outcomes: &mut Vec<Outcome<R::Job>>,
    ) {
        let formed = Instant::now();
        self.counters.batch(batch.iter().map(|member| formed - member.pending.arrived));
        batch.iter().for_each(|member| self.runner.begin(&member.pending.job, &member.prepared));
        let others = batch.len() - 1;
        match self.run_together(workspace, &batch) {
            Ok((outputs, took)) => {
                let settled = batch
                    .into_iter()
                    .zip(outputs)
                    .map(|(member, output)| self.settle(member, output, (formed, took), others));
                outcomes.extend(settled);
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
        match added.and_then(|()| self.run_together(workspace, std::slice::from_ref(&member))) {
            Ok((mut outputs, took)) => match outputs.pop() {
                Some(output) => self.settle(member, output, (formed, took), 0),
                None => unreachable!("a run gives an output for each job"),
            },
            Err(error) => (member.pending, Err(error)),
        }
    }

    fn run_together(&self, workspace: &mut R::Workspace, batch: &[Member<R>]) -> Result<(Vec<R::Output>, Duration)> {
        let cancel = match batch {
            [alone] => alone.pending.runs_alone(),
            _ => None,
        };
        let ran = super::guarded(|| self.runner.run(workspace, batch, cancel.as_deref()));
        batch.iter().for_each(|member| member.pending.has_run());
        ran
    }

    fn settle(
        &self,
        Member { pending, prepared }: Member<R>,
        output: R::Output,
        (formed, run_time): (Instant, Duration),
        batched_with: usize,
    ) -> Outcome<R::Job> {
        let timing = Timing { queue_time: formed - pending.arrived, run_time, batched_with };
        let response = self.runner.settle(&pending.job, prepared, output, timing);
        (pending, Ok(response))
    }

    pub(in super::super) fn lock(&self) -> MutexGuard<'_, Queue<R::Job, R::Workspace>> {
        self.queue.lock()
    }
}
