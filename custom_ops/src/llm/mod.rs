//! The operators of language models.

mod block_linear;
mod fused;
mod glu;
mod linear;
mod paged_attention;

use pagoda_kernels::{bf16, f16};

use crate::ort::{KernelEntry, OnCuda, OperatorEntry, Versions, operator};
use block_linear::{BlockLinear, HalfBlockLinear};
use glu::Glu;
use linear::Linear;
use paged_attention::{PagedAttention, QuantisedPagedAttention};

/// The operators of this family. PagedAttention has kernels for native and for quantised pools: ONNX Runtime picks one by the
/// type of `kv_pool`.
pub const OPERATORS: &[OperatorEntry] = &[
    OperatorEntry {
        name: c"PagedAttention",
        versions: Versions::since(1),
        kernels: &[
            &[
                KernelEntry::of::<PagedAttention<f32>>(),
                KernelEntry::of::<PagedAttention<f16>>(),
                KernelEntry::of::<PagedAttention<bf16>>(),
                KernelEntry::of::<QuantisedPagedAttention<f32>>(),
                KernelEntry::of::<QuantisedPagedAttention<f16>>(),
                KernelEntry::of::<QuantisedPagedAttention<bf16>>(),
            ],
            &[
                KernelEntry::of::<OnCuda<PagedAttention<f32>>>(),
                KernelEntry::of::<OnCuda<PagedAttention<f16>>>(),
                KernelEntry::of::<OnCuda<PagedAttention<bf16>>>(),
                KernelEntry::of::<OnCuda<QuantisedPagedAttention<f32>>>(),
                KernelEntry::of::<OnCuda<QuantisedPagedAttention<f16>>>(),
                KernelEntry::of::<OnCuda<QuantisedPagedAttention<bf16>>>(),
            ],
        ],
    },
    OperatorEntry {
        name: c"BlockLinear",
        versions: Versions::since(1),
        kernels: &[
            &[
                KernelEntry::of::<BlockLinear>(),
                KernelEntry::of::<HalfBlockLinear<f16>>(),
                KernelEntry::of::<HalfBlockLinear<bf16>>(),
            ],
            &[KernelEntry::of::<OnCuda<HalfBlockLinear<f16>>>(), KernelEntry::of::<OnCuda<HalfBlockLinear<bf16>>>()],
        ],
    },
    operator!(c"Glu", Glu<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
    operator!(c"Linear", Linear<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda]),
];
