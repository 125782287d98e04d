//! What every launch needs: the device with its modules, errors, element types, and the description of tensors to the TMA.

pub mod blas;
pub mod capture;
pub mod counters;
pub mod element_type;
pub mod error;
pub mod gpu;
pub mod kv_pack;
pub mod mirrored;
pub mod module;
pub mod raw;
pub mod sizes;
pub mod tensor_map;

/// The layouts that CUDA was compiled against are those that Rust has here.
mod layouts {
    use super::raw::*;

    include!(concat!(env!("OUT_DIR"), "/layouts_common.rs"));
}
