//! The operators of HSTU models: what one call carries, and every check of it.

pub mod batch;
pub mod dense;
pub mod embed;
pub mod linear;
mod mask;
pub mod unit;

pub(crate) use mask::Mask;
