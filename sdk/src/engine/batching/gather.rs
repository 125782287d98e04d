//! Puts batches together: takes jobs from the queue as long as they fit, and waits for more within the coalescing window.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::pending::Pending;
use super::scheduler::Scheduler;
use super::{Member, Outcome, Runner, Taken, guarded, time_left};
use crate::error::{Error, Status};

/// How long a worker that waits for others spins for the next one before it sleeps: jobs that belong together come within
/// microseconds, and to be woken takes longer.
const SPIN_IN_WINDOW: Duration = Duration::from_micros(20);

/// A batch that is being put together.
struct Batch<R: Runner> {
    members: Vec<Member<R>>,
    rows: u64,
}

/// What became of a job that was to be in a batch.
enum Admitted<R: Runner> {
    Yes,
    /// It was put back, and the batch is complete.
    Full,
    /// It can not run.
    Refused(Arc<Pending<R::Job>>, Error),
}

/// Which job follows in a batch.
enum Following<R: Runner> {
    One(Taken<R::Job>),
    /// The batch runs without waiting for another.
    NotWaitedFor,
    /// None came so soon after the `pushed` ones.
    NoneCame {
        pushed: u64,
    },
}

impl<R: Runner> Scheduler<R> {
    /// Takes jobs as long as they fit into one batch, and prepares them. If it waits for others and none come at once, or
    /// one can not run, all are put back, so that no sleeping worker holds a job: `None`. So they are if one has ended by
    /// itself.
    pub(in super::super) fn gather(
        &self,
        workspace: &mut R::Workspace,
        first: Option<Taken<R::Job>>,
        waits: bool,
        failed: &mut Vec<Outcome<R::Job>>,
    ) -> Option<Vec<Member<R>>> {
        let mut batch = Batch { members: Vec::new(), rows: 0 };
        // A caller may hold a lock that the callback of another one takes.
        let callbacks = first.is_none();
        let mut next = first.or_else(|| self.take(waits, callbacks));
        while let Some(taken) = next {
            match self.admit(workspace, &mut batch, taken, waits) {
                Admitted::Yes => {}
                Admitted::Full => break,
                // It is one of those that are waited for, and told when the others run.
                Admitted::Refused(pending, _) if waits => {
                    self.put_all_back(batch.members, Some(pending), Some(self.pushed.load(Ordering::Relaxed)));
                    return None;
                }
                Admitted::Refused(pending, error) => failed.push((pending, Err(error))),
            }
            if batch.members.len() == self.limits.max_batch as usize {
                break;
            }
            // The first is not always the one that has waited for the longest: another thread may have put one back.
            let oldest = batch.members.iter().map(|member| member.pending.arrived).min();
            next = match oldest.filter(|_| waits) {
                None => self.take(waits, callbacks),
                Some(oldest) => match self.following(oldest) {
                    Following::One(next) => Some(next),
                    Following::NotWaitedFor => None,
                    Following::NoneCame { pushed } => {
                        self.put_all_back(batch.members, None, Some(pushed));
                        return None;
                    }
                },
            };
        }
        self.finish(batch.members, waits)
    }

    fn take(&self, waits: bool, callbacks: bool) -> Option<Taken<R::Job>> {
        let mut queue = self.lock();
        let taken = if waits { queue.gather() } else { queue.take(callbacks) }?;
        Some((taken, queue.ended))
    }

    /// Prepares a job and adds it to the batch.
    fn admit(
        &self,
        workspace: &mut R::Workspace,
        batch: &mut Batch<R>,
        (pending, ended): Taken<R::Job>,
        waits: bool,
    ) -> Admitted<R> {
        let (runner, job) = (&self.runner, &pending.job);
        if batch.members.first().is_some_and(|first| !runner.run_together(&first.pending.job, job)) {
            self.put_back(pending, waits);
            return Admitted::Full;
        }
        let prepared = match guarded(|| runner.prepare(job, workspace)) {
            Ok(prepared) => prepared,
            Err(error) if error.status() == Status::Capacity && runner.fits(job) => {
                return self.until_room((pending, ended), !batch.members.is_empty(), waits, error);
            }
            Err(error) => return Admitted::Refused(pending, error),
        };
        let rows = runner.rows(job, &prepared);
        if !batch.members.is_empty() && batch.rows + rows > self.limits.max_rows.into() {
            runner.put_back(job, prepared);
            self.put_back(pending, waits);
            return Admitted::Full;
        }
        if batch.members.is_empty() {
            runner.clear(workspace, job);
        }
        if let Err(error) = runner.add(workspace, job, &prepared) {
            return Admitted::Refused(pending, error);
        }
        batch.rows += rows;
        batch.members.push(Member { pending, prepared });
        Admitted::Yes
    }

    /// Puts a job back for which there is no room now, until a run has ended.
    fn until_room(&self, (pending, ended): Taken<R::Job>, holds_some: bool, waits: bool, error: Error) -> Admitted<R> {
        let mut queue = self.lock();
        if waits {
            queue.ungather(&pending);
        }
        match queue.until_room(pending, ended, holds_some) {
            None => Admitted::Full,
            Some(pending) => Admitted::Refused(pending, error),
        }
    }

    /// Ends the coalescing window of a batch that waited for others.
    fn finish(&self, batch: Vec<Member<R>>, waits: bool) -> Option<Vec<Member<R>>> {
        if waits && batch.iter().any(|member| member.pending.limited && member.pending.has_ended()) {
            // While it waited for others, which wait for another one now.
            self.put_all_back(batch, None, None);
            return None;
        }
        if waits {
            self.lock().end_gathering();
        }
        Some(batch)
    }

    /// Which job follows in a batch that waits for others, whose oldest job has `arrived` then.
    fn following(&self, arrived: Instant) -> Following<R> {
        loop {
            let mut queue = self.lock();
            if let Some(next) = queue.gather() {
                return Following::One((next, queue.ended));
            }
            let left = time_left(self.limits.max_delay, arrived);
            if left.is_zero() || queue.stop || queue.is_blocked() {
                return Following::NotWaitedFor;
            }
            let pushed = self.pushed.load(Ordering::Relaxed);
            drop(queue);
            if !self.spin(pushed, left.min(SPIN_IN_WINDOW)) && !time_left(self.limits.max_delay, arrived).is_zero() {
                return Following::NoneCame { pushed };
            }
        }
    }

    /// Puts a batch back that waited for others, and a job that was `refused`; `in_vain` if there is no use in waiting so
    /// after so many have come.
    fn put_all_back(&self, batch: Vec<Member<R>>, refused: Option<Arc<Pending<R::Job>>>, in_vain: Option<u64>) {
        // Every hold ends before another thread can have the job.
        let let_go = |Member { pending, prepared }: Member<R>| {
            self.runner.put_back(&pending.job, prepared);
            pending
        };
        let batch = batch.into_iter().map(let_go).chain(refused).collect();
        self.lock().put_all_back(batch, in_vain);
    }

    /// Puts a job back that was taken, for a batch that `waits` for others or not.
    fn put_back(&self, pending: Arc<Pending<R::Job>>, waits: bool) {
        let mut queue = self.lock();
        if waits {
            queue.ungather(&pending);
        }
        queue.put_back(pending);
        drop(queue);
        // Another instance may be free.
        self.changed.notify_one();
    }
}
