//! Forms batches: takes jobs from the queue while they fit, and waits for more during the coalescing window.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::pending::Pending;
use super::scheduler::Scheduler;
use super::{Member, Outcome, Runner, Start, Taken, catch_panic, time_left};
use crate::error::{Error, Status};

/// How long a worker spins for the next job of a batch before it sleeps. Concurrent jobs arrive within microseconds,
/// and a wake-up takes longer than that.
const SPIN_IN_WINDOW: Duration = Duration::from_micros(20);

/// A batch that is being formed.
struct Batch<R: Runner> {
    members: Vec<Member<R>>,
    rows: u64,
}

/// The result of adding a job to a batch.
enum Admission<R: Runner> {
    Added,
    /// The job is back in the queue, and the batch is complete.
    Full,
    /// The job can not run.
    Rejected(Arc<Pending<R::Job>>, Error),
}

/// The next job of a batch.
enum NextJob<R: Runner> {
    Job(Taken<R::Job>),
    /// No job, and the batch does not wait any longer.
    RunNow,
    /// No job arrived within the spin time. `pushed` is the count of arrivals until then.
    NoArrivals {
        pushed: u64,
    },
}

impl<R: Runner> Scheduler<R> {
    /// Takes jobs while they fit into one batch, and prepares them. `None`: all jobs are back in the queue, because none
    /// arrived within the spin time, one can not run, or one was cancelled. So a sleeping worker holds no job.
    pub(in super::super) fn form_batch(
        &self,
        workspace: &mut R::Workspace,
        start: Start<R::Job>,
        failed: &mut Vec<Outcome<R::Job>>,
    ) -> Option<Vec<Member<R>>> {
        let mut batch = Batch { members: Vec::new(), rows: 0 };
        // A caller's thread runs no callbacks: it may hold a lock that a callback takes.
        let (coalesce, callbacks) = (matches!(start, Start::Coalesce), !matches!(start, Start::OnCaller(_)));
        let mut claimed = match start {
            Start::OnCaller(own) => VecDeque::from([own]),
            Start::Claimed(jobs) => jobs,
            Start::Coalesce | Start::Queue => VecDeque::new(),
        };
        let mut next = claimed.pop_front().or_else(|| self.take(coalesce, callbacks));
        while let Some(taken) = next {
            match self.admit(workspace, &mut batch, taken, coalesce) {
                Admission::Added => {}
                Admission::Full => break,
                // It fails when its batch runs. Until then it counts as a job of the window.
                Admission::Rejected(pending, _) if coalesce => {
                    self.put_back_all(batch.members, Some(pending), Some(self.pushed.load(Ordering::Relaxed)));
                    return None;
                }
                Admission::Rejected(pending, error) => failed.push((pending, Err(error))),
            }
            if batch.members.len() == self.limits.max_batch as usize {
                break;
            }
            // The first is not always the oldest: another worker may have put an older job back.
            let oldest = batch.members.iter().map(|member| member.pending.arrived).min();
            next = match oldest.filter(|_| coalesce) {
                None => claimed.pop_front().or_else(|| self.take(coalesce, callbacks)),
                Some(oldest) => match self.next_job(oldest) {
                    NextJob::Job(next) => Some(next),
                    NextJob::RunNow => None,
                    NextJob::NoArrivals { pushed } => {
                        self.put_back_all(batch.members, None, Some(pushed));
                        return None;
                    }
                },
            };
        }
        claimed.into_iter().for_each(|(pending, _)| self.put_back(pending, coalesce));
        self.end_window(batch.members, coalesce)
    }

    fn take(&self, coalesce: bool, callbacks: bool) -> Option<Taken<R::Job>> {
        let mut queue = self.lock();
        let taken = if coalesce { queue.coalesce() } else { queue.take(callbacks) }?;
        Some((taken, queue.runs_ended))
    }

    /// Prepares a job and adds it to the batch.
    fn admit(
        &self,
        workspace: &mut R::Workspace,
        batch: &mut Batch<R>,
        (pending, ended): Taken<R::Job>,
        coalesce: bool,
    ) -> Admission<R> {
        let (runner, job) = (&self.runner, &pending.job);
        if batch.members.first().is_some_and(|first| !runner.can_share_batch(&first.pending.job, job)) {
            self.put_back(pending, coalesce);
            return Admission::Full;
        }
        let prepared = match catch_panic(|| runner.prepare(job, workspace)) {
            Ok(prepared) => prepared,
            Err(error) if error.status() == Status::Capacity && runner.can_fit(job) => {
                return self.wait_for_room((pending, ended), !batch.members.is_empty(), coalesce, error);
            }
            Err(error) => return Admission::Rejected(pending, error),
        };
        let rows = runner.rows(job, &prepared);
        if !batch.members.is_empty() && batch.rows + rows > self.limits.max_rows.into() {
            runner.unprepare(job, prepared);
            self.put_back(pending, coalesce);
            return Admission::Full;
        }
        if batch.members.is_empty() {
            runner.clear(workspace, job);
        }
        if let Err(error) = runner.add(workspace, job, &prepared) {
            return Admission::Rejected(pending, error);
        }
        batch.rows += rows;
        batch.members.push(Member { pending, prepared });
        Admission::Added
    }

    /// Puts a job back that finds no free memory now, until a run has ended.
    fn wait_for_room(
        &self,
        (pending, ended): Taken<R::Job>,
        holds_some: bool,
        coalesce: bool,
        error: Error,
    ) -> Admission<R> {
        let mut queue = self.lock();
        if coalesce {
            queue.uncoalesce(&pending);
        }
        match queue.wait_for_room(pending, ended, holds_some) {
            None => Admission::Full,
            Some(pending) => Admission::Rejected(pending, error),
        }
    }

    /// Ends the coalescing window of a batch.
    fn end_window(&self, batch: Vec<Member<R>>, coalesce: bool) -> Option<Vec<Member<R>>> {
        if coalesce && batch.iter().any(|member| member.pending.can_end_early && member.pending.has_ended()) {
            // A job has ended during the window. The others wait for one in its place.
            self.put_back_all(batch, None, None);
            return None;
        }
        if coalesce {
            self.lock().end_coalescing();
        }
        Some(batch)
    }

    /// The next job of a batch during its coalescing window. `arrived` is the arrival of its oldest job.
    fn next_job(&self, arrived: Instant) -> NextJob<R> {
        loop {
            let mut queue = self.lock();
            if let Some(next) = queue.coalesce() {
                return NextJob::Job((next, queue.runs_ended));
            }
            let left = time_left(self.limits.max_delay, arrived);
            if left.is_zero() || queue.stop || queue.is_blocked() {
                return NextJob::RunNow;
            }
            let pushed = self.pushed.load(Ordering::Relaxed);
            drop(queue);
            if !self.spin(pushed, left.min(SPIN_IN_WINDOW)) && !time_left(self.limits.max_delay, arrived).is_zero() {
                return NextJob::NoArrivals { pushed };
            }
        }
    }

    /// Puts a batch back, and a job that was rejected. `no_arrivals_since`: no worker forms the same batch again before
    /// the count of arrivals exceeds this.
    fn put_back_all(
        &self,
        batch: Vec<Member<R>>,
        rejected: Option<Arc<Pending<R::Job>>>,
        no_arrivals_since: Option<u64>,
    ) {
        // Releases everything before another worker can take the job.
        let release = |Member { pending, prepared }: Member<R>| {
            self.runner.unprepare(&pending.job, prepared);
            pending
        };
        let batch = batch.into_iter().map(release).chain(rejected).collect();
        self.lock().put_back_all(batch, no_arrivals_since);
    }

    /// Puts a job back that was taken.
    fn put_back(&self, pending: Arc<Pending<R::Job>>, coalesce: bool) {
        let mut queue = self.lock();
        if coalesce {
            queue.uncoalesce(&pending);
        }
        queue.put_back(pending);
        drop(queue);
        // Another worker may be idle.
        self.changed.notify_one();
    }
}
