//! Speculation: tokens that are guessed, and verified by one run of the model over all of them.
//!
//! The token in each place is sampled from the model's logits as without a draft, with the seed of its place. A guess only
//! decides whether the logits of the next place are known already. So answers have the tokens that they have without.

mod lookup;
mod main_pages;
mod model;
mod worth;

use std::sync::atomic::{AtomicBool, Ordering};

use lookup::{Lookup, Matched};
pub(super) use main_pages::MainPages;
pub(super) use model::DraftModel;
pub(super) use worth::Costs;

use crate::error::{Error, Result};

/// The most tokens that a request may have drafted for one step.
const MOST_DRAFTED: u32 = 64;
/// After so many tokens for which a draft did not seem to pay off, one is made to see.
const TRIED_AGAIN: u32 = 32;
/// The weight of the last guess in the rate at which guesses are right.
const WEIGHT: f64 = 0.15;

/// Checks a number of tokens to draft.
pub(super) fn check(name: &str, max_draft: u32) -> Result<()> {
    if max_draft > MOST_DRAFTED {
        return Err(Error::invalid(name, format!("{max_draft} is not between 0 and {MOST_DRAFTED}")));
    }
    Ok(())
}

/// Whether a generator drafts. Changed while it runs.
#[derive(Default)]
pub(super) struct Speculation {
    off: AtomicBool,
    cleared: AtomicBool,
}

impl Speculation {
    pub(super) fn set(&self, on: bool) {
        self.off.store(!on, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    /// Has the next step forget what was learned of drafts.
    pub(super) fn clear(&self) {
        self.cleared.store(true, Ordering::Relaxed);
    }

    /// Whether [`clear`](Self::clear) was called since this was last asked.
    pub(super) fn take_cleared(&self) -> bool {
        self.cleared.swap(false, Ordering::Relaxed)
    }
}

/// Where guesses come from.
enum Source {
    Lookup(Lookup),
    /// A [`DraftModel`]. `skipped`: the tokens since it last drafted while it did not pay off.
    Model {
        skipped: u32,
    },
}

/// The guesses for one sequence.
pub(super) struct Drafts {
    most: usize,
    source: Source,
    /// How often guesses were right, by how they were found.
    rates: [f64; Matched::KINDS],
    /// What may come next. The first one is compared with what comes even if it was not worth a row: that costs nothing, and
    /// tells when drafts pay again.
    guesses: Vec<u32>,
    matched: Matched,
    /// The guesses that have been compared with what came.
    compared: usize,
    /// The first guesses that the next step computes.
    drafted: usize,
    /// The guesses that a draft model is to make.
    wanted: usize,
}

impl Drafts {
    /// At most so many for a step; `by_model`: by a draft model.
    pub(super) fn new(most: usize, by_model: bool) -> Self {
        Self {
            most,
            source: if by_model { Source::Model { skipped: 0 } } else { Source::Lookup(Lookup::default()) },
            rates: Matched::FIRST_RATES,
            guesses: Vec::new(),
            matched: Matched::default(),
            compared: 0,
            drafted: 0,
            wanted: 0,
        }
    }

    /// Guesses what follows these tokens, and decides how many guesses the next step computes, at most `room`.
    pub(super) fn guess(&mut self, tokens: &[u32], room: usize, costs: Option<Costs>) {
        self.guesses.clear();
        (self.compared, self.drafted, self.wanted) = (0, 0, 0);
        let most = self.most.min(room);
        let worth = |rate| costs.map_or(0, |costs| costs.worth(rate, most));
        match &mut self.source {
            Source::Lookup(lookup) => {
                let Some((at, matched)) = lookup.find(tokens) else { return };
                self.matched = matched;
                self.guesses.extend(tokens[at..].iter().take(most.max(1)));
                self.drafted = worth(self.rates[matched as usize]).min(self.guesses.len());
            }
            Source::Model { skipped } => {
                self.matched = Matched::Three;
                self.wanted = worth(self.rates[Matched::Three as usize]);
                if self.wanted == 0 && costs.is_some() {
                    *skipped = skipped.saturating_add(1);
                    // Until there is one: the model may have to compute what it has missed first, which takes steps.
                    self.wanted = if *skipped >= TRIED_AGAIN { most.min(1) } else { 0 };
                }
            }
        }
    }

    /// How many guesses a draft model is to make for the next step.
    pub(super) fn wanted(&self) -> usize {
        self.wanted
    }

    /// The guesses of a draft model.
    pub(super) fn set(&mut self, guesses: &[u32]) {
        self.guesses.clear();
        self.guesses.extend(guesses);
        self.drafted = guesses.len();
        if let (Source::Model { skipped }, false) = (&mut self.source, guesses.is_empty()) {
            *skipped = 0;
        }
    }

    /// The tokens that the next step computes beyond the last one.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.guesses[..self.drafted]
    }

    /// The guesses that were drafted leave: they are verified, or no step computes them.
    pub(super) fn take(&mut self) -> Vec<u32> {
        let drafted = self.tokens().to_vec();
        (self.drafted, self.wanted) = (0, 0);
        drafted
    }

    /// A token came. Learns how good the guesses are.
    pub(super) fn came(&mut self, token: u32) {
        let Some(&guess) = self.guesses.get(self.compared) else { return };
        let rate = &mut self.rates[self.matched as usize];
        *rate += WEIGHT * (f64::from(u8::from(guess == token)) - *rate);
        self.compared += 1;
        if guess != token {
            self.guesses.truncate(self.compared);
        }
    }

    /// Forgets how good the guesses were.
    pub(super) fn forget(&mut self) {
        self.rates = Matched::FIRST_RATES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Option<Costs> = Some(Costs { step: 1.0, row: 0.05, sequences: 1.0 });

    #[test]
    fn what_follows_the_same_tokens_earlier_is_guessed() {
        let mut drafts = Drafts::new(8, false);
        drafts.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 100, CHEAP);
        assert!([4, 5, 9, 1, 2, 3].starts_with(drafts.tokens()));
        assert!(!drafts.tokens().is_empty());
        drafts.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 1, CHEAP);
        assert_eq!(drafts.tokens(), [4], "no more than there is room for");
        drafts.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 0, CHEAP);
        assert!(drafts.tokens().is_empty());
        drafts.guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3, 7], 9, CHEAP);
        assert!(drafts.tokens().is_empty(), "nothing like it came before");
    }

    #[test]
    fn a_draft_model_is_tried_again_until_it_has_drafted() {
        let mut drafts = Drafts::new(8, true);
        while drafts.rates[Matched::Three as usize] > 0.01 {
            drafts.guess(&[1], 100, CHEAP);
            drafts.set(&[5]);
            drafts.came(6);
        }
        let wanted = |drafts: &mut Drafts| {
            drafts.guess(&[1], 100, CHEAP);
            drafts.wanted()
        };
        for round in 0..2 {
            for token in 1..TRIED_AGAIN {
                assert_eq!(wanted(&mut drafts), 0, "round {round}, token {token}");
                drafts.set(&[]);
            }
            // It computes what it has missed, and drafts after that.
            for _ in 0..5 {
                assert_eq!(wanted(&mut drafts), 1);
                drafts.set(&[]);
            }
            assert_eq!(wanted(&mut drafts), 1);
            drafts.set(&[5]);
            drafts.came(6);
        }
    }

    #[test]
    fn drafts_end_while_guesses_are_wrong_and_begin_again_when_they_are_right() {
        let mut drafts = Drafts::new(8, false);
        let mut tokens = vec![1, 2, 3, 4, 1, 2, 3];
        for _ in 0..20 {
            drafts.guess(&tokens, 100, CHEAP);
            drafts.came(77);
        }
        drafts.guess(&tokens, 100, CHEAP);
        assert!(drafts.tokens().is_empty());
        // Each is compared, though none is computed.
        for _ in 0..12 {
            drafts.guess(&tokens, 100, CHEAP);
            let next = tokens[tokens.len() - 4];
            drafts.came(next);
            tokens.push(next);
        }
        drafts.guess(&tokens, 100, CHEAP);
        assert!(drafts.tokens().len() > 2);
    }
}
