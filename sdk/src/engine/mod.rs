//! The ranking engine serves a model folder. A request brings a user's events and candidates and gets scores. The keys
//! and values computed for a history are cached. Concurrent requests run in one batch. `sdk/docs/engine.md` has the
//! guarantees.
//!
//! ```no_run
//! use pagoda::engine::{Columns, Engine, EngineOptions, Events, RankRequest};
//!
//! let engine = Engine::open("model", EngineOptions::default())?;
//! let events = Columns::new().with("movie", [17, 4]).with("rating", [5, 3]);
//! let response = engine.rank(&RankRequest {
//!     user: 7,
//!     events: Events { keys: events, times: Vec::new() },
//!     candidates: Columns::new().with("movie", [8, 15, 16]),
//!     ..RankRequest::default()
//! })?;
//! println!("{:?}", response.candidate(0));
//! # Ok::<(), pagoda::Error>(())
//! ```
//!
//! Three parts: `batching` schedules jobs of any kind in batches, `exec` runs a model on tensors that are bound in
//! place, and `rank` is the ranking engine on top of both.

mod batching;
mod exec;
#[cfg(feature = "llm")]
mod generate;
mod rank;
mod stores;

pub use crate::folder::{
    Feature, FolderFile, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence,
    SourceOf, Task, Times,
};
#[cfg(feature = "futures")]
pub use generate::AsyncTokens;
#[cfg(feature = "llm")]
pub use generate::{
    BeamOptions, Chat, Choice, ContextEnd, Driver, EarlyStop, Event, FinishReason, GenerateRequest, GenerateResponse,
    Generator, GeneratorOptions, GeneratorStats, Grammar, GrammarCompiler, GrammarState, KvPolicy, NextTokens, Prompt,
    SlotCall, Timings, Token, TokenLogprobs, TokenStream,
};
pub use rank::{
    Columns, Engine, EngineOptions, EngineProvider, EngineStats, Events, GraphShape, RankRequest, RankResponse,
    TableOptions,
};
pub use stores::EngineStore;
