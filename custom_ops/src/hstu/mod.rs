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

use crate::ort::{KernelEntry, OnCuda, OperatorEntry, Versions, operator};
use append::PagedKvAppend;
use attention::{HstuAttention, QuantisedHstuAttention};
use embed::HstuEmbed;
use gate::HstuGate;
use linear::HstuLinear;
use norm::HstuNorm;
use output::HstuOutput;
use project::HstuProject;
use unit::HstuUnit;

/// The operators of this family. HstuAttention has kernels for native and for quantised pools: ONNX Runtime picks one by the type
/// of `kv_pool`, and a native one where there is no pool.
pub const OPERATORS: &[OperatorEntry] = &[
    OperatorEntry {
        name: c"HstuAttention",
        versions: Versions::since(1),
        kernels: &[
            &[
                KernelEntry::of::<HstuAttention<f32>>(),
                KernelEntry::of::<HstuAttention<f16>>(),
                KernelEntry::of::<HstuAttention<bf16>>(),
                KernelEntry::of::<QuantisedHstuAttention<f32>>(),
                KernelEntry::of::<QuantisedHstuAttention<f16>>(),
                KernelEntry::of::<QuantisedHstuAttention<bf16>>(),
            ],
            &[
                KernelEntry::of::<OnCuda<HstuAttention<f32>>>(),
                KernelEntry::of::<OnCuda<HstuAttention<f16>>>(),
                KernelEntry::of::<OnCuda<HstuAttention<bf16>>>(),
                KernelEntry::of::<OnCuda<QuantisedHstuAttention<f32>>>(),
                KernelEntry::of::<OnCuda<QuantisedHstuAttention<f16>>>(),
                KernelEntry::of::<OnCuda<QuantisedHstuAttention<bf16>>>(),
            ],
        ],
    },
    operator!(c"PagedKvAppend", PagedKvAppend<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuNorm", HstuNorm<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuProject", HstuProject<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuGate", HstuGate<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuOutput", HstuOutput<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuEmbed", HstuEmbed<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuUnit", HstuUnit<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"HstuLinear", HstuLinear, Versions::since(1), [Cpu, Cuda]),
];
