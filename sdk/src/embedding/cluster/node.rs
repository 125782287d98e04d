//! One node: its queue, and the threads that talk to it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Instant;

use redis::{Connection, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};

use super::Wanted;
use super::address::Address;
use super::bell::Bell;
use super::breaker::{Breaker, Next};
use super::link::{self, Link};
use super::options::RedisOptions;
use super::stats::Counters;
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex};

/// So many jobs may wait for one node.
const MAX_QUEUE: usize = 1024;

/// Threads of its own talk to each node, so that nothing but the keys of a node depends on how that node is.
pub(super) struct Node {
    pub(super) address: Address,
    link: Arc<Link>,
    breaker: Breaker,
    queue: Mutex<Queue>,
    ready: Condvar,
    counters: Arc<Counters>,
    /// Rung when this node seems not to have what we think it has.
    bell: Arc<Bell>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// Commands that are sent together.
pub(super) struct Job {
    pub(super) requests: Vec<Arc<Request>>,
    /// Where the answers go, each as soon as it is here; `None` if nobody wants to know.
    pub(super) answers: Option<Sender<Answer>>,
    /// Whether anybody still waits.
    pub(super) wanted: Wanted,
}

/// One command.
pub(super) struct Request {
    /// Tells its asker which one it is.
    pub(super) id: usize,
    pub(super) slot: u16,
    pub(super) command: Vec<u8>,
    /// About how many bytes are sent and come back.
    pub(super) bytes: usize,
    /// Whether the node is only about to get the slot, and has to be told that we know.
    pub(super) asking: bool,
}

pub(super) type Answer = (usize, Result<Value, Trouble>);

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// Another node has the slot; or, if `asking`, has it in part.
    Elsewhere { address: Address, asking: bool },
    /// It may work the next time.
    Again(String),
    /// The node had forgotten our scripts, and knows them again.
    NoScript(String),
    /// It did not come within the time limit.
    Late(String),
    /// There is none.
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
        link: &Arc<Link>,
        counters: &Arc<Counters>,
        bell: &Arc<Bell>,
    ) -> Result<Arc<Self>> {
        let node = Arc::new(Self {
            address,
            link: link.clone(),
            breaker: Breaker::new(options.breaker_failures, options.breaker_pause),
            queue: Mutex::default(),
            ready: Condvar::new(),
            counters: counters.clone(),
            bell: bell.clone(),
            threads: Mutex::default(),
        });
        for _ in 0..options.connections {
            let worker = node.clone();
            let thread = std::thread::Builder::new().name("pagoda-redis".into()).spawn(move || worker.work());
            match thread {
                Ok(thread) => node.threads.lock().push(thread),
                Err(error) => {
                    node.close();
                    let message =
                        format!("no thread for Redis could be started: {error}. Check the limits of the user");
                    return Err(Error::new(Status::Capacity, message));
                }
            }
        }
        Ok(node)
    }

    /// Hands commands over, or says at once why not.
    pub(super) fn submit(&self, job: Job) -> Result<(), Trouble> {
        let mut queue = self.queue.lock();
        if queue.closed {
            return Err(self.gone());
        }
        if !self.breaker.is_closed() {
            return Err(self.left_alone());
        }
        if queue.jobs.len() >= MAX_QUEUE {
            return Err(Trouble::Failed(format!("{MAX_QUEUE} requests wait for {} already", self.address)));
        }
        queue.jobs.push_back(job);
        self.ready.notify_one();
        Ok(())
    }

    /// Whether the breaker lets anything through.
    pub(super) fn is_asked(&self) -> bool {
        self.breaker.is_closed()
    }

    /// Ends the threads, after what they are doing now.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let jobs = std::mem::take(&mut queue.jobs);
        self.ready.notify_all();
        drop(queue);
        refuse(jobs, &self.gone());
    }

    /// Waits until the threads have ended.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A panic in it was printed when it happened; there is nobody here to hand it to.
            let _ = thread.join();
        }
    }

    fn work(&self) {
        let mut connection = None;
        loop {
            match self.next() {
                Work::Job(job) => self.serve(&mut connection, &job),
                Work::Trial => self.try_out(&mut connection),
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
        // A node that was restarted has closed the connection, which is only noticed now. Sending the same again does
        // no harm: nothing that we send changes anything when it is done a second time.
        if used_before && answered == 0 && outcome.as_ref().is_err_and(RedisError::is_connection_dropped) {
            *connection = None;
            outcome = self.talk(connection, job, &mut answered);
        }
        match outcome {
            Ok(well) => self.note(well, "its answers say that it can not serve"),
            Err(error) => {
                *connection = None;
                // A connection waits as long as who asked does: which of the two wakes first must not be seen.
                let trouble = match error.is_timeout() {
                    true => Trouble::Late(late(&self.address)),
                    false => Trouble::Failed(format!("{}: {error}", self.address)),
                };
                for request in &job.requests[answered..] {
                    job.answer(request, Err(trouble.clone()));
                }
                self.note(false, &trouble.text());
            }
        }
    }

    /// Sends and receives. Says whether the node seems to be well; an error says that the connection is not.
    fn talk(&self, connection: &mut Option<Connection>, job: &Job, answered: &mut usize) -> RedisResult<bool> {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(self.link.connect_with_scripts(&self.address)?),
        };
        let mut commands = Vec::with_capacity(job.requests.iter().map(|request| request.command.len() + 32).sum());
        for request in &job.requests {
            if request.asking {
                commands.extend(redis::cmd("ASKING").get_packed_command());
            }
            commands.extend(&request.command);
        }
        connection.send_packed_command(&commands)?;
        let mut well = true;
        let mut forgotten = Vec::new();
        let mut receive = || {
            for request in &job.requests {
                if request.asking {
                    connection.recv_response()?;
                }
                let answer = match connection.recv_response()? {
                    Value::ServerError(error) => {
                        let error = RedisError::from(error);
                        well &= !is_sick(&error);
                        Err(self.trouble(&error))
                    }
                    value => Ok(value),
                };
                *answered += 1;
                match answer {
                    Err(Trouble::NoScript(_)) => forgotten.push((request, answer)),
                    answer => job.answer(request, answer),
                }
            }
            Ok(())
        };
        let received: redis::RedisResult<()> = receive();
        // Someone has made the node forget our scripts. It knows them again before anybody asks again.
        let loaded = match &received {
            Ok(()) if !forgotten.is_empty() => link::load_scripts(connection),
            _ => Ok(()),
        };
        for (request, answer) in forgotten {
            job.answer(request, answer);
        }
        received.and(loaded).map(|()| well)
    }

    fn trouble(&self, error: &RedisError) -> Trouble {
        let text = format!("{}: {error}", self.address);
        match error.kind() {
            ErrorKind::Server(kind @ (ServerErrorKind::Moved | ServerErrorKind::Ask)) => {
                let asking = kind == ServerErrorKind::Ask;
                if !asking {
                    self.bell.ring();
                }
                let address = error.redirect_node().and_then(|(text, _)| self.address.parse_redirection(text));
                address.map_or(Trouble::Failed(text), |address| Trouble::Elsewhere { address, asking })
            }
            ErrorKind::Server(ServerErrorKind::TryAgain) => Trouble::Again(text),
            ErrorKind::Server(ServerErrorKind::NoScript) => Trouble::NoScript(text),
            _ => Trouble::Failed(text),
        }
    }

    fn try_out(&self, connection: &mut Option<Connection>) {
        *connection = None;
        let outcome = self.link.connect_with_scripts(&self.address).and_then(|mut new| {
            let well = link::is_well(&mut new)?;
            *connection = Some(new);
            Ok(well)
        });
        match outcome {
            Ok(well) => self.note(well, "it says that the cluster is down"),
            Err(error) => self.note(false, &error.to_string()),
        }
        // The others wait for how this ended.
        self.ready.notify_all();
    }

    /// Tells the breaker how it went.
    fn note(&self, well: bool, why: &str) {
        if well {
            if self.breaker.worked() {
                log::info!("Redis node {} is back", self.address);
            }
            return;
        }
        self.bell.ring();
        let was_asked = self.breaker.is_closed();
        if self.breaker.failed(Instant::now()) {
            if was_asked {
                self.counters.trips.fetch_add(1, Relaxed);
                log::warn!("Redis node {} is left alone for a while: {why}", self.address);
            }
            let jobs = std::mem::take(&mut self.queue.lock().jobs);
            refuse(jobs, &self.left_alone());
            self.ready.notify_all();
        }
    }

    fn gone(&self) -> Trouble {
        Trouble::Again(format!("{} is not part of the cluster any more", self.address))
    }

    fn left_alone(&self) -> Trouble {
        Trouble::Failed(format!("{} has failed several times and is left alone until it is tried again", self.address))
    }
}

impl Job {
    fn answer(&self, request: &Request, answer: Result<Value, Trouble>) {
        if let Some(answers) = &self.answers {
            // Nobody is there any more: past the time limit.
            let _ = answers.send((request.id, answer));
        }
    }
}

impl Trouble {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Elsewhere { address, .. } => format!("{address} is said to have it, and says another one has"),
            Self::Again(reason) | Self::NoScript(reason) | Self::Late(reason) | Self::Failed(reason) => reason.clone(),
        }
    }
}

/// What is said of a node that has not answered in time.
pub(super) fn late(node: impl Display) -> String {
    format!("{node} did not answer within the time limit")
}

fn refuse(jobs: VecDeque<Job>, why: &Trouble) {
    for job in jobs {
        for request in &job.requests {
            job.answer(request, Err(why.clone()));
        }
    }
}

/// Whether a node that answers so is of no use for any key.
fn is_sick(error: &RedisError) -> bool {
    use ServerErrorKind::{BusyLoading, ClusterDown, MasterDown, NoPerm, ReadOnly};
    match error.kind() {
        ErrorKind::Server(kind) => matches!(kind, BusyLoading | ClusterDown | MasterDown | NoPerm | ReadOnly),
        _ => matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "MISCONF")),
    }
}
