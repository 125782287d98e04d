//! Launches of the operators of HSTU models.

pub mod append;
pub mod attention;
mod attention_sm90;
pub mod call;
pub mod dense_call;
pub mod embed;
pub mod gemm;
mod gemm_sm90;
pub mod linear;
pub mod norm;
pub mod quantised_pool;
pub mod raw;
pub mod unit;

/// The layouts that CUDA was compiled against are those that Rust has here.
mod layouts {
    use super::raw::*;

    include!(concat!(env!("OUT_DIR"), "/layouts_hstu.rs"));
}
