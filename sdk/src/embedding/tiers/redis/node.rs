//! One node: its queue, and the worker threads that talk to it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::time::Instant;

use redis::{Connection, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};

use super::address;
use super::circuit_breaker::{CircuitBreaker, Next};
use super::connector::{self, Connector};
use super::counters::Counters;
use super::wakeup::Wakeup;
use crate::embedding::options::{Address, RedisOptions};
use crate::error::Result;
use crate::sync::{Condvar, Mutex, Worker};

/// The most jobs in the queue of one node.
const MAX_QUEUE: usize = 1024;

/// Each node has worker threads of its own, so that a slow node delays its own keys only.
pub(super) struct Node {
    pub(super) address: Address,
    connector: Arc<Connector>,
    breaker: CircuitBreaker,
    queue: Mutex<Queue>,
    ready: Condvar,
    counters: Arc<Counters>,
    /// Woken when the slot map may be outdated.
    wakeup: Arc<Wakeup>,
    workers: Mutex<Vec<Worker>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// Whether the exchange still waits for answers.
pub(super) type Wanted = Arc<AtomicBool>;

/// Requests that are sent together.
pub(super) struct Job {
    pub(super) requests: Vec<Arc<Request>>,
    /// Receives each answer as it arrives; `None` if the answers are not needed.
    pub(super) answers: Option<Sender<Answer>>,
    /// A job that is not wanted any more is skipped.
    pub(super) wanted: Wanted,
}

/// One command.
pub(super) struct Request {
    /// Its number in the exchange.
    pub(super) id: usize,
    pub(super) slot: u16,
    pub(super) command: Vec<u8>,
    /// The approximate number of bytes, sent and received.
    pub(super) bytes: usize,
    /// Whether to send ASKING first: the slot is being migrated to the node.
    pub(super) asking: bool,
}

pub(super) type Answer = (usize, Result<Value, RequestError>);

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub(super) enum RequestError {
    /// Another node has the slot; or, if `asking`, a part of it.
    Elsewhere { address: Address, asking: bool },
    /// The next attempt may succeed.
    Again(String),
    /// The node did not have our scripts. They are loaded again.
    NoScript(String),
    /// The answer missed the time limit.
    Late(String),
    /// The request failed for good.
    Failed(String),
}

enum Work {
    Job(Job),
    Trial,
    End,
}

impl Node {
    pub(super) fn start(
        address: Address,
        options: &RedisOptions,
        connector: &Arc<Connector>,
        counters: &Arc<Counters>,
        wakeup: &Arc<Wakeup>,
    ) -> Result<Arc<Self>> {
        let node = Arc::new(Self {
            address,
            connector: connector.clone(),
            breaker: CircuitBreaker::new(options.breaker_failures, options.breaker_pause),
            queue: Mutex::default(),
            ready: Condvar::new(),
            counters: counters.clone(),
            wakeup: wakeup.clone(),
            workers: Mutex::default(),
        });
        for _ in 0..options.connections_per_node {
            let own = node.clone();
            let worker = Worker::spawn("pagoda-redis", "talk to Redis with", move || own.work());
            node.workers.lock().push(worker.inspect_err(|_| node.close())?);
        }
        Ok(node)
    }

    /// Queues a job, or returns at once why not.
    pub(super) fn submit(&self, job: Job) -> Result<(), RequestError> {
        let mut queue = self.queue.lock();
        if queue.closed {
            return Err(self.gone());
        }
        if !self.breaker.is_closed() {
            return Err(self.breaker_open());
        }
        if queue.jobs.len() >= MAX_QUEUE {
            return Err(RequestError::Failed(format!("{MAX_QUEUE} requests wait for {} already", self.address)));
        }
        queue.jobs.push_back(job);
        self.ready.notify_one();
        Ok(())
    }

    /// Whether the breaker is closed.
    pub(super) fn is_available(&self) -> bool {
        self.breaker.is_closed()
    }

    /// Tells the workers to end after their present job. Fails all queued jobs.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let jobs = std::mem::take(&mut queue.jobs);
        self.ready.notify_all();
        drop(queue);
        fail(jobs, &self.gone());
    }

    /// Waits until the workers have ended.
    pub(super) fn join(&self) {
        let workers = std::mem::take(&mut *self.workers.lock());
        drop(workers);
    }

    fn work(&self) {
        let mut connection = None;
        loop {
            match self.next() {
                Work::Job(job) => self.serve(&mut connection, &job),
                Work::Trial => self.run_trial(&mut connection),
                Work::End => return,
            }
        }
    }

    fn next(&self) -> Work {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return Work::End;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Work::Job(job);
            }
            match self.breaker.next(Instant::now()) {
                Next::Try => return Work::Trial,
                Next::Wait => self.ready.wait(&mut queue),
                Next::WaitFor(rest) => drop(self.ready.wait_for(&mut queue, rest)),
            }
        }
    }

    fn serve(&self, connection: &mut Option<Connection>, job: &Job) {
        if !job.wanted.load(Relaxed) {
            return;
        }
        let used_before = connection.is_some();
        let mut answered = 0;
        let mut outcome = self.talk(connection, job, &mut answered);
        // A node that restarted has closed the connection, which is noticed only now. The job can be sent again: all
        // our commands are idempotent.
        if used_before && answered == 0 && outcome.as_ref().is_err_and(RedisError::is_connection_dropped) {
            *connection = None;
            outcome = self.talk(connection, job, &mut answered);
        }
        match outcome {
            Ok(healthy) => self.record(healthy, "its answers say that it can not serve"),
            Err(error) => {
                *connection = None;
                // The connection and the exchange have the same time limit: which of them ends first must not matter.
                let failure = match error.is_timeout() {
                    true => RequestError::Late(late(&self.address)),
                    false => RequestError::Failed(format!("{}: {error}", self.address)),
                };
                for request in &job.requests[answered..] {
                    job.answer(request, Err(failure.clone()));
                }
                self.record(false, &failure.text());
            }
        }
    }

    /// Sends the requests and receives the answers. Returns whether the node is healthy; an error if the connection
    /// failed.
    fn talk(&self, connection: &mut Option<Connection>, job: &Job, answered: &mut usize) -> RedisResult<bool> {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(self.connector.connect_with_scripts(&self.address)?),
        };
        let mut commands = Vec::with_capacity(job.requests.iter().map(|request| request.command.len() + 32).sum());
        for request in &job.requests {
            if request.asking {
                commands.extend(redis::cmd("ASKING").get_packed_command());
            }
            commands.extend(&request.command);
        }
        connection.send_packed_command(&commands)?;
        let mut healthy = true;
        let mut forgotten = Vec::new();
        let mut receive = || {
            for request in &job.requests {
                if request.asking {
                    connection.recv_response()?;
                }
                let answer = match connection.recv_response()? {
                    Value::ServerError(error) => {
                        let error = RedisError::from(error);
                        healthy &= !is_unusable(&error);
                        Err(self.request_error(&error))
                    }
                    value => Ok(value),
                };
                *answered += 1;
                match answer {
                    Err(RequestError::NoScript(_)) => forgotten.push((request, answer)),
                    answer => job.answer(request, answer),
                }
            }
            Ok(())
        };
        let received: redis::RedisResult<()> = receive();
        // The scripts of the node were flushed. They are loaded before the requests are sent again.
        let loaded = match &received {
            Ok(()) if !forgotten.is_empty() => connector::load_scripts(connection),
            _ => Ok(()),
        };
        for (request, answer) in forgotten {
            job.answer(request, answer);
        }
        received.and(loaded).map(|()| healthy)
    }

    fn request_error(&self, error: &RedisError) -> RequestError {
        let text = format!("{}: {error}", self.address);
        match error.kind() {
            ErrorKind::Server(kind @ (ServerErrorKind::Moved | ServerErrorKind::Ask)) => {
                let asking = kind == ServerErrorKind::Ask;
                if !asking {
                    self.wakeup.wake();
                }
                let address =
                    error.redirect_node().and_then(|(text, _)| address::parse_redirection(&self.address, text));
                address.map_or(RequestError::Failed(text), |address| RequestError::Elsewhere { address, asking })
            }
            ErrorKind::Server(ServerErrorKind::TryAgain) => RequestError::Again(text),
            ErrorKind::Server(ServerErrorKind::NoScript) => RequestError::NoScript(text),
            _ => RequestError::Failed(text),
        }
    }

    fn run_trial(&self, connection: &mut Option<Connection>) {
        *connection = None;
        let outcome = self.connector.connect_with_scripts(&self.address).and_then(|mut new| {
            let healthy = connector::is_healthy(&mut new)?;
            *connection = Some(new);
            Ok(healthy)
        });
        match outcome {
            Ok(healthy) => self.record(healthy, "it says that the cluster is down"),
            Err(error) => self.record(false, &error.to_string()),
        }
        // The other workers wait for the outcome.
        self.ready.notify_all();
    }

    /// Reports the outcome to the breaker.
    fn record(&self, healthy: bool, why: &str) {
        if healthy {
            if self.breaker.worked() {
                log::info!("Redis node {} is back", self.address);
            }
            return;
        }
        self.wakeup.wake();
        let was_closed = self.breaker.is_closed();
        if self.breaker.failed(Instant::now()) {
            if was_closed {
                self.counters.trips.fetch_add(1, Relaxed);
                log::warn!("Redis node {} is left alone for a while: {why}", self.address);
            }
            let jobs = std::mem::take(&mut self.queue.lock().jobs);
            fail(jobs, &self.breaker_open());
            self.ready.notify_all();
        }
    }

    fn gone(&self) -> RequestError {
        RequestError::Again(format!("{} is not part of the cluster any more", self.address))
    }

    fn breaker_open(&self) -> RequestError {
        RequestError::Failed(format!(
            "{} has failed several times and is left alone until it is tried again",
            self.address
        ))
    }
}

impl Job {
    fn answer(&self, request: &Request, answer: Result<Value, RequestError>) {
        if let Some(answers) = &self.answers {
            // The exchange has ended: the time limit has passed.
            let _ = answers.send((request.id, answer));
        }
    }
}

impl RequestError {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Elsewhere { address, .. } => format!("{address} is said to have it, and says another one has"),
            Self::Again(reason) | Self::NoScript(reason) | Self::Late(reason) | Self::Failed(reason) => reason.clone(),
        }
    }
}

/// The message about a node that has not answered in time.
pub(super) fn late(node: impl Display) -> String {
    format!("{node} did not answer within the time limit")
}

fn fail(jobs: VecDeque<Job>, why: &RequestError) {
    for job in jobs {
        for request in &job.requests {
            job.answer(request, Err(why.clone()));
        }
    }
}

/// Whether the node can serve no key at all.
fn is_unusable(error: &RedisError) -> bool {
    use ServerErrorKind::{BusyLoading, ClusterDown, MasterDown, NoPerm, ReadOnly};
    match error.kind() {
        ErrorKind::Server(kind) => matches!(kind, BusyLoading | ClusterDown | MasterDown | NoPerm | ReadOnly),
        _ => matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "MISCONF")),
    }
}
