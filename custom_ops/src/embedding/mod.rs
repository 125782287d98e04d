//! The operators over embedding tables.

mod bag;

use crate::ort::{OperatorEntry, Versions, operator};
use bag::EmbeddingBag;

/// The operators of this family.
pub const OPERATORS: &[OperatorEntry] = &[operator!(c"EmbeddingBag", EmbeddingBag, Versions::since(1), [Cpu, Cuda])];
