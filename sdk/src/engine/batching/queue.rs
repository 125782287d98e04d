//! Jobs that wait: in order of arrival, one at a time of each key.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::Job;
use super::pending::Pending;
use crate::error::{Error, Result, Status};

/// Jobs that wait, and the instances that are free.
pub(in super::super) struct Queue<J: Job, W> {
    most: usize,
    /// One of each key at most.
    ready: VecDeque<Arc<Pending<J>>>,
    /// An entry for every key that has a job that is ready or runs: the jobs that come after that.
    behind: HashMap<J::Key, VecDeque<Arc<Pending<J>>>>,
    waiting: usize,
    /// The buffers of the instances that are free.
    idle: Vec<W>,
    running: usize,
    /// How many runs have ended.
    pub(in super::super) ended: u64,
    /// Whether the next one waits for pages that a running one has.
    blocked: bool,
    /// Whether a worker takes jobs as they come, for a batch that waits for others.
    pub(in super::super) gathering: bool,
    /// What it has taken. They still wait.
    gathered: Vec<Arc<Pending<J>>>,
    /// How many threads sleep no longer than a batch may wait for others.
    pub(in super::super) timed: usize,
    /// How many jobs had come when no others did for the last such batch.
    pub(in super::super) in_vain: Option<u64>,
    pub(in super::super) stop: bool,
}

impl<J: Job, W: Default> Queue<J, W> {
    pub(in super::super) fn new(instances: u32, most: u32) -> Self {
        Self {
            most: most as usize,
            ready: VecDeque::new(),
            behind: HashMap::new(),
            waiting: 0,
            idle: (0..instances).map(|_| W::default()).collect(),
            running: 0,
            ended: 0,
            blocked: false,
            gathering: false,
            gathered: Vec::new(),
            timed: 0,
            in_vain: None,
            stop: false,
        }
    }

    /// How many jobs wait.
    pub(in super::super) fn waiting(&self) -> usize {
        self.waiting + self.gathered.len()
    }

    /// Whether so many jobs could be in the next batch.
    pub(in super::super) fn fills(&mut self, batch: usize) -> bool {
        let mut waiting = self.ready.iter().filter(|pending| !pending.has_ended());
        // Only as many are looked at as it takes, unless some have ended meanwhile.
        if self.ready.len() < batch || waiting.nth(batch - 1).is_some() {
            return self.ready.len() >= batch;
        }
        self.clean();
        self.ready.len() >= batch
    }

    /// The one that is next, if an instance could run it.
    pub(in super::super) fn next(&self) -> Option<&Arc<Pending<J>>> {
        self.ready.front().filter(|_| !self.blocked && !self.idle.is_empty())
    }

    /// Whether a worker sees to it that a job that comes now does not wait for too long.
    pub(in super::super) fn is_attended(&self) -> bool {
        if self.gathering {
            // That worker takes those that come. But that may take long: another one looks after it, if there is one.
            self.timed > 0 || self.idle.is_empty()
        } else {
            self.next().is_some()
        }
    }

    /// Whether the next job has to wait for a run to end.
    pub(in super::super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Puts a job at the end, and says whether it could be in the next batch.
    pub(in super::super) fn push(&mut self, pending: Arc<Pending<J>>) -> Result<bool> {
        if self.waiting() >= self.most {
            self.clean();
        }
        if self.waiting() >= self.most {
            let message = format!("{} requests are waiting already (options.queue): try again later", self.waiting());
            return Err(Error::new(Status::Capacity, message));
        }
        self.waiting += 1;
        if let Some(behind) = self.behind.get_mut(&pending.job.key()) {
            behind.push_back(pending);
            return Ok(false);
        }
        self.behind.insert(pending.job.key(), VecDeque::new());
        self.ready.push_back(pending);
        Ok(true)
    }

    /// An instance for a job that need not wait, if there is one.
    pub(in super::super) fn at_once(&mut self, key: J::Key) -> Option<W> {
        if !self.ready.is_empty() || self.behind.contains_key(&key) {
            return None;
        }
        let workspace = self.idle.pop()?;
        self.behind.insert(key, VecDeque::new());
        self.running += 1;
        Some(workspace)
    }

    /// Whether a job of a key runs, or is being put into a batch.
    pub(in super::super) fn is_taken(&self, key: J::Key) -> bool {
        self.behind.contains_key(&key) && self.ready.iter().all(|pending| pending.job.key() != key)
    }

    /// A free instance.
    pub(in super::super) fn instance(&mut self) -> Option<W> {
        let workspace = self.idle.pop()?;
        self.running += 1;
        Some(workspace)
    }

    /// The next job, which is its caller's to run or to put back. `callbacks`: also if it has one.
    pub(in super::super) fn take(&mut self, callbacks: bool) -> Option<Arc<Pending<J>>> {
        if self.blocked {
            return None;
        }
        while let Some(pending) = self.ready.pop_front() {
            if !pending.has_ended() {
                if pending.calls_back && !callbacks {
                    self.ready.push_front(pending);
                    return None;
                }
                self.waiting -= 1;
                return Some(pending);
            }
            self.waiting -= 1;
            self.done(pending.job.key());
        }
        None
    }

    /// As [`Self::take`], for a batch that waits for others.
    pub(in super::super) fn gather(&mut self) -> Option<Arc<Pending<J>>> {
        self.take(true).inspect(|pending| self.gathered.push(Arc::clone(pending)))
    }

    /// The last that was taken so does not wait any more, or is going to be put back.
    pub(in super::super) fn ungather(&mut self, last: &Arc<Pending<J>>) {
        self.gathered.pop_if(|pending| Arc::ptr_eq(pending, last));
    }

    /// No worker takes jobs as they come any more; those that were taken run, or are put back.
    pub(in super::super) fn end_gathering(&mut self) {
        self.gathering = false;
        self.gathered.clear();
    }

    /// Puts a batch back that waited for others: `in_vain` if none came after so many.
    pub(in super::super) fn put_all_back(&mut self, batch: Vec<Arc<Pending<J>>>, in_vain: Option<u64>) {
        self.end_gathering();
        for pending in batch {
            if pending.has_ended() {
                self.done(pending.job.key());
                continue;
            }
            self.put_back(pending);
        }
        // Their pages are there for a job that found none.
        (self.in_vain, self.blocked) = (in_vain, false);
    }

    /// Puts a job back that was taken, in front of those that came later.
    pub(in super::super) fn put_back(&mut self, pending: Arc<Pending<J>>) {
        self.waiting += 1;
        // Another worker may have put one back that came before: the first decides how long the others wait.
        let place = self.ready.iter().position(|other| other.arrived > pending.arrived);
        self.ready.insert(place.unwrap_or(self.ready.len()), pending);
    }

    /// Puts a job back for which there is no room now, until a run has ended. Gives it back if none is to end.
    pub(in super::super) fn until_room(
        &mut self,
        pending: Arc<Pending<J>>,
        ended: u64,
        batch_holds_some: bool,
    ) -> Option<Arc<Pending<J>>> {
        let others = batch_holds_some || self.running > 1;
        if !others && self.ended == ended {
            return Some(pending);
        }
        self.put_back(pending);
        self.blocked = others;
        None
    }

    /// The job of a key that was taken has ended: the next one of that key may follow, after those that wait. Says
    /// whether there is one.
    pub(in super::super) fn done(&mut self, key: J::Key) -> bool {
        let next = self.behind.get_mut(&key).and_then(VecDeque::pop_front);
        let follows = next.is_some();
        match next {
            Some(next) => self.ready.push_back(next),
            None => drop(self.behind.remove(&key)),
        }
        follows
    }

    /// An instance is free again. `room`: and so may be pages; otherwise a job that found no room does not look again at
    /// once, unless nothing else runs.
    pub(in super::super) fn give_back(&mut self, workspace: W, room: bool) {
        self.idle.push(workspace);
        self.running -= 1;
        if room || self.running == 0 {
            self.ended += 1;
            self.blocked = false;
        }
    }

    /// Drops jobs that have ended while they waited.
    fn clean(&mut self) {
        self.gathered.retain(|pending| !pending.has_ended());
        for behind in self.behind.values_mut() {
            behind.retain(|pending| !pending.has_ended());
        }
        let (gone, left): (Vec<_>, Vec<_>) = self.ready.drain(..).partition(|pending| pending.has_ended());
        self.ready.extend(left);
        for pending in gone {
            self.done(pending.job.key());
        }
        self.waiting = self.ready.len() + self.behind.values().map(VecDeque::len).sum::<usize>();
    }
}

#[cfg(test)]
mod tests {
    use super::super::Counters;
    use super::*;

    /// A job that is nothing but its key.
    struct OfUser(u64);

    impl Job for OfUser {
        type Key = u64;
        type Response = ();

        fn key(&self) -> u64 {
            self.0
        }
    }

    type Queue = super::Queue<OfUser, u8>;

    /// Jobs of users 0 to before `count`; every other one has a callback.
    fn requests(count: u64) -> Vec<Arc<Pending<OfUser>>> {
        let one = |user| Pending::new(OfUser(user), None, false, user % 2 == 1, &Arc::new(Counters::new()));
        (0..count).map(one).collect()
    }

    #[test]
    fn whoever_finds_no_room_is_left_alone_until_a_run_ends() {
        let mut queue = Queue::new(3, 10);
        let mut all = requests(2).into_iter();
        let (runs, waits) = (all.next().unwrap(), all.next().unwrap());
        let running = queue.at_once(runs.job.key()).unwrap();
        assert!(queue.push(waits).unwrap());
        let (looks, taken) = (queue.instance().unwrap(), queue.take(true).unwrap());
        let ended = queue.ended;
        assert!(queue.until_room(taken, ended, false).is_none());
        queue.give_back(looks, false);
        assert!(queue.next().is_none() && queue.take(true).is_none() && queue.ended == ended, "nothing has changed");
        queue.done(runs.job.key());
        queue.give_back(running, true);
        assert!(queue.next().is_some() && queue.waiting() == 1);
        // Alone, and nothing has ended since: there will be no room.
        let (_looks, taken) = (queue.instance().unwrap(), queue.take(true).unwrap());
        let ended = queue.ended;
        assert!(queue.until_room(taken, ended, false).is_some());
    }

    #[test]
    fn two_that_find_no_room_do_not_wait_for_one_another() {
        let mut queue = Queue::new(2, 10);
        requests(2).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        // Each has taken one before the other has put its own back, so each sees someone who runs.
        let looks: Vec<_> = (0..2).map(|_| (queue.instance().unwrap(), queue.take(true).unwrap())).collect();
        let ended = queue.ended;
        let workspaces: Vec<_> = looks
            .into_iter()
            .map(|(workspace, taken)| {
                assert!(queue.until_room(taken, ended, false).is_none());
                workspace
            })
            .collect();
        assert!(queue.next().is_none());
        workspaces.into_iter().for_each(|workspace| queue.give_back(workspace, false));
        assert!(queue.next().is_some() && queue.waiting() == 2, "nothing runs, so nothing is to be waited for");
    }

    #[test]
    fn a_batch_that_is_put_back_is_behind_whoever_came_before() {
        let mut queue = Queue::new(2, 4);
        requests(4).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        // One thread has taken the first and the last, another one gathers; then the first is put back, all of the others, and
        // the last.
        let first = queue.take(true).unwrap();
        queue.gathering = true;
        let batch: Vec<_> = (0..2).map(|_| queue.gather().unwrap()).collect();
        let last = queue.take(true).unwrap();
        assert_eq!(queue.waiting(), 2);
        queue.put_back(first);
        queue.put_all_back(batch, Some(4));
        queue.put_back(last);
        assert_eq!((queue.waiting(), queue.gathering, queue.in_vain), (4, false, Some(4)));
        let error = queue.push(requests(5).pop().unwrap()).unwrap_err();
        assert_eq!(error.status(), Status::Capacity, "{error}");
        let users: Vec<_> = (0..4).map(|_| queue.take(true).unwrap().job.key()).collect();
        assert_eq!(users, [0, 1, 2, 3]);
    }

    #[test]
    fn those_with_a_callback_are_left_to_others() {
        let mut queue = Queue::new(1, 10);
        requests(3).into_iter().for_each(|pending| assert!(queue.push(pending).unwrap()));
        assert_eq!(queue.take(false).unwrap().job.key(), 0);
        assert!(queue.take(false).is_none() && queue.waiting() == 2);
        assert_eq!((queue.take(true).unwrap().job.key(), queue.take(false).unwrap().job.key()), (1, 2));
        assert_eq!(queue.waiting(), 0);
    }
}
