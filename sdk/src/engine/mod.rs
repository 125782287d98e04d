//! The ranking engine: a model folder, served. Requests bring a user's events and candidates and get scores; what was
//! computed of a history is kept, and requests that come at the same time run together. `sdk/docs/engine.md` says what
//! it promises.
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
//! Three parts: `batching` puts jobs of any kind together and runs them, `exec` runs a model on tensors that are bound in
//! place, and `rank` is the ranking engine on top of both.

mod batching;
mod exec;
mod rank;

pub use crate::folder::{
    Feature, FolderFile, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence,
    SourceOf, Task, Times,
};
pub use rank::{
    Columns, Engine, EngineOptions, EngineStats, EngineStore, Events, GraphShape, RankRequest, RankResponse,
    TableOptions,
};
