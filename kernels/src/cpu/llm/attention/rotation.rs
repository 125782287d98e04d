//! The rotation (RoPE) of queries and keys by their positions.

use crate::llm::paged_attention::{PagedAttention, Pairs, Rotation};

/// Rotates a head of a row by the row's position.
#[inline(always)]
pub(super) fn rotate<T>(op: &PagedAttention<'_, T>, row: usize, numbers: &mut [f32]) {
    let (Some(Rotation { cos, sin, half_width, pairs }), Some(positions)) = (op.rotation, op.positions) else { return };
    let first = positions[row] as usize * half_width;
    for index in 0..half_width {
        let (a, b) = match pairs {
            Pairs::Half => (index, index + half_width),
            Pairs::Interleaved => (2 * index, 2 * index + 1),
        };
        let (cos, sin) = (cos[first + index], sin[first + index]);
        (numbers[a], numbers[b]) = (numbers[a] * cos - numbers[b] * sin, numbers[b] * cos + numbers[a] * sin);
    }
}
