//! Inputs that several HSTU operators share: the rows of a batch, the pages that cache earlier rows, and the append of rows to
//! pages.
//!
//! Shapes are checked here for every provider. The values of index tensors are checked by the CPU kernels and clamped by the
//! CUDA kernels.

mod append;
mod cache;
mod rows;

pub use append::AppendInputs;
pub use cache::CacheInputs;
pub use rows::RowInputs;
