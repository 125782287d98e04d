//! The generator: a request brings a prompt and gets text. Requests run together by continuous batching.

mod answers;
mod beam;
mod beam_options;
mod beams;
mod clock;
mod draft;
mod forms;
mod grammar;
mod kv_policy;
mod mailbox;
mod open_model;
mod options;
mod pace;
mod plan;
mod policy;
mod prefix_items;
mod prefixes;
mod request;
mod sampling;
mod scheduler;
mod sequence;
mod sequence_text;
mod sessions;
mod slot_buffers;
mod slot_image;
mod slot_sessions;
mod stats;
mod stream;
mod submit;
mod workspace;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use beam_options::{BeamOptions, EarlyStop};
pub use grammar::{Grammar, GrammarCompiler, GrammarState, NextTokens};
pub use kv_policy::{KvPolicy, SlotCall};
pub use options::{Driver, GeneratorOptions};

#[cfg(feature = "futures")]
pub use self::stream::AsyncTokens;
pub use request::{
    Chat, Choice, ContextEnd, Event, FinishReason, GenerateRequest, GenerateResponse, Prompt, Timings, Token,
};
pub use sampling::TokenLogprobs;
pub use stats::GeneratorStats;
pub use stream::TokenStream;

use self::answers::{Callback, Sink};
use self::draft::{DraftModel, Speculation};
use self::open_model::OpenModel;
use self::scheduler::Scheduler;
use self::sequence::Sequence;
use self::sessions::Sessions;
use self::slot_sessions::SlotSessions;
use self::stats::Counters;
use self::stream::Callbacks;
use super::{EngineProvider, stores};
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::kv::{KvStats, Owner, Owners, TierStats, Tiers};
use crate::runtime::Watcher;
use crate::store::Store;
use crate::sync::{Condvar, Mutex, Worker};
use crate::text::Tokenizer;

/// How long the thread waits before it looks again for what comes from the store.
const STORE_POLL: Duration = Duration::from_millis(1);

/// A generator that serves one model folder of the kind `generate`. Any number of threads may use it at the same time.
///
/// Dropping it cancels the requests that wait or run, and writes the cached keys and values to the store, if there is one.
///
/// ```no_run
/// use pagoda::engine::{GenerateRequest, Generator, GeneratorOptions};
///
/// let generator = Generator::open("model", GeneratorOptions::default())?;
/// let request = GenerateRequest { max_new_tokens: Some(32), ..GenerateRequest::new("The capital of France is") };
/// let response = generator.generate(&request)?;
/// println!("{}", response.choices[0].text);
/// for token in generator.stream(&request)? {
///     print!("{}", token?.text);
/// }
/// # Ok::<(), pagoda::Error>(())
/// ```
pub struct Generator {
    shared: Arc<Shared>,
    callbacks: Callbacks,
    /// Present if the generator runs its steps itself.
    worker: Option<Worker>,
}

/// What the threads of a generator share.
struct Shared {
    model: Arc<OpenModel>,
    options: GeneratorOptions,
    counters: Arc<Counters>,
    speculation: Arc<Speculation>,
    inbox: Mutex<Inbox>,
    /// Signalled when the inbox has something new, or a request was cancelled.
    changed: Condvar,
    /// One step runs at a time.
    scheduler: Mutex<Scheduler>,
}

/// What callers have asked for since the last step.
#[derive(Default)]
struct Inbox {
    new: Vec<Sequence>,
    /// Sequences that wait in the scheduler.
    waiting: usize,
    /// The number of the next request.
    next: u64,
    /// Whether a request was cancelled since the last step.
    cancelled: bool,
    stop: bool,
}

impl Generator {
    /// Opens a model folder and everything under it. The graph of a decoder of another exporter is rewritten in memory so that it
    /// reads pages, where it is recognised; the environment variable PAGODA_REWRITTEN=0 has it run as it is.
    ///
    /// # Errors
    /// As [`GenerateFolder::open`], [`Model::open`](crate::Model::open), and the errors of opening stores and caches.
    /// INVALID_ARGUMENT for invalid options. MODEL for a tokenizer or a template that can not be read.
    pub fn open(folder: impl AsRef<Path>, options: GeneratorOptions) -> Result<Self> {
        open_model::check(&options)?;
        Self::open_by(GenerateFolder::open(folder)?, options, OpenModel::open)
    }

    /// Opens a folder that is read already, with the graph that it has: a decoder of another exporter is run as it is.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_folder(folder: GenerateFolder, options: GeneratorOptions) -> Result<Self> {
        open_model::check(&options)?;
        Self::open_by(folder, options, OpenModel::open_as_it_is)
    }

    fn open_by(
        folder: GenerateFolder,
        options: GeneratorOptions,
        open: impl FnOnce(GenerateFolder, &GeneratorOptions, Option<Arc<dyn Store>>) -> Result<OpenModel>,
    ) -> Result<Self> {
        if folder.main.is_some() {
            let message = "it drafts for another model, whose keys and values it reads: open that one, with this folder as \
                           options.draft_model";
            return Err(Error::new(Status::Unsupported, message).about("folder"));
        }
        let store = stores::open(options.store.as_ref(), options.host_bytes, &options.model)?;
        // Host memory keeps nothing for sure: the end of a turn does not wait for it, and does not fail by it.
        let is_durable = options.store.is_some();
        let model = Arc::new(open(folder, &options, store)?);
        let counters = Arc::new(Counters::default());
        let sessions = Sessions::start(&model, is_durable)?;
        let slot_sessions = SlotSessions::open(&model)?;
        let speculation = Arc::<Speculation>::default();
        let drafts = (Arc::clone(&speculation), DraftModel::open(&model, &options)?);
        let scheduler =
            Scheduler::new(Arc::clone(&model), &options, sessions, slot_sessions, Arc::clone(&counters), drafts);
        let shared = Arc::new(Shared {
            model,
            options,
            counters,
            speculation,
            inbox: Mutex::default(),
            changed: Condvar::new(),
            scheduler: Mutex::new(scheduler),
        });
        let worker = match shared.options.driver {
            Driver::Caller => None,
            Driver::Thread => {
                let shared = Arc::clone(&shared);
                Some(Worker::spawn("pagoda-generate", "generate on", move || shared.work())?)
            }
        };
        Ok(Self { shared, callbacks: Callbacks::default(), worker })
    }

    /// Answers a request.
    ///
    /// # Errors
    /// - INVALID_ARGUMENT: the request is invalid, or does not fit into the model's context or the limits.
    /// - CAPACITY: too many requests wait, or the sequence is larger than the pool.
    /// - UNSUPPORTED: a chat, where the model has no template.
    /// - RUNTIME: the model failed.
    ///
    /// A cancelled request and one whose timeout is over are no errors: the answers have what was generated until then.
    pub fn generate(&self, request: &GenerateRequest) -> Result<GenerateResponse> {
        self.open_stream(request, false)?.response()
    }

    /// Answers a request token by token. Dropping the stream cancels the request.
    ///
    /// # Errors
    /// As [`Generator::generate`]. Errors that occur while the request runs come from the stream.
    pub fn stream(&self, request: &GenerateRequest) -> Result<TokenStream> {
        self.open_stream(request, true)
    }

    fn open_stream(&self, request: &GenerateRequest, tokens: bool) -> Result<TokenStream> {
        let (sender, events) = mailbox::mailbox();
        let answers = self.shared.submit(request, Sink::Stream { sender, tokens })?;
        Ok(TokenStream::new(events, answers, Arc::downgrade(&self.shared)))
    }

    /// Answers a request asynchronously. `event` is called for every token, and once for the end, on a thread of the
    /// generator. It must not wait for other requests of this generator. An invalid request is an error of this function,
    /// and `event` is not called.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate_async(&self, request: &GenerateRequest, event: impl FnMut(Event) + Send + 'static) -> Result<()> {
        let callback: Callback = Box::new(event);
        let deliver = self.callbacks.start()?;
        self.shared.submit(request, Sink::Callback { callback: Arc::new(Mutex::new(callback)), deliver })?;
        Ok(())
    }

    /// Answers many requests, as many at a time as fit. Returns the outcomes in the order of the requests. `progress` is
    /// called with the number of requests that have ended.
    pub fn generate_all(
        &self,
        requests: &[GenerateRequest],
        mut progress: impl FnMut(usize),
    ) -> Vec<Result<GenerateResponse>> {
        stream::generate_all(self, requests, &mut progress)
    }

    /// Runs one step on this thread, for a generator with [`Driver::Caller`]. Returns whether there is more to do.
    ///
    /// # Errors
    /// UNSUPPORTED if the generator runs its steps itself.
    pub fn step(&self) -> Result<bool> {
        if self.shared.options.driver != Driver::Caller {
            let message = "this generator runs its steps itself: open it with driver = caller";
            return Err(Error::new(Status::Unsupported, message).about("options.driver"));
        }
        Ok(self.shared.step())
    }

    /// The tokens of a prompt, as a request with it would have them.
    pub fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        self.shared.model.tokens(prompt)
    }

    /// The tokenizer of the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.model.tokenizer
    }

    /// Forgets sessions: their keys and values, in memory and in the store. Returns how many of them were known. Pages that
    /// they share with others stay. BUSY if a request of one runs.
    pub fn forget(&self, sessions: &[&str]) -> Result<usize> {
        let owners: Vec<_> = sessions.iter().map(|session| submit::session_owner(session)).collect();
        let model = &self.shared.model;
        let stored = slot_sessions::stored(model, &owners);
        let is_known = |(owner, stored): (&Owner, bool)| stored || model.kv.lookup(&[*owner])[0].length > 0;
        let known = owners.iter().zip(stored).map(is_known).filter(|known| *known).count();
        let evicted = model.kv.evict(Owners::These(&owners), Tiers::ALL)?;
        slot_sessions::forget(model, Some(&owners))?;
        Ok(evicted.max(known))
    }

    /// Evicts the keys and values of sessions from the pool to host memory and the store. Without those tiers they are
    /// lost. Returns how many of the sessions had any in the pool.
    pub fn unload(&self, sessions: &[&str]) -> Result<usize> {
        let owners: Vec<_> = sessions.iter().map(|session| submit::session_owner(session)).collect();
        self.shared.model.kv.evict(Owners::These(&owners), Tiers::RESIDENT)
    }

    /// Starts to load the keys and values of sessions into the pool, and returns at once.
    pub fn prefetch(&self, sessions: &[&str]) -> Result<usize> {
        let owners: Vec<_> = sessions.iter().map(|session| submit::session_owner(session)).collect();
        self.shared.model.kv.prefetch(&owners)
    }

    /// Drops all prefixes that no request uses now, and all sessions, from the pool. With `stored`, from host memory and the
    /// store, too. Returns how many histories there were.
    pub fn clear(&self, stored: bool) -> Result<usize> {
        let tiers = if stored { Tiers::ALL } else { Tiers::RESIDENT };
        let evicted = self.shared.model.kv.evict(Owners::All, tiers)?;
        let forgotten = if stored { slot_sessions::forget(&self.shared.model, None)? } else { 0 };
        Ok(evicted.max(forgotten))
    }

    /// The slots that steps have written since this was last called, in order, where the policy's
    /// [`replay_log`](KvPolicy::replay_log) is switched on: enough to run the same steps elsewhere, and what tests compare. It grows
    /// until it is taken.
    pub fn take_slot_log(&self) -> Vec<SlotCall> {
        self.shared.scheduler.lock().take_slot_log()
    }

    /// The model folder that is served.
    pub fn folder(&self) -> &GenerateFolder {
        &self.shared.model.folder
    }

    /// Where the model runs.
    pub fn provider(&self) -> EngineProvider {
        open_model::provider(&self.shared.model.model, &self.shared.options.model)
    }

    /// The counters of the generator.
    pub fn stats(&self) -> GeneratorStats {
        let mut stats = self.shared.counters.totals();
        stats.waiting += self.shared.inbox.lock().new.len() as u64;
        stats
    }

    /// Whether tokens are guessed where requests allow it (`max_draft`), from the next step on. They are until this is called.
    pub fn set_speculation(&self, on: bool) {
        self.shared.speculation.set(on);
    }

    /// Forgets how good guesses were and what they cost, and counts them from 0 again, with the next step.
    pub fn clear_speculation(&self) {
        self.shared.speculation.clear();
    }

    /// How full the tiers under the KV cache are, host memory before the store.
    pub fn tiers(&self) -> Vec<TierStats> {
        let model = &self.shared.model;
        model.slot_store.as_ref().map_or_else(|| model.kv.tiers(), |store| store.tiers())
    }

    /// The statistics of the KV cache.
    pub fn kv_stats(&self) -> KvStats {
        self.shared.model.kv.stats()
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        self.shared.inbox.lock().stop = true;
        self.shared.changed.notify_all();
        self.worker = None;
        self.shared.cancel_all();
        self.callbacks.stop();
    }
}

impl Shared {
    /// The loop of the generator's thread.
    fn work(&self) {
        while self.wait_for_work() {
            self.step();
        }
    }

    /// Waits until there is something to do. Returns false if the generator is closed.
    fn wait_for_work(&self) -> bool {
        let (waiting, running, deadline) = {
            let scheduler = self.scheduler.lock();
            let (waiting, running) = scheduler.len();
            (waiting, running, scheduler.next_deadline())
        };
        let mut inbox = self.inbox.lock();
        loop {
            if inbox.stop {
                return false;
            }
            if running > 0 || !inbox.new.is_empty() || std::mem::take(&mut inbox.cancelled) {
                return true;
            }
            if waiting == 0 {
                self.changed.wait(&mut inbox);
                continue;
            }
            // Sequences that wait while none runs wait for the store.
            let left = deadline.map_or(STORE_POLL, |deadline| deadline.saturating_duration_since(Instant::now()));
            self.changed.wait_for(&mut inbox, left.min(STORE_POLL));
            return !inbox.stop;
        }
    }

    /// Runs one step. Returns whether there is more to do.
    fn step(&self) -> bool {
        let mut scheduler = self.scheduler.lock();
        let new = {
            let mut inbox = self.inbox.lock();
            inbox.cancelled = false;
            std::mem::take(&mut inbox.new)
        };
        new.into_iter().for_each(|sequence| scheduler.add(sequence));
        scheduler.step();
        let (waiting, running) = scheduler.len();
        drop(scheduler);
        self.counters.set_queue(waiting, running);
        let mut inbox = self.inbox.lock();
        inbox.waiting = waiting;
        waiting + running + inbox.new.len() > 0
    }

    /// Ends everything.
    fn cancel_all(&self) {
        let new = std::mem::take(&mut self.inbox.lock().new);
        let mut scheduler = self.scheduler.lock();
        new.into_iter().for_each(|sequence| scheduler.add(sequence));
        scheduler.cancel_all();
    }

    /// A request was cancelled: the thread looks at once.
    fn notice_cancelled(&self) {
        self.inbox.lock().cancelled = true;
        self.changed.notify_all();
    }
}

impl Watcher for Shared {
    fn cancelled(&self) {
        self.notice_cancelled();
    }
}
