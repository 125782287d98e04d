//! What the families of operators share.

pub mod element;
pub(crate) mod input_error;
pub mod kv_format;
pub(crate) mod kv_view;
pub(crate) mod pages;
pub mod parallel;
