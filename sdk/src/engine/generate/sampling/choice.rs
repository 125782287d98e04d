//! The steps from the temperature on: which tokens can be drawn, and how likely each is.

use super::options::SamplingOptions;
use super::select::{Buffers, Candidate, argmax, at_least, largest, maximum, sort};
use super::weights::{Softmax, total};

/// Buffers for [`Sampler::sample`](super::Sampler::sample) and [`logprobs`](super::logprobs()), to be used again. Any
/// sampler can use any scratch; a thread needs one.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// The logits after the penalties and bans.
    pub(super) adjusted: Vec<f32>,
    pub(super) buffers: Buffers,
    pub(super) candidates: Vec<Candidate>,
    pub(super) weights: Vec<f64>,
}

/// What can be drawn.
pub(super) enum Choice {
    /// One token.
    Token(u32),
    /// Token i, with the weight `scratch.weights[i]`.
    All,
    /// `scratch.candidates[i]`, with the weight `scratch.weights[i]`.
    Candidates,
}

/// `None` if all logits are −∞ or NaN.
pub(super) fn choose(logits: &[f32], options: &SamplingOptions, scratch: &mut Scratch) -> Option<Choice> {
    if options.is_greedy() {
        return argmax(logits).map(Choice::Token);
    }
    let max = maximum(logits);
    if max == f32::NEG_INFINITY {
        return None;
    }
    // The temperature does not change the order of the logits, so the largest can be found without it.
    let softmax = Softmax::new(max, options.temperature);
    let Scratch { buffers, candidates, weights, .. } = scratch;
    let top_k = options.top_k as usize;
    if top_k > 0 && top_k < logits.len() {
        largest(logits, top_k, buffers, candidates);
        if options.top_p < 1.0 {
            sort(candidates);
        }
        weigh(softmax, candidates, weights);
        if options.top_p < 1.0 {
            let kept = nucleus(weights, total(weights), options.top_p).unwrap_or(weights.len());
            candidates.truncate(kept);
            weights.truncate(kept);
        }
    } else if options.top_p < 1.0 {
        softmax.weights(logits, weights);
        let total = total(weights);
        // Mostly a few tokens have nearly all of the probability: sort these, and more of them only where they have not.
        let mut count = 64;
        loop {
            largest(logits, count, buffers, candidates);
            sort(candidates);
            weigh(softmax, candidates, weights);
            let kept = nucleus(weights, total, options.top_p);
            if kept.is_some() || count >= logits.len() {
                let kept = kept.unwrap_or(weights.len());
                candidates.truncate(kept);
                weights.truncate(kept);
                break;
            }
            count *= 16;
        }
    } else if options.min_p > 0.0 {
        // A bound for logits that saves the weights of the others. It is a little low, because min_p decides.
        let distance = f64::from(options.min_p).ln() * f64::from(options.temperature);
        let bound = f64::from(max) + distance * 1.000_001 - f64::from(max).abs() * 1e-6;
        at_least(logits, bound as f32, candidates);
        weigh(softmax, candidates, weights);
    } else {
        softmax.weights(logits, weights);
        return Some(Choice::All);
    }
    if options.min_p > 0.0 {
        candidates.retain(|candidate| is_likely(softmax.weight(candidate.logit), options.min_p));
        weights.retain(|&weight| is_likely(weight, options.min_p));
    }
    Some(Choice::Candidates)
}

fn weigh(softmax: Softmax, candidates: &[Candidate], weights: &mut Vec<f64>) {
    weights.clear();
    weights.extend(candidates.iter().map(|candidate| softmax.weight(candidate.logit)));
}

/// How many tokens top_p keeps: up to the first whose probability before it is above top_p. `None` if there is none.
/// `weights` are in descending order.
fn nucleus(weights: &[f64], total: f64, top_p: f32) -> Option<usize> {
    let mut before = 0.0;
    weights.iter().position(|weight| {
        // In f32, as the option is: 0.9 is to mean 0.9, and not the f32 below it.
        let above = (before / total) as f32 > top_p;
        before += weight;
        above
    })
}

/// Whether min_p keeps a token: the weight is its probability over the largest one. In f32, as for top_p.
fn is_likely(weight: f64, min_p: f32) -> bool {
    weight as f32 >= min_p
}
