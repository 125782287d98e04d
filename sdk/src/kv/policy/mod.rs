//! Policies for a fixed number of slots: which tokens of a sequence stay when more come than its cache holds.
//!
//! A layer of a sequence has L slots, shared by its heads; which token is in a slot may differ by head. For each call
//! [`LayerSlots::plan`] chooses the slots that the new tokens overwrite, by a [`CachePolicy`]. The model runs with
//! `write_slots` of the plan and [`LayerSlots::token_pos_after`] as inputs of `PagedAttention`, and [`LayerSlots::commit`] takes
//! over the plan and the weights that the slots got. A plan that is dropped has changed nothing.
//!
//! Where the model runs on a GPU, [`DeviceSlots`] has the same in its memory: plans are made there, and scores never leave it.
//!
//! A new policy is one file that implements [`CachePolicy`] and a test.

mod cache_policy;
#[cfg(feature = "llm")]
mod device_slots;
mod h2o;
mod lastrec;
mod layer_slots;
mod plan;
mod qh2o;
mod ranking;
mod saved;

pub use cache_policy::{CachePolicy, DeviceRule, Needs};
#[cfg(feature = "llm")]
pub use device_slots::{DeviceSlots, SlotState, SlotTensors, SlotsShape};
pub use h2o::HeavyHitters;
pub use lastrec::LastRecent;
pub use layer_slots::LayerSlots;
pub use plan::{SlotPlan, SlotValues};
pub use qh2o::QuantisedHeavyHitters;
pub use ranking::Ranking;

use crate::error::{Error, Result};

/// What a caller chooses of a policy.
#[derive(Clone, Debug)]
pub struct PolicyOptions {
    /// `lastrec` and `smart-lastrec`: the tokens at the beginning that never leave. `None`: for lastrec a few (StreamingLLM's
    /// sinks), for smart-lastrec half of the slots.
    pub protect: Option<usize>,
    /// h2o and its kin: slots for the newest tokens, which do not leave however little weight they got.
    pub grace_period: usize,
    /// h2o and its kin: the part of the slots that the first eviction leaves alone at the beginning.
    pub keep_initial_fraction: f32,
    /// h2o and its kin: scores count by the time that a token has been there.
    pub normalise: bool,
    /// qh2o: how much the score counts against the error of quantisation, between 0 and 1.
    pub score_share: f32,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self { protect: None, grace_period: 0, keep_initial_fraction: 0.05, normalise: false, score_share: 0.5 }
    }
}

/// The policy of a name: `lastrec`, `smart-lastrec`, `h2o`, `h2o-vlen`, `qh2o`, `qh2o-vlen` or `h2o-orig`.
///
/// # Errors
/// INVALID_ARGUMENT for another name, and for options that are out of range.
pub fn named(name: &str, options: &PolicyOptions) -> Result<Box<dyn CachePolicy>> {
    let fraction = options.keep_initial_fraction;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(Error::invalid("keep_initial_fraction", format!("{fraction} is not between 0 and 1")));
    }
    let share = options.score_share;
    if !(0.0..=1.0).contains(&share) {
        return Err(Error::invalid("score_share", format!("{share} is not between 0 and 1")));
    }
    let hitters = |by_length| HeavyHitters {
        by_length,
        grace: options.grace_period,
        keep_initial_fraction: fraction,
        normalise: options.normalise,
    };
    Ok(match name {
        "lastrec" => Box::new(LastRecent::sink(options.protect)),
        "smart-lastrec" => Box::new(LastRecent::prefix(options.protect)),
        "h2o" => Box::new(hitters(false)),
        "h2o-vlen" => Box::new(hitters(true)),
        "qh2o" => Box::new(QuantisedHeavyHitters { scores: hitters(false), score_share: share }),
        "qh2o-vlen" => Box::new(QuantisedHeavyHitters { scores: hitters(true), score_share: share }),
        // As published: no grace and no normalisation. Its caller gives the sum of the batch's weights to each sequence.
        "h2o-orig" => {
            Box::new(HeavyHitters { by_length: false, grace: 0, keep_initial_fraction: 0.0, normalise: false })
        }
        _ => {
            let known = "lastrec, smart-lastrec, h2o, h2o-vlen, qh2o, qh2o-vlen and h2o-orig";
            return Err(Error::invalid("policy", format!("\"{name}\" is none of {known}")));
        }
    })
}
