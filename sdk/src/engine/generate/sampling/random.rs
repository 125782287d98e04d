//! The random numbers of the draws: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
//! which computes the numbers of (seed, position) from nothing but these two. There is no state that a neighbour in
//! the batch, a preemption or a fork could advance. It is the generator of cuRAND, so a sampler on the GPU can draw the
//! same numbers.

/// A number above 0 and below 1, for the draw of the token at a position.
pub(super) fn uniform(seed: u64, position: u64) -> f64 {
    // The third and the fourth word of the counter are 0 for this draw; other values are free for other draws at the
    // same position.
    let [low, high, ..] = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 12;
    // The half keeps it off 0: a draw of 0 could take a token with a probability of 0.
    (bits as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const ROUNDS: usize = 10;
    for _ in 0..ROUNDS {
        let even = u64::from(counter[0]) * 0xD251_1F53;
        let odd = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors of Philox publish.
    #[test]
    fn philox_gives_the_published_numbers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            philox([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn every_bit_of_seed_and_position_counts() {
        let base = uniform(5, 7);
        for bit in 0..64 {
            assert_ne!(uniform(5 ^ 1 << bit, 7), base, "bit {bit} of the seed");
            assert_ne!(uniform(5, 7 ^ 1 << bit), base, "bit {bit} of the position");
        }
    }

    #[test]
    fn the_numbers_are_uniform() {
        const DRAWS: u64 = 100_000;
        let mut bins = [0u32; 64];
        for position in 0..DRAWS {
            let number = uniform(11, position);
            assert!(number > 0.0 && number < 1.0);
            bins[(number * 64.0) as usize] += 1;
        }
        let expected = DRAWS as f64 / 64.0;
        let chi_square: f64 = bins.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        // 63 degrees of freedom: above 130 with a probability of 1e-6.
        assert!(chi_square < 130.0, "{chi_square}");
    }
}
