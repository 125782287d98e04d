//! What the kernels of every family share on the CPU.

#[macro_use]
mod compiled;
pub(super) mod copy;
pub(super) mod finite;
pub(super) mod isa;
pub(super) mod kv_block;
pub(super) mod scratch;
pub(super) mod shared;
pub(crate) mod simd;

pub(super) use isa::Isa;
pub(super) use shared::Shared;
