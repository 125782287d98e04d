//! Embedding tables: what lookups promise, one thing at a time, and all of it at once on many threads.

mod files;
mod moved;
mod policies;
mod threads;
mod tiers;
mod updates;
