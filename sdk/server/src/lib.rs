//! `pagoda serve`: models over HTTP, by the protocols that clients speak already.
//!
//! [`Server::open`] opens the models of a [`Config`], [`Server::run`] answers requests until a signal ends it. What a request
//! asks of a model goes through the Rust interface of `pagoda`; this crate has no inference of its own.
//!
//! A request's way: `listen` (connections and their time limits) → `gate` (request id, `access` by keys and origins, limits, log) → `routes` → a
//! protocol (`openai`, `kserve`, `native`; `grpc` frames messages) → `run` (the generator, and what cancels a request).

mod access;
mod activity;
mod body;
mod config;
mod drain;
mod events;
mod failure;
mod files;
mod gate;
mod grpc;
mod health;
mod heavy;
mod kserve;
mod listen;
mod logging;
mod metrics;
mod models;
mod native;
mod openai;
mod page;
mod patience;
mod reply;
mod routes;
mod run;
mod server;
mod state;
mod statistics;
mod tally;
mod tls;
mod traces;
mod tracked;
mod unique;
mod window;

pub use config::{Config, KeysFrom, Limits, ModelConfig, RedisConfig, TlsFiles};
pub use logging::LogFormat;
pub use server::Server;
pub use traces::TracesConfig;
