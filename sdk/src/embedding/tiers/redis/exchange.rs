//! Sends requests to many nodes at the same time, and collects the answers within a time limit.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use redis::Value;

use super::cluster::Cluster;
use super::node::{Answer, Job, Node, Request, RequestError, Wanted, late};

/// The approximate bytes of one job, sent and received. Answers are passed on one by one, so a time limit loses no
/// complete answer; but a connection serves one job after the other.
const JOB_BYTES: usize = 1 << 20;
/// How often one request is sent at most.
const MAX_TRIES: u8 = 5;

/// The time limit of an exchange.
#[derive(Clone, Copy)]
pub(super) enum Limit {
    /// A deadline for all answers.
    Until(Instant),
    /// The longest time between two answers.
    Each(Duration),
}

/// The requests that failed.
#[derive(Default)]
pub(super) struct Failures {
    /// Their ids.
    pub(super) requests: Vec<usize>,
    /// The reason of the first failure.
    pub(super) reason: String,
}

/// Sends every request to the node that has its slot, all at the same time. Calls `take` with each answer as it
/// arrives; an error of `take` fails the request.
pub(super) fn exchange(
    cluster: &Cluster,
    requests: Vec<Request>,
    limit: Limit,
    take: &mut dyn FnMut(usize, Value) -> Result<(), String>,
) -> Failures {
    let (sender, receiver) = channel();
    let wanted = Arc::new(AtomicBool::new(true));
    let tries = vec![0; requests.len()];
    let waiting = vec![true; requests.len()];
    let requests: Vec<_> = requests.into_iter().map(Arc::new).collect();
    let exchange = Exchange { cluster, left: requests.len(), late: false, requests, tries, waiting, sender, wanted };
    exchange.run(&receiver, limit, take)
}

/// Sends requests without waiting for answers. Requests that can not be sent are dropped.
pub(super) fn send_only(cluster: &Cluster, requests: Vec<Request>) {
    let wanted = Arc::new(AtomicBool::new(true));
    let map = cluster.map();
    for request in requests {
        if let Some(node) = map.node(request.slot) {
            let _ = node.submit(Job { requests: vec![Arc::new(request)], answers: None, wanted: wanted.clone() });
        }
    }
}

struct Exchange<'a> {
    cluster: &'a Cluster,
    requests: Vec<Arc<Request>>,
    tries: Vec<u8>,
    waiting: Vec<bool>,
    left: usize,
    /// Whether an answer missed the time limit.
    late: bool,
    sender: Sender<Answer>,
    wanted: Wanted,
}

impl Exchange<'_> {
    fn run(
        mut self,
        receiver: &Receiver<Answer>,
        limit: Limit,
        take: &mut dyn FnMut(usize, Value) -> Result<(), String>,
    ) -> Failures {
        let mut failures = Failures::default();
        if !matches!(limit, Limit::Until(end) if end <= Instant::now()) {
            self.send_all(&mut failures);
        }
        let mut last = Instant::now();
        while self.left > 0 {
            let end = match limit {
                Limit::Until(end) => end,
                Limit::Each(time) => last + time,
            };
            let (id, answer) = match receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.give_up(&mut failures);
                    break;
                }
            };
            last = Instant::now();
            let outcome = match answer {
                Ok(value) => take(id, value).map(|()| self.done(id)),
                Err(trouble) => self.again(id, trouble),
            };
            if let Err(reason) = outcome {
                self.fail(id, reason, &mut failures);
            }
        }
        if self.late {
            self.cluster.counters().timeouts.fetch_add(1, Relaxed);
        }
        failures
    }

    fn send_all(&mut self, failures: &mut Failures) {
        let map = self.cluster.map();
        let mut groups: Vec<(&Arc<Node>, usize, Vec<_>)> = Vec::new();
        for request in self.requests.clone() {
            let Some(node) = map.node(request.slot) else {
                let reason = format!("no node that is known has slot {}", request.slot);
                self.fail(request.id, reason, failures);
                continue;
            };
            let fits = |bytes: usize| bytes + request.bytes <= JOB_BYTES;
            match groups.iter_mut().find(|(other, bytes, _)| Arc::ptr_eq(node, other) && fits(*bytes)) {
                Some((_, bytes, group)) => {
                    *bytes += request.bytes;
                    group.push(request);
                }
                None => groups.push((node, request.bytes, vec![request])),
            }
        }
        for (node, _, group) in groups {
            let ids: Vec<_> = group.iter().map(|request| request.id).collect();
            let Err(trouble) = self.send(node, group) else { continue };
            for id in ids {
                if let Err(reason) = self.again(id, trouble.clone()) {
                    self.fail(id, reason, failures);
                }
            }
        }
    }

    fn send(&mut self, node: &Node, requests: Vec<Arc<Request>>) -> Result<(), RequestError> {
        for request in &requests {
            self.tries[request.id] += 1;
        }
        node.submit(Job { requests, answers: Some(self.sender.clone()), wanted: self.wanted.clone() })
    }

    /// Sends a request again if that may succeed.
    fn again(&mut self, id: usize, trouble: RequestError) -> Result<(), String> {
        self.late |= matches!(trouble, RequestError::Late(_));
        if self.tries[id] >= MAX_TRIES {
            return Err(trouble.text());
        }
        let old = &self.requests[id];
        let (node, asking) = match &trouble {
            RequestError::Elsewhere { address, asking } => (self.cluster.at(address), *asking),
            RequestError::Again(_) | RequestError::NoScript(_) => match self.cluster.map().node(old.slot) {
                Some(node) => (Ok(node.clone()), old.asking),
                None => return Err(trouble.text()),
            },
            RequestError::Late(reason) | RequestError::Failed(reason) => return Err(reason.clone()),
        };
        let node = node.map_err(|error| error.to_string())?;
        let new = Request { command: old.command.clone(), asking, ..**old };
        self.send(&node, vec![Arc::new(new)]).map_err(|trouble| trouble.text())
    }

    fn done(&mut self, id: usize) {
        self.waiting[id] = false;
        self.left -= 1;
    }

    fn fail(&mut self, id: usize, reason: String, failures: &mut Failures) {
        self.done(id);
        if failures.requests.is_empty() {
            failures.reason = reason;
        }
        failures.requests.push(id);
    }

    /// Fails all requests that are still waiting: the time limit has passed.
    fn give_up(&mut self, failures: &mut Failures) {
        self.late = true;
        for id in 0..self.requests.len() {
            if self.waiting[id] {
                let map = self.cluster.map();
                let node = map.node(self.requests[id].slot).map_or("a node".into(), |node| node.address.to_string());
                self.fail(id, late(node), failures);
            }
        }
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.wanted.store(false, Relaxed);
    }
}
