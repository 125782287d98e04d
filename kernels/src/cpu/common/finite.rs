//! Which numbers are finite, a block at a time.

/// The numbers of a block.
const BLOCK: usize = 1024;

/// How many numbers at the start of the little-endian bytes of an `f32` tensor are in blocks of finite numbers alone.
#[must_use]
pub fn leading_finite_f32(bytes: &[u8]) -> usize {
    // An exponent of ones carries into the sign's place.
    leading(bytes, |number| ((u32::from_le_bytes(number) & 0x7F80_0000) + 0x0080_0000) >> 31)
}

/// As [`leading_finite_f32`], for `f16`.
#[must_use]
pub fn leading_finite_f16(bytes: &[u8]) -> usize {
    leading(bytes, |number| u32::from(((u16::from_le_bytes(number) & 0x7C00) + 0x0400) >> 15))
}

/// As [`leading_finite_f32`], for `bf16`.
#[must_use]
pub fn leading_finite_bf16(bytes: &[u8]) -> usize {
    leading(bytes, |number| u32::from(((u16::from_le_bytes(number) & 0x7F80) + 0x0080) >> 15))
}

/// `carry` is not 0 for numbers that are not finite. Without a branch for each of them the compiler takes many at once.
fn leading<const N: usize>(bytes: &[u8], carry: impl Fn([u8; N]) -> u32) -> usize {
    let finite = |block: &&[[u8; N]]| block.iter().fold(0, |all, &number| all | carry(number)) == 0;
    bytes.as_chunks::<N>().0.chunks_exact(BLOCK).take_while(finite).count() * BLOCK
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Counts blocks before the first number of `wrong`, wherever that is.
    fn check<const N: usize>(leading: fn(&[u8]) -> usize, finite: [[u8; N]; 3], wrong: [[u8; N]; 3]) {
        let numbers: Vec<[u8; N]> = finite.into_iter().cycle().take(3 * BLOCK + 5).collect();
        assert_eq!(leading(numbers.as_flattened()), 3 * BLOCK);
        for (wrong, at) in wrong.into_iter().flat_map(|wrong| [0, 1, 1023, 1024, 2500, 3073].map(|at| (wrong, at))) {
            let mut numbers = numbers.clone();
            numbers[at] = wrong;
            assert_eq!(leading(numbers.as_flattened()), at / BLOCK * BLOCK, "{wrong:?} at {at}");
        }
    }

    #[test]
    fn blocks_end_before_what_is_not_finite() {
        let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        check(leading_finite_f32, [f32::MAX, f32::MIN, -0.0].map(f32::to_le_bytes), wrong.map(f32::to_le_bytes));
        let of = |number| f16::from_f32(number).to_le_bytes();
        check(leading_finite_f16, [f16::MAX, f16::MIN, f16::ZERO].map(f16::to_le_bytes), wrong.map(of));
        let of = |number| bf16::from_f32(number).to_le_bytes();
        check(leading_finite_bf16, [bf16::MAX, bf16::MIN, bf16::ZERO].map(bf16::to_le_bytes), wrong.map(of));
    }

    #[test]
    fn bytes_that_are_no_whole_block_are_left() {
        assert_eq!((leading_finite_f32(&[]), leading_finite_f16(&[0; 2 * BLOCK - 1])), (0, 0));
    }
}
