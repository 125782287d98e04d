//! The operators of embedding tables on the CPU.

mod pool;
pub mod reference;
