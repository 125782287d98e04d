//! The operators of HSTU models.

mod append;
mod attention;
mod embed;
mod gate;
mod inputs;
mod linear;
mod norm;
mod output;
mod project;
mod unit;

use pagoda_kernels::{bf16, f16};

use crate::ort::{OperatorEntry, Versions, operator};
use append::PagedKvAppend;
use attention::HstuAttention;
use embed::HstuEmbed;
use gate::HstuGate;
use linear::HstuLinear;
use norm::HstuNorm;
use output::HstuOutput;
use project::HstuProject;
use unit::HstuUnit;

/// The operators of this family.
pub const OPERATORS: &[OperatorEntry] = &[
    operator!(c"HstuAttention", HstuAttention<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"PagedKvAppend", PagedKvAppend<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuNorm", HstuNorm<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuProject", HstuProject<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuGate", HstuGate<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuOutput", HstuOutput<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuEmbed", HstuEmbed<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuUnit", HstuUnit<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuLinear", HstuLinear, Versions::since(1), [Cpu, Cuda]),
];
