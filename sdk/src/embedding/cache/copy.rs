//! Copying a row out of the cache while someone may be writing it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Copies a row of f32.
///
/// # Panics
/// If it has not as many numbers.
#[inline]
pub(super) fn copy_numbers(words: &[AtomicU64], numbers: &mut [f32]) {
    assert_eq!(words.len(), numbers.len().div_ceil(2));
    let done = copy_lines(words, numbers);
    copy_words(&words[done / 2..], &mut numbers[done..]);
}

/// Copies an even number of numbers, as many as it can, and tells how many.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn copy_lines(words: &[AtomicU64], numbers: &mut [f32]) -> usize {
    // The compiler does not make one load of several atomic ones, and with a load a word a lookup takes a tenth longer or more.
    if !std::arch::is_x86_feature_detected!("avx") {
        return 0;
    }
    for (words, numbers) in words.as_chunks::<8>().0.iter().zip(numbers.as_chunks_mut::<16>().0) {
        // SAFETY: it reads 64 bytes of `words` and writes 64 of `numbers`. For the compiler it is eight relaxed atomic loads,
        // which may see any value that a thread has written there, and the processor's vector loads do no more than that:
        // a line is as good as torn between any of its parts, which those who call find out afterwards. The processor has
        // these instructions, and it orders loads as an acquiring fence asks for. The numbers are little-endian, as in a
        // row. The upper halves of registers are left empty, as the code around expects.
        unsafe {
            std::arch::asm!(
                "vmovups ymm0, [{from}]",
                "vmovups ymm1, [{from} + 32]",
                "vmovups [{to}], ymm0",
                "vmovups [{to} + 32], ymm1",
                "vzeroupper",
                from = in(reg) words.as_ptr(),
                to = in(reg) numbers.as_mut_ptr(),
                out("ymm0") _,
                out("ymm1") _,
                options(nostack, preserves_flags),
            );
        }
    }
    numbers.len() / 16 * 16
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn copy_lines(_: &[AtomicU64], _: &mut [f32]) -> usize {
    0
}

fn copy_words(words: &[AtomicU64], numbers: &mut [f32]) {
    let numbers_of = |word: &AtomicU64| {
        let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        [[bytes[0], bytes[1], bytes[2], bytes[3]], [bytes[4], bytes[5], bytes[6], bytes[7]]].map(f32::from_le_bytes)
    };
    let (pairs, rest) = numbers.as_chunks_mut();
    for (pair, word) in pairs.iter_mut().zip(words) {
        *pair = numbers_of(word);
    }
    if let ([number], Some(word)) = (rest, words.last()) {
        *number = numbers_of(word)[0];
    }
}

/// Copies a row of any type.
pub(super) fn copy_bytes(words: &[AtomicU64], row: &mut [u8]) {
    let (chunks, rest) = row.as_chunks_mut();
    for (chunk, word) in chunks.iter_mut().zip(words) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    if let (false, Some(word)) = (rest.is_empty(), words.last()) {
        rest.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_and_words_copy_the_same() {
        for count in 0..100_usize {
            let words: Vec<AtomicU64> = (0..count as u64)
                .map(|word| u64::from((word as f32).to_bits()) | u64::from((word as f32 + 0.5).to_bits()) << 32)
                .map(|word| AtomicU64::new(u64::from_ne_bytes(word.to_le_bytes())))
                .collect();
            for numbers in [2 * count, (2 * count).saturating_sub(1)] {
                let expected: Vec<f32> = (0..numbers).map(|number| number as f32 / 2.0).collect();
                let (mut copied, mut by_words) = (vec![f32::NAN; numbers], vec![f32::NAN; numbers]);
                copy_numbers(&words, &mut copied);
                copy_words(&words, &mut by_words);
                assert_eq!((&copied, &by_words), (&expected, &expected));
            }
        }
    }
}
