//! What the beams of a search are made of.

use std::sync::Arc;

use super::beam_options::BeamOptions;
use super::clock::Clock;
use super::grammar::GrammarState;
use super::plan::Precedence;
use super::request::FinishReason;
use super::sampling::TokenLogprobs;
use super::sequence_text::SequenceText;
use crate::error::Result;
use crate::kv::Owner;
use crate::sync::Mutex;

/// What a sequence has that is a beam.
pub(super) struct Beam {
    pub(super) search: Arc<Mutex<Search>>,
    pub(super) width: usize,
    /// The keys of its search's beams are this one and those after it, as many as it has beams.
    pub(super) leader: Precedence,
    /// Its place among the beams.
    pub(super) rank: usize,
    /// The sum of its log probabilities.
    pub(super) score: f64,
    /// The likeliest next tokens, once its last token is computed; or why there is none.
    pub(super) continuations: Option<Result<Vec<(u32, f32)>>>,
    /// Those that they were made of, if log probabilities are asked for.
    pub(super) logits: Vec<f32>,
    /// What was said so far, if a text can end it.
    pub(super) text: Option<SequenceText>,
}

/// What the beams of a search share.
pub(super) struct Search {
    pub(super) options: BeamOptions,
    /// How many answers are asked for.
    pub(super) n: usize,
    /// How many continuations are looked at: so many that enough are left if all others end.
    pub(super) looked_at: usize,
    /// The best first.
    pub(super) finished: Vec<Hypothesis>,
    /// The rows that were computed for beams that are gone.
    pub(super) computed: u64,
    /// The text of an answer without tokens.
    pub(super) text: SequenceText,
    /// The owner of the prompt's whole pages, which the beams leave when they end.
    pub(super) prompt_owner: Option<Owner>,
}

/// An answer.
pub(super) struct Hypothesis {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) score: f64,
    /// The grammar after it, if that did not end it.
    pub(super) constraint: Option<Arc<GrammarState>>,
    /// Why it ended, if not by its tokens.
    pub(super) reason: Option<FinishReason>,
    pub(super) clock: Clock,
}

/// A beam that goes on with a token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Continuation {
    /// Which of the beams, by rank.
    pub(super) parent: usize,
    pub(super) token: u32,
    pub(super) score: f64,
}

impl Beam {
    /// The first beam of a search for an answer to a prompt, of `ends` tokens that end one. Its key is set when it is queued.
    pub(super) fn first(options: BeamOptions, n: usize, ends: &[u32], text: &SequenceText, leader: Precedence) -> Self {
        let width = options.width as usize;
        let mut ends = ends.to_vec();
        ends.sort_unstable();
        ends.dedup();
        let search = Search {
            options,
            n,
            looked_at: (1 + ends.len()).max(2) * width,
            finished: Vec::new(),
            computed: 0,
            text: text.clone(),
            prompt_owner: None,
        };
        let text = text.stops.is_any().then(|| text.clone());
        let search = Arc::new(Mutex::new(search));
        Self { search, width, leader, rank: 0, score: 0.0, continuations: None, logits: Vec::new(), text }
    }

    /// Whether its last token is computed, and it waits for the others.
    pub(super) fn waits(&self) -> bool {
        self.continuations.is_some()
    }

    /// The keys of its search.
    pub(super) fn keys(&self) -> std::ops::Range<Precedence> {
        let (priority, first) = self.leader;
        self.leader..(priority, first + self.width as u64)
    }

    pub(super) fn search(&self) -> Arc<Mutex<Search>> {
        Arc::clone(&self.search)
    }
}
