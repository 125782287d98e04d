//! The operators of HSTU models on the CPU.

mod append;
mod attention;
mod dense;
mod embed;
mod gemm;
mod linear;
pub mod reference;
mod tile;
mod unit;

pub use append::HstuAppendElement;
pub use attention::HstuAttentionElement;
pub use dense::HstuDenseElement;
