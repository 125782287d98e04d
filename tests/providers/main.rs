//! The ai.pagoda operators inside ONNX Runtime match the reference, on the CPU provider and on the CUDA provider. It is
//! one program that can be copied to a GPU host (`target/providers-test --include-ignored`, after `make build-gpu`). It
//! needs ONNX Runtime and, for the engine, the folder tests/data in the current folder.

mod bag;
mod captured;
#[path = "../engine/cases.rs"]
#[allow(dead_code, reason = "its other half is for the engine's own tests")]
mod cases;
#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "../../kernels/tests/dense_cases/mod.rs"]
#[allow(dead_code, reason = "its other half is for the tests of the kernels")]
mod dense_cases;
#[path = "../../kernels/tests/gpu/device.rs"]
#[allow(dead_code, reason = "its other half is for the tests of the kernels")]
mod device;
mod embed_output;
#[path = "../../kernels/tests/embed_output_cases/mod.rs"]
#[allow(dead_code, reason = "its other half is for the tests of the kernels")]
mod embed_output_cases;
mod engine;
#[path = "../embedding/files.rs"]
#[allow(dead_code, reason = "its other half is for the tests of the embedding tables")]
mod files;
#[path = "../../kernels/tests/glu_cases/mod.rs"]
#[allow(dead_code, reason = "its other half is for the tests of the kernels")]
mod glu_cases;
mod language_models;
mod llm;
#[path = "../../kernels/tests/llm_cases/mod.rs"]
mod llm_cases;
mod memory;
mod moving;
mod operators;
mod parity;
mod placement;
mod quantised;
mod row_cache;
mod row_lookup;
mod session;

use std::sync::RwLock;

/// Held by every test that uses the GPU. While ONNX Runtime captures a graph, an allocation by any other thread of the
/// process makes the driver abort the capture.
static GPU: RwLock<()> = RwLock::new(());

/// The same tests on both providers; those on the GPU are for a host that has one.
macro_rules! on_both {
    ($($name:ident: $test:path;)*) => {
        mod cpu {
            $(#[test]
            fn $name() {
                $test(pagoda::Provider::Cpu);
            })*
        }
        mod cuda {
            $(#[test]
            #[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
            fn $name() {
                let _shared = crate::GPU.read().unwrap_or_else(std::sync::PoisonError::into_inner);
                $test(pagoda::Provider::Cuda);
            })*
        }
    };
}

on_both! {
    golden_cases: crate::parity::golden;
    random_calls: crate::parity::random;
    long_histories: crate::parity::long;
    without_a_cache: crate::parity::without_cache;
    calls_at_the_same_time: crate::parity::at_the_same_time;
    quantised_pools: crate::quantised::pools;
    one_pool_for_all: crate::parity::one_pool_for_all;
    nodes_run_where_the_model_does: crate::parity::nodes_run_there;
    shapes_that_do_not_fit: crate::parity::bad_shapes;
    vectors_of_keys: crate::bag::vectors;
    missing_rows_by_the_threshold: crate::bag::threshold;
    changed_rows: crate::bag::changes;
    one_cache_for_all_sessions: crate::bag::sharing;
    rows_that_leave_while_others_are_looked_up: crate::bag::racing;
    around_the_layers: crate::embed_output::from_keys_to_scores;
    golden_softmax_attention: crate::llm::golden;
    random_softmax_attention: crate::llm::random;
    softmax_attention_with_slots_of_heads: crate::llm::slots;
    softmax_attention_that_does_not_fit: crate::llm::bad_shapes;
    gated_linear_units: crate::llm::glu;
    scores_of_the_engine: crate::engine::scores;
    scores_with_quantised_pages: crate::engine::scores_of_quantised_pages;
    language_models_of_every_architecture: crate::language_models::every_architecture;
    language_models_in_other_forms: crate::language_models::other_forms;
    fused_language_models_of_every_architecture: crate::language_models::fused;
    fused_language_models_with_quantised_weights: crate::language_models::fused_beside_quantised;
    fused_language_models_with_weights_of_4_bits: crate::language_models::fused_blocks;
    histories_that_come_back: crate::moving::come_back;
    histories_that_leave_while_others_run: crate::moving::racing;
}

#[test]
fn nodes_of_fused_language_models() {
    language_models::fused_nodes(pagoda::Provider::Cpu);
}
