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
pub mod unit;
