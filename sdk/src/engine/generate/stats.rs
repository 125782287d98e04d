//! What a generator counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::request::FinishReason;
use crate::error::Result;
use crate::metrics;

/// The counters of a generator since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct GeneratorStats {
    /// Answers that ended with a stop or at their length.
    pub answered: u64,
    /// Answers that were cancelled or timed out.
    pub ended_early: u64,
    /// Answers that failed, and requests that were refused.
    pub failed: u64,
    /// Steps.
    pub steps: u64,
    /// Rows that were computed.
    pub computed_tokens: u64,
    /// Tokens of prompts whose keys and values were cached.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Tokens of answers that were sampled on a GPU.
    pub sampled_on_gpu: u64,
    /// Tokens that were guessed and computed.
    pub drafted_tokens: u64,
    /// Those of them that were right.
    pub accepted_tokens: u64,
    /// Steps of a sequence with such tokens.
    pub drafts: u64,
    /// Sequences that were preempted because pages ran out.
    pub preemptions: u64,
    /// Sequences that wait.
    pub waiting: u64,
    /// Sequences that run.
    pub running: u64,
    /// The time that the steps took in all, in microseconds. The readers of streams are woken after it.
    pub step_us: u64,
    /// The time of it that the model took, in microseconds.
    pub model_us: u64,
}

/// Counts.
#[derive(Default)]
pub(super) struct Counters {
    answered: AtomicU64,
    ended_early: AtomicU64,
    failed: AtomicU64,
    steps: AtomicU64,
    computed: AtomicU64,
    cached: AtomicU64,
    generated: AtomicU64,
    sampled_on_gpu: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
    drafts: AtomicU64,
    preemptions: AtomicU64,
    step_ns: AtomicU64,
    model_ns: AtomicU64,
    waiting: AtomicU64,
    running: AtomicU64,
}

impl Counters {
    pub(super) fn step(&self, took: Duration, in_model: Duration, sequences: usize, rows: usize) {
        add(&self.steps, 1);
        add(&self.computed, rows as u64);
        add(&self.step_ns, took.as_nanos() as u64);
        add(&self.model_ns, in_model.as_nanos() as u64);
        let (sizes, seconds) = metrics::generator_steps();
        sizes.observe(sequences as f64);
        seconds.observe(took.as_secs_f64());
        metrics::generator_tokens("computed").inc_by(rows as u64);
    }

    pub(super) fn cached(&self, tokens: usize) {
        add(&self.cached, tokens as u64);
        metrics::generator_tokens("cached").inc_by(tokens as u64);
    }

    pub(super) fn sampled_on_gpu(&self, tokens: usize) {
        add(&self.sampled_on_gpu, tokens as u64);
    }

    /// A step of a sequence has computed this number of guesses, and so many were right.
    pub(super) fn drafted(&self, drafted: usize, accepted: usize) {
        if drafted > 0 {
            add(&self.drafts, 1);
            add(&self.drafted, drafted as u64);
            add(&self.accepted, accepted as u64);
            metrics::generator_tokens("drafted").inc_by(drafted as u64);
            metrics::generator_tokens("accepted").inc_by(accepted as u64);
        }
    }

    /// Counts drafts from 0 again.
    pub(super) fn clear_drafts(&self) {
        [&self.drafts, &self.drafted, &self.accepted].iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    pub(super) fn preempted(&self) {
        add(&self.preemptions, 1);
        metrics::generator_preemptions().inc();
    }

    /// An answer of so many tokens has ended.
    pub(super) fn ended(&self, reason: &Result<FinishReason>, tokens: usize) {
        add(&self.generated, tokens as u64);
        metrics::generator_tokens("generated").inc_by(tokens as u64);
        let (count, word) = match reason {
            Ok(reason @ (FinishReason::Stop | FinishReason::Length)) => (&self.answered, reason.name()),
            Ok(reason) => (&self.ended_early, reason.name()),
            Err(_) => (&self.failed, "error"),
        };
        add(count, 1);
        metrics::generator_answers(word).inc();
    }

    /// A request was refused.
    pub(super) fn refused(&self) {
        add(&self.failed, 1);
        metrics::generator_answers("refused").inc();
    }

    pub(super) fn set_queue(&self, waiting: usize, running: usize) {
        self.waiting.store(waiting as u64, Ordering::Relaxed);
        self.running.store(running as u64, Ordering::Relaxed);
    }

    pub(super) fn totals(&self) -> GeneratorStats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GeneratorStats {
            answered: get(&self.answered),
            ended_early: get(&self.ended_early),
            failed: get(&self.failed),
            steps: get(&self.steps),
            computed_tokens: get(&self.computed),
            cached_tokens: get(&self.cached),
            generated_tokens: get(&self.generated),
            sampled_on_gpu: get(&self.sampled_on_gpu),
            drafted_tokens: get(&self.drafted),
            accepted_tokens: get(&self.accepted),
            drafts: get(&self.drafts),
            preemptions: get(&self.preemptions),
            waiting: get(&self.waiting),
            running: get(&self.running),
            step_us: get(&self.step_ns) / 1000,
            model_us: get(&self.model_ns) / 1000,
        }
    }
}

fn add(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}
