//! The steps from the temperature on: which tokens can be drawn, and how likely each is.

use super::options::SamplingOptions;
use super::select::{Candidate, argmax, at_least, largest, maximum};
use super::weights::{Softmax, total};

/// Buffers for [`Sampler::sample`](super::Sampler::sample) and [`logprobs`](super::logprobs()), to be used again. Any
/// sampler can use any scratch; a thread needs one.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// The logits after the penalties and bans.
    pub(super) adjusted: Vec<f32>,
    pub(super) ranked: Vec<f32>,
    keys: Vec<u64>,
    pub(super) candidates: Vec<Candidate>,
    pub(super) weights: Vec<f64>,
}

/// What can be drawn.
pub(super) enum Choice {
    /// One token.
    Token(u32),
    /// Token i, with the weight `scratch.weights[i]`.
    All,
    /// `scratch.candidates[i]`, in order of their ids, with the weight `scratch.weights[i]`.
    Candidates,
}

/// `None` if all logits are −∞ or NaN.
pub(super) fn choose(logits: &[f32], options: &SamplingOptions, scratch: &mut Scratch) -> Option<Choice> {
    if options.is_greedy() {
        return argmax(logits).map(Choice::Token);
    }
    let Scratch { ranked, keys, candidates, weights, .. } = scratch;
    // The temperature does not change the order of the logits, so the largest can be found without it.
    let top_k = options.top_k as usize;
    let has_top_k = top_k > 0 && top_k < logits.len();
    let max = if has_top_k {
        largest(logits, top_k, ranked, candidates);
        candidates.iter().fold(f32::NEG_INFINITY, |max, candidate| max.max(candidate.logit))
    } else {
        maximum(logits)
    };
    if max == f32::NEG_INFINITY {
        return None;
    }
    let softmax = Softmax::new(max, options.temperature);
    if has_top_k && options.top_p < 1.0 {
        weigh(softmax, candidates, weights);
        let total = total(weights);
        keep_nucleus(softmax, total, options.top_p, keys, candidates);
    } else if options.top_p < 1.0 {
        softmax.weights(logits, weights);
        let total = total(weights);
        // Mostly a few tokens have nearly all of the probability. More are looked at only where they have not.
        let mut count = 256;
        loop {
            largest(logits, count, ranked, candidates);
            if keep_nucleus(softmax, total, options.top_p, keys, candidates) || count >= logits.len() {
                break;
            }
            count *= 16;
        }
    } else if !has_top_k && options.min_p > 0.0 {
        // A bound for logits that saves the weights of the others. It is a little low, because min_p decides.
        let distance = f64::from(options.min_p).ln() * f64::from(options.temperature);
        let bound = f64::from(max) + distance * 1.000_001 - f64::from(max).abs() * 1e-6;
        at_least(logits, bound as f32, candidates);
    } else if !has_top_k {
        softmax.weights(logits, weights);
        return Some(Choice::All);
    }
    if options.min_p > 0.0 {
        // A weight is the probability over the largest one. In f32, as for top_p.
        candidates.retain(|candidate| softmax.weight(candidate.logit) as f32 >= options.min_p);
    }
    weigh(softmax, candidates, weights);
    Some(Choice::Candidates)
}

fn weigh(softmax: Softmax, candidates: &[Candidate], weights: &mut Vec<f64>) {
    weights.clear();
    weights.extend(candidates.iter().map(|candidate| softmax.weight(candidate.logit)));
}

/// Keeps the candidates that top_p keeps: those whose probability before them is at most top_p. `total` is the sum of the
/// weights, also of tokens that are less likely than all candidates. Returns whether a candidate left; if none did, top_p
/// can keep tokens that are not among the candidates.
fn keep_nucleus(
    softmax: Softmax,
    total: f64,
    top_p: f32,
    keys: &mut Vec<u64>,
    candidates: &mut Vec<Candidate>,
) -> bool {
    // In f32, as the option is: 0.9 is to mean 0.9, and not the f32 below it.
    let is_kept = |before: f64| (before / total) as f32 <= top_p;
    let weight = |key: u64| softmax.weight(Candidate::of_key(key).logit);
    keys.clear();
    keys.extend(candidates.iter().map(|candidate| candidate.key()));
    // A binary search for the first that leaves. It puts into order only what it has to: after each step the more likely
    // half of what is left is before the other half. Those before `start` stay, those from `end` on leave.
    let (mut start, mut end) = (0, keys.len());
    let mut before = 0.0;
    const FEW: usize = 32;
    while end - start > FEW {
        let middle = (end - start) / 2;
        let (likely, ..) = keys[start..end].select_nth_unstable(middle);
        let with_half = before + likely.iter().map(|&key| weight(key)).sum::<f64>();
        if is_kept(with_half) {
            start += middle;
            before = with_half;
        } else {
            end = start + middle;
        }
    }
    keys[start..end].sort_unstable();
    for &key in &keys[start..end] {
        if !is_kept(before) {
            break;
        }
        before += weight(key);
        start += 1;
    }
    if start == keys.len() {
        return false;
    }
    // The order of the ids stays: the draw must not depend on how a selection moves the others.
    let first_out = keys[start];
    candidates.retain(|candidate| candidate.key() < first_out);
    true
}
