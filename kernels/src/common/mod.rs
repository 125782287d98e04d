//! What the families of operators share.

pub mod element;
pub(crate) mod input_error;
pub(crate) mod pages;
pub mod parallel;
