//! Rows of a table in GPU memory, above everything in host memory.

pub(in crate::embedding) mod device_cache;
pub(in crate::embedding) mod miss_drain;
mod scratch_pool;
