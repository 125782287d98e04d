//! The steps from the temperature on: which tokens can be drawn, and how likely each is.

use super::options::SamplingOptions;
use super::select::{Candidate, argmax, at_least, largest, maximum};
use super::weights::{Softmax, total};

/// Buffers for [`Sampler::sample`](super::Sampler::sample) and [`logprobs`](super::logprobs()), to be used again. Any
/// sampler can use any scratch; a thread needs one.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// The largest of each block of the logits that are sampled next, where it is known; empty otherwise. Sampling empties it.
    pub(in super::super) maxima: Vec<f32>,
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
    if options.top_p < 1.0 {
        if has_top_k {
            weigh(softmax, candidates, weights);
        } else {
            softmax.weights(logits, weights);
            // Mostly a few tokens have nearly all of the probability.
            largest(logits, 256, ranked, candidates);
        }
        let nucleus = Nucleus { softmax, total: total(weights), top_p: options.top_p };
        keys.clear();
        keys.extend(candidates.iter().map(|candidate| candidate.key()));
        if let Some(out) = nucleus.first_out(0.0, keys) {
            candidates.retain(|candidate| candidate.key() < out);
        } else if !has_top_k {
            nucleus.of_all(logits, weights, keys, candidates);
        }
    } else if !has_top_k && options.min_p > 0.0 {
        // A bound for logits that saves the weights of the others. It is a little low, because min_p decides.
        let distance = f64::from(options.min_p).ln() * f64::from(options.temperature);
        let slack = distance * -1e-6 + f64::from(max).abs() * 1e-6;
        let bound = if max.is_finite() { (f64::from(max) + distance - slack) as f32 } else { max };
        at_least(logits, bound, candidates);
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

/// What top_p keeps: a token whose probability before it is at most top_p.
struct Nucleus {
    softmax: Softmax,
    /// The sum of the weights of all tokens.
    total: f64,
    top_p: f32,
}

impl Nucleus {
    /// Finds the first of some tokens that does not stay. `before` is the weight of the tokens before them. `None` if all
    /// stay.
    fn first_out(&self, mut before: f64, mut keys: &mut [u64]) -> Option<u64> {
        let weight = |key: u64| self.softmax.weight(Candidate::of_key(key).logit);
        // A binary search, which puts into order only what it has to: each step has the more likely half before the
        // other half.
        const FEW: usize = 32;
        let mut out = None;
        while keys.len() > FEW {
            let middle = keys.len() / 2;
            let (likely, &mut first, _) = keys.select_nth_unstable(middle);
            let with_half = before + likely.iter().map(|&key| weight(key)).sum::<f64>();
            if self.keeps(with_half) {
                before = with_half;
                keys = &mut keys[middle..];
            } else {
                out = Some(first);
                keys = &mut keys[..middle];
            }
        }
        keys.sort_unstable();
        for &key in &*keys {
            if !self.keeps(before) {
                return Some(key);
            }
            before += weight(key);
        }
        out
    }

    /// Finds what stays of all tokens, in order of their ids.
    fn of_all(&self, logits: &[f32], weights: &[f64], keys: &mut Vec<u64>, candidates: &mut Vec<Candidate>) {
        // A histogram: the sums of the weights in intervals, from the largest weight (1) down, tell in which interval
        // the first one is that does not stay. The exponent and 6 bits of the fraction number the intervals.
        const BINS: usize = 2048;
        let bin = |weight: f64| (1f64.to_bits().saturating_sub(weight.to_bits()) >> 46).min(BINS as u64 - 1) as usize;
        let mut bins = [0.0; BINS];
        for &weight in weights {
            bins[bin(weight)] += weight;
        }
        let mut before = 0.0;
        let crossing = bins.iter().position(|weight| {
            let crosses = !self.keeps(before + weight);
            before += if crosses { 0.0 } else { *weight };
            crosses
        });
        let mut bound = f32::NEG_INFINITY;
        let mut out = u64::MAX;
        if let Some(crossing) = crossing {
            keys.clear();
            for (token, (&logit, &weight)) in (0..).zip(logits.iter().zip(weights)) {
                if bin(weight) == crossing && logit > f32::NEG_INFINITY {
                    keys.push(Candidate { token, logit }.key());
                }
            }
            // Where all of the interval stay, the first that does not is the next after the last of them.
            let after = keys.iter().max().map_or(u64::MAX, |last| last + 1);
            out = self.first_out(before, keys).unwrap_or(after);
            bound = Candidate::of_key(out).logit;
        }
        at_least(logits, bound, candidates);
        candidates.retain(|candidate| candidate.key() < out);
    }

    fn keeps(&self, before: f64) -> bool {
        // In f32, as the option is: 0.9 is to mean 0.9, and not the f32 below it.
        (before / self.total) as f32 <= self.top_p
    }
}
