//! One tensor of pages.

use std::sync::Arc;

use crate::tensor::Tensor;

/// One tensor of a layer: its numbers or codes, or the scales of these.
pub(super) struct PlanePool {
    pub(super) tensor: Arc<Tensor>,
    /// Bytes of the keys, or of the values, of one token.
    pub(super) row_bytes: usize,
}
