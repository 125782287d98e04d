//! Launches of the operators of embedding tables.

pub mod bag;
mod raw;
pub mod table;

/// The layouts that CUDA was compiled against are those that Rust has here.
mod layouts {
    use super::raw::*;

    include!(concat!(env!("OUT_DIR"), "/layouts_embedding.rs"));
}
