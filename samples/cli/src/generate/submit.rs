//! Sends requests to the generator, and their events to the thread that prints.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};

use pagoda::engine::{Event, Prompt};
use pagoda::{Error, GenerateRequest, Generator, Result, Status};
use pagoda_requests::generate;
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use crate::source::{self, Next, Source};

/// The maximum number of answers to a request.
pub const MOST_ANSWERS: u32 = 1024;

/// What the thread that prints gets.
pub enum Message {
    /// The next request. Its events follow, with its number from 0.
    Begun(Begun),
    /// An event of the request of this number.
    Event(u64, Event),
    /// No more requests follow; or they can not be read.
    AllBegun(Result<()>),
    /// The user wants everything to end.
    Interrupted,
}

/// A request in flight.
pub struct Begun {
    /// Its line, from 1.
    pub line: u64,
    /// Its own id, or its line.
    pub id: Value,
    /// The number of answers it asks for.
    pub answers: u32,
    /// Bytes of requests that were read until now.
    pub read: u64,
}

/// Sends requests.
pub struct Submit {
    /// Not an `Arc`: a thread that waits for input must not keep the generator open.
    pub generator: Weak<Generator>,
    /// What lines that do not say otherwise ask for.
    pub defaults: GenerateRequest,
    /// Whether tokens are wanted, not only the end.
    pub tokens: bool,
    /// Where events go.
    pub messages: Sender<Message>,
    /// Limits the requests in flight.
    pub room: Arc<Room>,
}

impl Submit {
    /// Sends the request of the command line.
    pub fn one(self, prompt: Prompt) {
        let request = GenerateRequest { prompt, ..self.defaults.clone() };
        self.room.enter();
        self.begin(0, Begun { line: 1, id: 1.into(), answers: 1, read: 0 }, Ok(request));
        let _ = self.messages.send(Message::AllBegun(Ok(())));
    }

    /// Sends the requests of a source, on a thread of its own: answers are printed while it waits for the next line.
    pub fn start(self, source: Source) -> Result<()> {
        let read = move || {
            let read = self.read(source);
            let _ = self.messages.send(Message::AllBegun(read));
        };
        let thread = std::thread::Builder::new().name("pagoda-requests".into()).spawn(read);
        thread.map_err(|error| Error::new(Status::Internal, format!("no thread can be started: {error}")))?;
        Ok(())
    }

    fn read(&self, mut source: Source) -> Result<()> {
        let mut line = Vec::new();
        let mut number = 0;
        loop {
            let next = source.next(&mut line)?;
            let (mut id, request) = match next {
                Next::End => return Ok(()),
                Next::TooLong => (None, Err(source::too_long("no model has room for such a prompt"))),
                Next::Line if line.trim_ascii().is_empty() => continue,
                Next::Line => self.parse(&line),
            };
            let id = id.take().unwrap_or_else(|| source.number.into());
            self.room.enter();
            self.begin(number, Begun { line: source.number, id, answers: 1, read: source.read }, request);
            number += 1;
        }
    }

    /// The id and the request of a line.
    fn parse(&self, line: &[u8]) -> (Option<Value>, Result<GenerateRequest>) {
        match std::str::from_utf8(line) {
            Ok(text) => (generate::id(text.trim()), generate::parse(text.trim(), &self.defaults)),
            Err(error) => (None, Err(Error::invalid("request", format!("not UTF-8: {error}")))),
        }
    }

    fn begin(&self, number: u64, begun: Begun, request: Result<GenerateRequest>) {
        let answers = request.as_ref().ok().and_then(|request| request.n).unwrap_or(1);
        let _ = self.messages.send(Message::Begun(Begun { answers, ..begun }));
        let (messages, tokens) = (self.messages.clone(), self.tokens);
        let event = move |event: Event| {
            if tokens || matches!(event, Event::End(_)) {
                let _ = messages.send(Message::Event(number, event));
            }
        };
        let sent = request.and_then(|request| match self.generator.upgrade() {
            Some(generator) => generator.generate_async(&request, event),
            None => Err(Error::new(Status::Cancelled, "the command ends")),
        });
        if let Err(error) = sent {
            let _ = self.messages.send(Message::Event(number, Event::End(Err(error))));
        }
    }
}

/// Room for requests in flight.
pub struct Room {
    most: u32,
    used: Mutex<u32>,
    left: Condvar,
}

impl Room {
    /// For so many.
    pub fn new(most: u32) -> Self {
        Self { most, used: Mutex::new(0), left: Condvar::new() }
    }

    /// Waits until there is room for one more.
    pub fn enter(&self) {
        let mut used = self.used.lock();
        while *used >= self.most {
            self.left.wait(&mut used);
        }
        *used += 1;
    }

    /// One has left.
    pub fn leave(&self) {
        *self.used.lock() -= 1;
        self.left.notify_one();
    }
}
