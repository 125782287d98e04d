//! The queue: jobs in order of arrival, at most one of each key at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::{Job, Taken};
use super::pending::Pending;
use crate::error::{Error, Result, Status};

/// Waiting jobs and idle instances.
pub(in super::super) struct Queue<J: Job, W> {
    capacity: usize,
    /// At most one job of each key.
    ready: VecDeque<Arc<Pending<J>>>,
    /// An entry for every key with a ready or running job: the jobs queued behind that one.
    by_key: HashMap<J::Key, VecDeque<Arc<Pending<J>>>>,
    waiting: usize,
    /// The workspaces of the idle instances.
    idle: Vec<W>,
    running: usize,
    /// The number of runs that have ended.
    pub(in super::super) runs_ended: u64,
    /// Whether the next job waits for memory that a running job holds.
    blocked: bool,
    /// Whether a worker is forming a batch during its coalescing window.
    pub(in super::super) coalescing: bool,
    /// The jobs that worker has taken. They still count as waiting.
    coalesced: Vec<Arc<Pending<J>>>,
    /// The number of workers that sleep for at most one coalescing window.
    pub(in super::super) timed_sleepers: usize,
    /// The number of workers that sleep until they are woken.
    pub(in super::super) sleepers: usize,
    /// The count of arrivals when the last coalescing worker gave up, because no further job arrived.
    pub(in super::super) no_arrivals_since: Option<u64>,
    pub(in super::super) stop: bool,
}

impl<J: Job, W: Default> Queue<J, W> {
    pub(in super::super) fn new(instances: u32, capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            ready: VecDeque::new(),
            by_key: HashMap::new(),
            waiting: 0,
            idle: (0..instances).map(|_| W::default()).collect(),
            running: 0,
            runs_ended: 0,
            blocked: false,
            coalescing: false,
            coalesced: Vec::new(),
            timed_sleepers: 0,
            sleepers: 0,
            no_arrivals_since: None,
            stop: false,
        }
    }

    /// The number of jobs in the queue. Those that ended while they waited count until they are removed.
    pub(in super::super) fn waiting(&self) -> usize {
        self.waiting + self.coalesced.len()
    }

    /// The number of waiting jobs, without those that have ended: their time limit is over, or they were cancelled.
    pub(in super::super) fn still_waiting(&self) -> usize {
        let queued = self.ready.iter().chain(&self.coalesced).chain(self.by_key.values().flatten());
        queued.filter(|pending| !pending.has_ended()).count()
    }

    /// Whether enough jobs are ready to fill a batch of this size.
    pub(in super::super) fn can_fill(&mut self, batch: usize) -> bool {
        let mut waiting = self.ready.iter().filter(|pending| !pending.has_ended());
        // Reads no more entries than needed, unless some jobs have ended.
        if self.ready.len() < batch || waiting.nth(batch - 1).is_some() {
            return self.ready.len() >= batch;
        }
        self.remove_ended();
        self.ready.len() >= batch
    }

    /// The next job, if an instance could run it now.
    pub(in super::super) fn next_runnable(&self) -> Option<&Arc<Pending<J>>> {
        self.ready.front().filter(|_| !self.blocked && !self.idle.is_empty())
    }

    /// Whether a worker is awake, or wakes up in time, for a job that arrives now.
    pub(in super::super) fn is_attended(&self) -> bool {
        if self.coalescing {
            // The coalescing worker takes arrivals. It may be slow, so an idle worker has to watch the time too.
            self.timed_sleepers > 0 || self.idle.is_empty()
        } else {
            self.next_runnable().is_some()
        }
    }

    /// Whether the next job waits for a run to end.
    pub(in super::super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Appends a job. Returns whether it is ready: no job of its key is before it.
    pub(in super::super) fn push(&mut self, pending: Arc<Pending<J>>) -> Result<bool> {
        if self.waiting() >= self.capacity {
            self.remove_ended();
        }
        if self.waiting() >= self.capacity {
            let message = format!("{} requests are waiting already (options.queue): try again later", self.waiting());
            return Err(Error::new(Status::Capacity, message));
        }
        self.waiting += 1;
        if let Some(behind) = self.by_key.get_mut(&pending.job.key()) {
            behind.push_back(pending);
            return Ok(false);
        }
        self.by_key.insert(pending.job.key(), VecDeque::new());
        self.ready.push_back(pending);
        Ok(true)
    }

    /// An idle instance for a job of this key, if the job need not wait for others.
    pub(in super::super) fn take_instance_for(&mut self, key: J::Key) -> Option<W> {
        if !self.ready.is_empty() || self.by_key.contains_key(&key) {
            return None;
        }
        let workspace = self.idle.pop()?;
        self.by_key.insert(key, VecDeque::new());
        self.running += 1;
        Some(workspace)
    }

    /// Whether a job of this key runs or is being added to a batch.
    pub(in super::super) fn is_taken(&self, key: J::Key) -> bool {
        self.by_key.contains_key(&key) && self.ready.iter().all(|pending| pending.job.key() != key)
    }

    /// An idle instance.
    pub(in super::super) fn take_instance(&mut self) -> Option<W> {
        let workspace = self.idle.pop()?;
        self.running += 1;
        Some(workspace)
    }

    /// Takes the next job, to run it or to put it back. `callbacks`: also a job with a callback.
    pub(in super::super) fn take(&mut self, callbacks: bool) -> Option<Arc<Pending<J>>> {
        if self.blocked {
            return None;
        }
        while let Some(pending) = self.ready.pop_front() {
            if !pending.has_ended() {
                if pending.has_callback && !callbacks {
                    self.ready.push_front(pending);
                    return None;
                }
                self.waiting -= 1;
                return Some(pending);
            }
            self.waiting -= 1;
            self.release_key(pending.job.key());
        }
        None
    }

    /// Takes the jobs of a batch of this size.
    pub(in super::super) fn claim(&mut self, batch: usize) -> VecDeque<Taken<J>> {
        let ended = self.runs_ended;
        std::iter::from_fn(|| self.take(true)).take(batch).map(|pending| (pending, ended)).collect()
    }

    /// As [`Self::take`], during a coalescing window.
    pub(in super::super) fn coalesce(&mut self) -> Option<Arc<Pending<J>>> {
        self.take(true).inspect(|pending| self.coalesced.push(Arc::clone(pending)))
    }

    /// Removes the job taken last from the coalescing window.
    pub(in super::super) fn uncoalesce(&mut self, last: &Arc<Pending<J>>) {
        self.coalesced.pop_if(|pending| Arc::ptr_eq(pending, last));
    }

    /// Ends the coalescing window. Its jobs run or are put back.
    pub(in super::super) fn end_coalescing(&mut self) {
        self.coalescing = false;
        self.coalesced.clear();
    }

    /// Puts back all jobs of a coalescing window.
    pub(in super::super) fn put_back_all(&mut self, batch: Vec<Arc<Pending<J>>>, no_arrivals_since: Option<u64>) {
        self.end_coalescing();
        for pending in batch {
            if pending.has_ended() {
                self.release_key(pending.job.key());
                continue;
            }
            self.put_back(pending);
        }
        // The memory that they held is free again.
        (self.no_arrivals_since, self.blocked) = (no_arrivals_since, false);
    }

    /// Puts a job back, in front of those that arrived later.
    pub(in super::super) fn put_back(&mut self, pending: Arc<Pending<J>>) {
        self.waiting += 1;
        // Another worker may have put an older one back. The oldest must be first: its age ends the coalescing window.
        let place = self.ready.iter().position(|other| other.arrived > pending.arrived);
        self.ready.insert(place.unwrap_or(self.ready.len()), pending);
    }

    /// Puts a job back that finds no free memory, until a run has ended. Returns the job if no run is under way.
    pub(in super::super) fn wait_for_room(
        &mut self,
        pending: Arc<Pending<J>>,
        runs_ended: u64,
        batch_holds_some: bool,
    ) -> Option<Arc<Pending<J>>> {
        let others = batch_holds_some || self.running > 1;
        if !others && self.runs_ended == runs_ended {
            return Some(pending);
        }
        self.put_back(pending);
        self.blocked = others;
        None
    }

    /// The job of this key has ended. The next job of the key becomes ready, behind those that are ready already.
    /// Returns whether there is one.
    pub(in super::super) fn release_key(&mut self, key: J::Key) -> bool {
        let next = self.by_key.get_mut(&key).and_then(VecDeque::pop_front);
        let follows = next.is_some();
        match next {
            Some(next) => self.ready.push_back(next),
            None => drop(self.by_key.remove(&key)),
        }
        follows
    }

    /// Returns an instance. `room`: memory may be free too, so that a blocked job tries again. Without it a blocked job
    /// tries again only if nothing else runs.
    pub(in super::super) fn return_instance(&mut self, workspace: W, room: bool) {
        self.idle.push(workspace);
        self.running -= 1;
        if room || self.running == 0 {
            self.runs_ended += 1;
            self.blocked = false;
        }
    }

    /// Removes jobs that ended while they waited.
    fn remove_ended(&mut self) {
        self.coalesced.retain(|pending| !pending.has_ended());
        for behind in self.by_key.values_mut() {
            behind.retain(|pending| !pending.has_ended());
        }
        let (gone, left): (Vec<_>, Vec<_>) = self.ready.drain(..).partition(|pending| pending.has_ended());
        self.ready.extend(left);
        for pending in gone {
            self.release_key(pending.job.key());
        }
        self.waiting = self.ready.len() + self.by_key.values().map(VecDeque::len).sum::<usize>();
    }
}

#[cfg(test)]
mod tests {
    use super::super::Counters;
    use super::*;

    /// A job that consists of its key.
    struct OfUser(u64);

    impl Job for OfUser {
        type Key = u64;
        type Response = ();

        fn key(&self) -> u64 {
            self.0
        }
    }

    type Queue = super::Queue<OfUser, u8>;

    /// Jobs of users 0 to `count` - 1. Every second one has a callback.
    fn requests(count: u64) -> Vec<Arc<Pending<OfUser>>> {
        let one = |user| Pending::new(OfUser(user), None, false, user % 2 == 1, &Arc::new(Counters::new()));
        (0..count).map(one).collect()
    }

    #[test]
    fn a_full_batch_is_claimed_whole() {
        let mut queue = Queue::new(2, 10);
        for pending in requests(5) {
            assert!(queue.push(pending).unwrap());
        }
        assert!(queue.can_fill(4));
        let claimed: Vec<_> = queue.claim(4).iter().map(|(pending, _)| pending.job.key()).collect();
        assert_eq!(claimed, [0, 1, 2, 3]);
        assert!(!queue.can_fill(4) && queue.waiting() == 1, "another worker does not see the same batch");
    }

    #[test]
    fn a_job_that_finds_no_room_waits_until_a_run_ends() {
        let mut queue = Queue::new(3, 10);
        let mut all = requests(2).into_iter();
        let (runs, waits) = (all.next().unwrap(), all.next().unwrap());
        let running = queue.take_instance_for(runs.job.key()).unwrap();
        assert!(queue.push(waits).unwrap());
        let (looks, taken) = (queue.take_instance().unwrap(), queue.take(true).unwrap());
        let ended = queue.runs_ended;
        assert!(queue.wait_for_room(taken, ended, false).is_none());
        queue.return_instance(looks, false);
        assert!(
            queue.next_runnable().is_none() && queue.take(true).is_none() && queue.runs_ended == ended,
            "nothing has changed"
        );
        queue.release_key(runs.job.key());
        queue.return_instance(running, true);
        assert!(queue.next_runnable().is_some() && queue.waiting() == 1);
        // No other job runs, and none has ended since: there will be no room.
        let (_looks, taken) = (queue.take_instance().unwrap(), queue.take(true).unwrap());
        let ended = queue.runs_ended;
        assert!(queue.wait_for_room(taken, ended, false).is_some());
    }

    #[test]
    fn two_jobs_that_find_no_room_do_not_wait_for_each_other() {
        let mut queue = Queue::new(2, 10);
        requests(2).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        // Each takes a job before the other puts its own back. So each sees that another one runs.
        let looks: Vec<_> = (0..2).map(|_| (queue.take_instance().unwrap(), queue.take(true).unwrap())).collect();
        let ended = queue.runs_ended;
        let workspaces: Vec<_> = looks
            .into_iter()
            .map(|(workspace, taken)| {
                assert!(queue.wait_for_room(taken, ended, false).is_none());
                workspace
            })
            .collect();
        assert!(queue.next_runnable().is_none());
        workspaces.into_iter().for_each(|workspace| queue.return_instance(workspace, false));
        assert!(queue.next_runnable().is_some() && queue.waiting() == 2, "nothing runs, so nothing blocks");
    }

    #[test]
    fn a_batch_that_is_put_back_is_behind_older_jobs() {
        let mut queue = Queue::new(2, 4);
        requests(4).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        // One worker has taken the first and the last job, another one coalesces the rest. They are put back in the
        // order first, rest, last.
        let first = queue.take(true).unwrap();
        queue.coalescing = true;
        let batch: Vec<_> = (0..2).map(|_| queue.coalesce().unwrap()).collect();
        let last = queue.take(true).unwrap();
        assert_eq!(queue.waiting(), 2);
        queue.put_back(first);
        queue.put_back_all(batch, Some(4));
        queue.put_back(last);
        assert_eq!((queue.waiting(), queue.coalescing, queue.no_arrivals_since), (4, false, Some(4)));
        let error = queue.push(requests(5).pop().unwrap()).unwrap_err();
        assert_eq!(error.status(), Status::Capacity, "{error}");
        let users: Vec<_> = (0..4).map(|_| queue.take(true).unwrap().job.key()).collect();
        assert_eq!(users, [0, 1, 2, 3]);
    }

    #[test]
    fn a_job_whose_time_limit_is_over_does_not_count_as_waiting() {
        let mut queue = Queue::new(1, 10);
        let all: Vec<_> = requests(3).into_iter().chain(requests(1)).collect();
        for pending in &all {
            queue.push(Arc::clone(pending)).unwrap();
        }
        queue.coalescing = true;
        queue.coalesce().unwrap();
        // One in a coalescing window, two that are ready, and one behind the first.
        assert_eq!((queue.waiting(), queue.still_waiting()), (4, 4));
        for (ended, pending) in [&all[0], &all[2], &all[3]].into_iter().enumerate() {
            pending.expire();
            assert_eq!((queue.waiting(), queue.still_waiting()), (4, 3 - ended));
        }
    }

    #[test]
    fn jobs_with_a_callback_are_left_to_workers() {
        let mut queue = Queue::new(1, 10);
        requests(3).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        assert_eq!(queue.take(false).unwrap().job.key(), 0);
        assert!(queue.take(false).is_none() && queue.waiting() == 2);
        assert_eq!((queue.take(true).unwrap().job.key(), queue.take(false).unwrap().job.key()), (1, 2));
        assert_eq!(queue.waiting(), 0);
    }
}
