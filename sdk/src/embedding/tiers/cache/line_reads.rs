//! Reads a row, or the keys of a set, with vector loads, while another thread may be writing it.
//!
//! The compiler does not merge atomic loads. With loads of half a cache line a lookup takes a tenth longer than with
//! loads of a whole line, and with loads of one word another tenth longer.

use std::sync::atomic::{AtomicU64, Ordering};

use super::set::Set;

/// A way to read cache lines. A value of such a type exists only if the processor has the instructions.
pub(super) trait LineReader: Copy {
    /// Copies an even number of numbers, as many as it can, and returns how many.
    fn copy(self, words: &[AtomicU64], numbers: &mut [f32]) -> usize;

    /// The ways of a set that have a key, as a bit mask.
    fn ways_with(self, set: &Set, key: i64) -> u32;

    /// The way of a set that holds the row of a key.
    #[inline]
    fn find(self, set: &Set, key: i64) -> Option<usize> {
        let mut found = self.ways_with(set, key);
        // A way whose row was removed still has the key.
        while found != 0 {
            let way = found.trailing_zeros() as usize;
            if set.holds(way) {
                return Some(way);
            }
            found &= found - 1;
        }
        None
    }
}

/// The fastest reader of this processor.
#[derive(Clone, Copy)]
pub(super) enum Best {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx512(Avx512),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx2(Avx2),
    Scalar(Scalar),
}

impl Best {
    #[inline]
    pub(super) fn here() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(whole) = Avx512::here() {
            return Self::Avx512(whole);
        } else if let Some(halves) = Avx2::here() {
            return Self::Avx2(halves);
        }
        Self::Scalar(Scalar)
    }
}

/// Loads of one word, on any processor.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

impl LineReader for Scalar {
    fn copy(self, _: &[AtomicU64], _: &mut [f32]) -> usize {
        0
    }

    #[inline]
    fn ways_with(self, set: &Set, key: i64) -> u32 {
        set.ways_with(key)
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use self::x86_64::{Avx2, Avx512};

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64 {
    use std::arch::{asm, is_x86_feature_detected};
    use std::sync::atomic::AtomicU64;

    use super::{LineReader, Set};

    /// Loads of a whole line, by AVX-512.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(());

    impl Avx512 {
        #[inline]
        pub(super) fn here() -> Option<Self> {
            is_x86_feature_detected!("avx512f").then_some(Self(()))
        }
    }

    impl LineReader for Avx512 {
        #[inline]
        fn copy(self, words: &[AtomicU64], numbers: &mut [f32]) -> usize {
            let done = numbers.len() / 16 * 16;
            let ((fours, words), (to_fours, to)) =
                (words[..done / 2].as_chunks::<32>(), numbers[..done].as_chunks_mut::<64>());
            for (words, numbers) in fours.iter().zip(to_fours) {
                // SAFETY: it reads 256 bytes of `words` and writes 256 bytes of `numbers`. For the compiler these are
                // 32 relaxed atomic loads, which may see any value that a thread has written there. Vector loads see no
                // more than that: a line may be torn between any of its words, which the callers detect afterwards. The
                // processor has the instructions, and it orders loads as an acquire fence requires. The numbers are
                // little-endian, as in a row. The registers zmm16 and above need no vzeroupper.
                unsafe {
                    asm!(
                        "vmovups zmm16, [{from}]",
                        "vmovups zmm17, [{from} + 64]",
                        "vmovups zmm18, [{from} + 128]",
                        "vmovups zmm19, [{from} + 192]",
                        "vmovups [{to}], zmm16",
                        "vmovups [{to} + 64], zmm17",
                        "vmovups [{to} + 128], zmm18",
                        "vmovups [{to} + 192], zmm19",
                        from = in(reg) words.as_ptr(),
                        to = in(reg) numbers.as_mut_ptr(),
                        out("zmm16") _,
                        out("zmm17") _,
                        out("zmm18") _,
                        out("zmm19") _,
                        options(nostack, preserves_flags),
                    );
                }
            }
            for (words, numbers) in words.as_chunks::<8>().0.iter().zip(to.as_chunks_mut::<16>().0) {
                // SAFETY: as above, 64 bytes.
                unsafe {
                    asm!(
                        "vmovups zmm16, [{from}]",
                        "vmovups [{to}], zmm16",
                        from = in(reg) words.as_ptr(),
                        to = in(reg) numbers.as_mut_ptr(),
                        out("zmm16") _,
                        options(nostack, preserves_flags),
                    );
                }
            }
            done
        }

        #[inline]
        fn ways_with(self, set: &Set, key: i64) -> u32 {
            let words: u32;
            // SAFETY: it reads the 64 bytes of the set. For the compiler these are relaxed atomic loads: vector loads
            // do not tear a word within a line. As above.
            unsafe {
                asm!(
                    "vpbroadcastq zmm16, {key}",
                    "vpcmpeqq k1, zmm16, [{set}]",
                    "kmovw {words:e}, k1",
                    key = in(reg) key,
                    set = in(reg) set,
                    words = lateout(reg) words,
                    out("zmm16") _,
                    out("k1") _,
                    options(nostack, preserves_flags, readonly),
                );
            }
            Set::ways_of_words(words)
        }
    }

    /// Ends with vzeroupper, as the code around expects: so it changes all registers.
    macro_rules! asm_of_halves {
        ($($instruction:literal,)* $($name:ident = $kind:ident($class:ident) $value:expr,)*) => {
            asm!(
                $($instruction,)*
                "vzeroupper",
                $($name = $kind($class) $value,)*
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                options(nostack, preserves_flags),
            )
        };
    }

    /// Loads of half a line, by AVX2.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(());

    impl Avx2 {
        #[inline]
        pub(super) fn here() -> Option<Self> {
            is_x86_feature_detected!("avx2").then_some(Self(()))
        }
    }

    impl LineReader for Avx2 {
        #[inline]
        fn copy(self, words: &[AtomicU64], numbers: &mut [f32]) -> usize {
            for (words, numbers) in words.as_chunks::<8>().0.iter().zip(numbers.as_chunks_mut::<16>().0) {
                // SAFETY: as for a whole line.
                unsafe {
                    asm_of_halves!(
                        "vmovups ymm0, [{from}]",
                        "vmovups ymm1, [{from} + 32]",
                        "vmovups [{to}], ymm0",
                        "vmovups [{to} + 32], ymm1",
                        from = in(reg) words.as_ptr(),
                        to = in(reg) numbers.as_mut_ptr(),
                    );
                }
            }
            numbers.len() / 16 * 16
        }

        #[inline]
        fn ways_with(self, set: &Set, key: i64) -> u32 {
            let (low, high): (u32, u32);
            // SAFETY: as for a whole line.
            unsafe {
                asm_of_halves!(
                    "vmovq xmm0, {key}",
                    "vpbroadcastq ymm0, xmm0",
                    "vpcmpeqq ymm1, ymm0, [{set}]",
                    "vpcmpeqq ymm0, ymm0, [{set} + 32]",
                    "vmovmskpd {low:e}, ymm1",
                    "vmovmskpd {high:e}, ymm0",
                    key = in(reg) key,
                    set = in(reg) set,
                    low = lateout(reg) low,
                    high = lateout(reg) high,
                );
            }
            Set::ways_of_words(low | high << 4)
        }
    }
}

/// Copies a row of f32 numbers.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub(super) fn copy_numbers(reader: impl LineReader, words: &[AtomicU64], numbers: &mut [f32]) {
    assert_eq!(words.len(), numbers.len().div_ceil(2));
    let done = reader.copy(words, numbers);
    if done < numbers.len() {
        copy_words(&words[done / 2..], &mut numbers[done..]);
    }
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

    /// Calls `each` with every reader that this processor has.
    macro_rules! with_all {
        ($each:expr) => {
            $each(&|words, numbers| copy_numbers(Scalar, words, numbers), &|set, key| Scalar.ways_with(set, key));
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                if let Some(whole) = Avx512::here() {
                    $each(&|words, numbers| copy_numbers(whole, words, numbers), &|set, key| whole.ways_with(set, key));
                }
                if let Some(halves) = Avx2::here() {
                    $each(&|words, numbers| copy_numbers(halves, words, numbers), &|set, key| {
                        halves.ways_with(set, key)
                    });
                }
            }
        };
    }

    type Copies<'a> = &'a dyn Fn(&[AtomicU64], &mut [f32]);
    type Finds<'a> = &'a dyn Fn(&Set, i64) -> u32;

    #[test]
    fn lines_and_words_are_copied_the_same() {
        for count in 0..100_usize {
            let words: Vec<AtomicU64> = (0..count as u64)
                .map(|word| u64::from((word as f32).to_bits()) | u64::from((word as f32 + 0.5).to_bits()) << 32)
                .map(|word| AtomicU64::new(u64::from_ne_bytes(word.to_le_bytes())))
                .collect();
            for numbers in [2 * count, (2 * count).saturating_sub(1)] {
                let expected: Vec<f32> = (0..numbers).map(|number| number as f32 / 2.0).collect();
                with_all!(|copy: Copies<'_>, _: Finds<'_>| {
                    let mut copied = vec![f32::NAN; numbers];
                    copy(&words, &mut copied);
                    assert_eq!(copied, expected);
                });
            }
        }
    }

    #[test]
    fn all_keys_at_once_and_one_by_one_are_the_same() {
        // The first word is no key: the state and the freshness have the bits of one.
        let set = Set::with_keys(5, [5, 1, -1, 5, i64::MIN, 1 << 32, 5]);
        for (key, ways) in [(5, 0b100_1001), (1, 0b10), (-1, 0b100), (i64::MIN, 0b1_0000), (1 << 32, 0b10_0000), (0, 0)]
        {
            with_all!(|_: Copies<'_>, find: Finds<'_>| assert_eq!(find(&set, key), ways, "{key}"));
        }
    }
}
