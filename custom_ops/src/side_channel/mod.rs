//! What the engine tells operators beside their inputs and attributes: the one place for it.
//!
//! ONNX Runtime calls an operator with the tensors of its node, and hands it no pointer of the caller's: neither for a session
//! nor for a run. A graph should not carry such facts as inputs either, because it would then not run in a plain ONNX Runtime.
//! So they go through the statics and thread-locals of this module, and through no others. Without them every operator is right,
//! only slower, or without tables.
//!
//! | What travels | From | To | By | How long |
//! |---|---|---|---|---|
//! | The tables that a session names ([`tables`]) | the library that registers the operators; an engine's model folder | `EmbeddingBag`, when the session is created | a static, by the session's configuration entry | the opener for the process; open tables while a [`tables::Bound`] or a node has them |
//! | What fills a pool's pages ([`PoolArrivals`]) | `sdk::kv`, which brings tokens back on a stream of its own | attention and append on the CUDA provider | a static, by the address of the pool | until the `PoolArrivals` is dropped, which is before the pool is freed |
//! | Whether any pool is being filled ([`with_arrivals`]) | `engine::exec`, before a run | the same operators | a thread-local | while the closure runs: the run is on that thread, so its operators are |
//! | Which memory no kernel of the run writes ([`with_settled`]) | `engine::exec`, before it captures a CUDA graph | attention on the CUDA provider | a thread-local | the same |
//! | How many rows the sequences have ([`with_rows_each`]) | `engine::exec`, of a batch or of the shape of a CUDA graph | PagedAttention on the CUDA provider | a thread-local | the same |
//!
//! Thread-locals reach the operators because ONNX Runtime launches the nodes of the CUDA provider on the thread that calls `Run`.
//! A CUDA graph keeps what was so at its capture: the engine captures one graph for each answer.

mod pools;
mod run;
pub mod tables;

pub(crate) use pools::wait_for_arrivals;
pub use pools::{Arrival, PoolArrivals};
pub(crate) use run::{is_settled, rows_each};
pub use run::{with_arrivals, with_rows_each, with_settled};
