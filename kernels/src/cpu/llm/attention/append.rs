//! The append of new keys and values to their pages.

use super::rotation::rotate;
use crate::Element;
use crate::llm::paged_attention::{KvPool, PagedAttention};

/// Writes the new keys, rotated, and values into their pages.
pub(super) fn append<T: Element>(op: &PagedAttention<'_, T>, pool: &mut KvPool<'_, T>) {
    let size = op.head_size;
    let mut numbers = vec![0.0; size];
    for sequence in 0..op.sequences() {
        for (row, head) in op.rows(sequence).flat_map(|row| (0..op.kv_heads).map(move |head| (row, head))) {
            let at = (row * op.kv_heads + head) * size;
            let slot = op.write_slot(sequence, row, head);
            for (which, from) in [op.key, op.value].into_iter().enumerate() {
                let block = op.block(sequence, slot, which, head);
                let from = &from[at..at + size];
                let rotates = which == 0 && op.rotation.is_some();
                if let KvPool::Native(pool) = pool
                    && !rotates
                {
                    pool[block * size..][..size].copy_from_slice(from);
                    continue;
                }
                for (to, from) in numbers.iter_mut().zip(from) {
                    *to = from.to_f32();
                }
                if rotates {
                    rotate(op, row, &mut numbers);
                }
                match pool {
                    KvPool::Native(pool) => {
                        for (to, from) in pool[block * size..].iter_mut().zip(&numbers) {
                            *to = T::from_f32(*from);
                        }
                    }
                    KvPool::Quantised { codes, scales } => {
                        let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
                        let codes = &mut codes[block * width..][..width];
                        op.format.quantise(&numbers, codes, &mut scales[block * scale..][..scale]);
                    }
                }
            }
        }
    }
}
