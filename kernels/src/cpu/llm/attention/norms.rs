//! The lengths of what a call has appended, and of what its format took from it.

use super::rotation::rotate;
use crate::common::input_error::expect;
use crate::llm::paged_attention::{KV_NORMS, KvPool, PagedAttention};
use crate::{Element, InputError};

impl<T: Element> PagedAttention<'_, T> {
    /// After a call has run: for each row and kv head the length (2-norm) of its value, of what is lost of its key, rotated, in the
    /// pool, and of what is lost of its value. `to`: `[T, Hkv, 3]`.
    ///
    /// # Errors
    /// Where `to` has another length.
    pub fn kv_norms(&self, pool: &KvPool<'_, T>, to: &mut [f32]) -> Result<(), InputError> {
        expect("kv_norms", to.len(), &[self.total_rows, self.kv_heads, KV_NORMS])?;
        let size = self.head_size;
        let mut numbers = vec![0.0; size];
        for sequence in 0..self.sequences() {
            for (row, head) in self.rows(sequence).flat_map(|row| (0..self.kv_heads).map(move |head| (row, head))) {
                let at = row * self.kv_heads + head;
                let slot = self.write_slot(sequence, row, head);
                let to = &mut to[at * KV_NORMS..][..KV_NORMS];
                for (which, from) in [self.key, self.value].into_iter().enumerate() {
                    numbers.iter_mut().zip(&from[at * size..]).for_each(|(to, from)| *to = from.to_f32());
                    if which == 0 && self.rotation.is_some() {
                        rotate(self, row, &mut numbers);
                    }
                    if which == 1 {
                        to[0] = length(numbers.iter().copied());
                    }
                    let block = self.block(sequence, slot, which, head);
                    let lost = |(index, number): (usize, &f32)| number - self.stored_number(pool, block, index);
                    to[1 + which] = length(numbers.iter().enumerate().map(lost));
                }
            }
        }
        Ok(())
    }

    /// A number of a block of the pool.
    fn stored_number(&self, pool: &KvPool<'_, T>, block: usize, index: usize) -> f32 {
        match pool {
            KvPool::Native(pool) => pool[block * self.head_size + index].to_f32(),
            KvPool::Quantised { codes, scales } => {
                let (width, scale) = (self.format.pool_width(self.head_size), self.format.scales_width());
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                self.format.dequantise(codes, scales, index)
            }
        }
    }
}

fn length(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.map(|number| number * number).sum::<f32>().sqrt()
}
