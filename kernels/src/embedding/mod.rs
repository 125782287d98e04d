//! The operators of embedding tables: what one call carries, and every check of it.

pub mod pool;
