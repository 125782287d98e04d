//! Launches of the operators of embedding tables.

pub mod bag;
pub mod held;
pub mod missing;
pub mod table;
