//! How long a draft is worth its rows.

/// What a step costs.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Costs {
    /// Seconds of a step without drafts.
    pub(in super::super) step: f64,
    /// Seconds that each drafted row adds.
    pub(in super::super) row: f64,
    /// The tokens that such a step gives: one for each sequence.
    pub(in super::super) sequences: f64,
}

impl Costs {
    /// How many tokens to draft, at most `most`, if a guess behind right ones is right at this rate: as long as a row gives
    /// more tokens a second than the step without it.
    pub(super) fn worth(self, rate: f64, most: usize) -> usize {
        let (mut tokens, mut time, mut right) = (self.sequences, self.step, 1.0);
        for drafted in 0..most {
            right *= rate;
            if right * time <= self.row * tokens {
                return drafted;
            }
            tokens += right;
            time += self.row;
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens a second with so many drafted.
    fn speed(costs: Costs, rate: f64, drafted: usize) -> f64 {
        let tokens: f64 = (1..=drafted as i32).map(|power| rate.powi(power)).sum();
        (costs.sequences + tokens) / (costs.step + costs.row * drafted as f64)
    }

    #[test]
    fn the_length_is_the_fastest_one() {
        for row in [0.01, 0.1, 0.4, 1.0] {
            for rate in [0.0, 0.2, 0.5, 0.8, 0.95, 1.0] {
                for sequences in [1.0, 4.0] {
                    let costs = Costs { step: 1.0, row, sequences };
                    let worth = costs.worth(rate, 20);
                    let best = (0..=20).map(|drafted| speed(costs, rate, drafted)).fold(0.0, f64::max);
                    assert!(speed(costs, rate, worth) > best * 0.999, "{costs:?} {rate}: {worth}");
                }
            }
        }
    }
}
