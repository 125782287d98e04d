//! The compute kernels behind Pagoda's ONNX operators.
//!
//! Kernels take slices and know no framework type. Each operator is a struct that describes one call
//! ([`HstuAttention`], [`PagedKvAppend`], [`Pool`], those of [`dense`] and [`ends`], [`HstuEmbed`], [`HstuLinear`]); its `check`
//! refuses bad input before anything is written, and its `run` computes on the CPU with the best instruction set there is.
//!
//! Where to look: [`batch`] says what a call carries and what is refused; [`cpu::reference`] is the arithmetic in its
//! plainest form; [`cpu`] holds the fast kernels, which [`parallel`] spreads over threads; [`cuda`] launches those for
//! NVIDIA's GPUs.

#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod dense;
mod element;
pub mod embed;
pub mod ends;
pub mod linear;
mod mask;
pub mod parallel;
mod pool;

pub use batch::{CheckedAppend, CheckedAttention, HstuAttention, InputError, PagedKvAppend, Pages, Rows};
pub use dense::{GateNorm, HstuGate, HstuNorm, HstuOutput, HstuProject, Silu, Taken};
pub use element::Element;
pub use embed::{HstuEmbed, Lookup};
pub use ends::HstuUnit;
pub use half::{bf16, f16};
pub use linear::{Activation, HstuLinear};
pub use pool::{Combiner, Pool, check_offsets};
