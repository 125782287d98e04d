//! The oracle of the embedding operators: scalar, key by key, float64.

use crate::{InputError, Pool};

/// The pooling of `EmbeddingBag`, key by key.
pub fn pool(op: &Pool<'_>) -> Result<Vec<f64>, InputError> {
    let mut output = vec![0.0; op.offsets.len().saturating_sub(1) * op.dim];
    op.check(output.len())?;
    for (slot, out) in output.chunks_exact_mut(op.dim).enumerate() {
        let keys = op.offsets[slot] as usize..op.offsets[slot + 1] as usize;
        let divisor = op.combiner.divisor(keys.len());
        for key in keys {
            let row = op.index.map_or(key, |index| index[key] as usize);
            for (out, number) in out.iter_mut().zip(&op.rows[row * op.dim..(row + 1) * op.dim]) {
                *out += f64::from(*number);
            }
        }
        if divisor > 0.0 {
            out.iter_mut().for_each(|out| *out /= divisor);
        }
    }
    Ok(output)
}
