//! One sequence: the tokens of a prompt and of one answer, and what becomes of the next token.

use std::sync::Arc;
use std::time::Instant;

use super::answers::Answers;
use super::beam::Beam;
use super::clock::Clock;
use super::draft::{Costs, Drafts};
use super::grammar::{GrammarState, NextTokens};
use super::plan::{Need, Precedence};
use super::policy::{ChosenPolicy, OpenPolicy, Slots};
use super::prefix_items::PrefixItems;
use super::request::{Choice, FinishReason, Timings, Token};
use super::sampling::{Sampled, Sampler, Scratch, TokenLogprobs, logprobs};
use super::sequence_text::SequenceText;
use super::slot_image::Stored;
use crate::error::Result;
use crate::kv::{KvRequest, Owner};

/// The rows of a chunk of which the logits of every row are needed: they take the vocabulary's size in memory each.
const ROWS_WITH_LOGITS: usize = 64;

/// A prompt and one answer to it.
pub(super) struct Sequence {
    pub(super) answers: Arc<Answers>,
    pub(super) choice: u32,
    pub(super) precedence: Precedence,
    pub(super) owner: Owner,
    /// Whether the owner is a session, whose keys and values are kept.
    pub(super) is_session: bool,
    /// The tokens of the prompt, then those of the answer.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt: usize,
    pub(super) items: PrefixItems,
    /// The tokens whose keys and values are cached; with a policy, those that were computed.
    pub(super) cached: usize,
    /// With a policy: which.
    pub(super) policy: Option<Arc<ChosenPolicy>>,
    /// With a policy: the slots that they are in.
    pub(super) slots: Option<Slots>,
    /// With a policy, of a session: what is stored of them.
    pub(super) stored: Stored,
    /// The pages of them that others have, too.
    pub(super) shared_pages: u64,
    /// Whether `cached` was looked up since the sequence was last preempted.
    pub(super) looked_up: bool,
    /// Whether the sequence has added to the cache since then, so that what is cached is known to be its own.
    pub(super) committed: bool,
    pub(super) text: SequenceText,
    pub(super) ends: Ends,
    pub(super) sampler: Sampler,
    /// Present if the answer has a grammar.
    pub(super) constraint: Option<Arc<GrammarState>>,
    /// Present if tokens may be drafted.
    drafts: Option<Drafts>,
    /// The likeliest tokens whose log probabilities are asked for, in each place of the answer and of the prompt.
    pub(super) logprobs: Option<u32>,
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) computed: u64,
    pub(super) clock: Clock,
    pub(super) answer_logprobs: Vec<TokenLogprobs>,
    /// Present if it is a beam of a search.
    pub(super) beam: Option<Beam>,
}

/// The logits of a sequence's rows.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) rows: &'a [f32],
    pub(super) vocab: usize,
    pub(super) maxima: Maxima<'a>,
}

/// The maxima of blocks of the same logits.
#[derive(Clone, Copy)]
pub(super) struct Maxima<'a> {
    pub(super) values: &'a [f32],
    /// How many a row has; 0 if the graph does not give them.
    pub(super) blocks: usize,
}

impl<'a> Maxima<'a> {
    fn chunk(self, row: usize) -> &'a [f32] {
        &self.values[row * self.blocks..][..self.blocks]
    }
}

/// What ends an answer.
#[derive(Clone)]
pub(super) struct Ends {
    pub(super) max_new_tokens: usize,
    /// End-of-sequence and stop tokens.
    pub(super) tokens: Vec<u32>,
}

/// What a sequence is made of, beside its answers.
pub(super) struct NewSequence {
    pub(super) choice: u32,
    pub(super) precedence: Precedence,
    pub(super) owner: Owner,
    pub(super) is_session: bool,
    pub(super) tokens: Vec<u32>,
    pub(super) items: PrefixItems,
    pub(super) text: SequenceText,
    pub(super) ends: Ends,
    pub(super) sampler: Sampler,
    pub(super) logprobs: Option<u32>,
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) policy: Option<Arc<ChosenPolicy>>,
    pub(super) constraint: Option<Arc<GrammarState>>,
    /// The maximum number of tokens that are drafted for a step; 0: none are.
    pub(super) max_draft: usize,
    /// Whether a draft model makes them.
    pub(super) drafts_by_model: bool,
    pub(super) beam: Option<Beam>,
    pub(super) arrived: Instant,
}

impl Sequence {
    pub(super) fn new(answers: Arc<Answers>, new: NewSequence) -> Self {
        Self {
            answers,
            choice: new.choice,
            precedence: new.precedence,
            owner: new.owner,
            is_session: new.is_session,
            prompt: new.tokens.len(),
            tokens: new.tokens,
            items: new.items,
            cached: 0,
            policy: new.policy,
            slots: None,
            stored: Stored::default(),
            shared_pages: 0,
            looked_up: false,
            committed: false,
            text: new.text,
            ends: new.ends,
            sampler: new.sampler,
            constraint: new.constraint,
            drafts: (new.max_draft > 0).then(|| Drafts::new(new.max_draft, new.drafts_by_model)),
            logprobs: new.logprobs,
            prompt_logprobs: new.prompt_logprobs,
            computed: 0,
            clock: Clock { arrived: new.arrived, started: None, first_token: None, last_token: None },
            answer_logprobs: Vec::new(),
            beam: new.beam,
        }
    }

    /// The items of the tokens that may be cached: the last token is computed in any case, for its logits.
    pub(super) fn cacheable(&self) -> &[u64] {
        &self.items.get()[..self.tokens.len() - 1]
    }

    /// Whether log probabilities of prompt tokens are missing, so that the prompt has to be computed.
    pub(super) fn needs_prompt_logits(&self) -> bool {
        self.prompt_logprobs.is_some() && self.tokens.len() == self.prompt
    }

    pub(super) fn need(&self) -> Need {
        if self.beam.as_ref().is_some_and(Beam::waits) {
            return Need { rows: 0, most: 0, whole: false, draft: 0 };
        }
        let most = if self.needs_prompt_logits() { ROWS_WITH_LOGITS } else { usize::MAX };
        Need { rows: self.tokens.len() - self.cached, most, whole: false, draft: self.draft().len() }
    }

    /// Drafts tokens for the next step, if that is worth it. `costs`: `None` if it is not to be.
    pub(super) fn guess(&mut self, costs: Option<Costs>) {
        self.drop_draft();
        // With slots, what a wrong guess overwrites is lost.
        if self.cached + 1 != self.tokens.len() || !self.committed || self.slots.is_some() {
            return;
        }
        // The last token of an answer is never computed.
        let room = self.ends.max_new_tokens - (self.tokens.len() - self.prompt) - 1;
        let Self { drafts: Some(drafts), tokens, items, .. } = self else { return };
        drafts.guess(tokens, room, costs);
        if !drafts.tokens().is_empty() {
            items.guess(drafts.tokens());
        }
    }

    /// How many tokens a draft model is to draft for the next step, if any.
    pub(super) fn wants_draft(&self) -> Option<usize> {
        self.drafts.as_ref().map(Drafts::wanted).filter(|&wanted| wanted > 0)
    }

    /// A draft model has made a draft.
    pub(super) fn set_draft(&mut self, draft: &[u32]) {
        let Self { drafts: Some(drafts), items, .. } = self else { return };
        drafts.set(draft);
        if !draft.is_empty() {
            items.guess(draft);
        }
    }

    /// The tokens that are drafted for the next step.
    pub(super) fn draft(&self) -> &[u32] {
        self.drafts.as_ref().map_or(&[], Drafts::tokens)
    }

    /// No step computes the draft. Returns it.
    pub(super) fn drop_draft(&mut self) -> Vec<u32> {
        self.items.take_back();
        self.drafts.as_mut().map(Drafts::take).unwrap_or_default()
    }

    /// Forgets how good drafts were.
    pub(super) fn forget_drafts(&mut self) {
        self.drafts.iter_mut().for_each(Drafts::forget);
    }

    /// The tokens of the next rows, which may be drafted.
    pub(super) fn next_tokens(&self, rows: usize) -> impl Iterator<Item = u32> {
        self.tokens[self.cached..].iter().chain(self.draft()).take(rows).copied()
    }

    /// How many of the next rows are drafted.
    pub(super) fn drafted(&self, rows: usize) -> usize {
        (self.cached + rows).saturating_sub(self.tokens.len())
    }

    /// As [`need`](Self::need), with a policy: its steps do not depend on what else runs.
    pub(super) fn need_by(&self, policy: Option<&OpenPolicy>) -> Need {
        let need = self.need();
        match (policy, &self.slots) {
            (Some(policy), Some(slots)) => {
                Need { most: policy.rows(slots, need.rows.min(need.most)), whole: true, ..need }
            }
            _ => need,
        }
    }

    /// The tokens that the cache must have for the sequence to go on.
    pub(super) fn cached_slots(&self) -> usize {
        self.slots.as_ref().map_or(self.cached, Slots::used)
    }

    /// What the cache is asked for, for this number of rows.
    pub(super) fn kv_request(&self, rows: usize) -> KvRequest<'_> {
        if let Some(slots) = &self.slots {
            let (start, tokens) = (slots.used() as u64, slots.filled_by(rows) as u32);
            return KvRequest { owner: self.owner, start, tokens, ..KvRequest::default() };
        }
        let end = self.cached + rows;
        // After the first request the cache has what this sequence has put there.
        let from = if self.committed { self.cached } else { 0 };
        KvRequest {
            owner: self.owner,
            start: self.cached as u64,
            tokens: rows as u32,
            items: &self.items.get()[from..end],
            recompute: true,
            ..KvRequest::default()
        }
    }

    /// The first of a step's rows whose logits are needed, if this number of rows is computed.
    pub(super) fn logits_from(&self, rows: usize) -> usize {
        if self.needs_prompt_logits() {
            return 0;
        }
        (self.tokens.len() - self.cached - 1).min(rows)
    }

    /// The position of the next token in the answer, which its draw depends on.
    pub(super) fn next_position(&self) -> u64 {
        (self.tokens.len() - self.prompt) as u64
    }

    /// This number of rows was computed. `logits` has those of the rows from [`Self::logits_from`] on. They are not used if
    /// the next token is in `sampled`.
    pub(super) fn advance(
        &mut self,
        rows: usize,
        Logits { rows: logits, maxima, vocab }: Logits<'_>,
        sampled: Option<Sampled>,
        scratch: &mut Scratch,
    ) -> Result<Option<FinishReason>> {
        let drafted = self.drafted(rows);
        let mut draft = self.drop_draft();
        draft.truncate(drafted);
        let first = self.cached + self.logits_from(rows);
        if let Some(top) = self.prompt_logprobs.filter(|_| self.needs_prompt_logits()) {
            let next = self.tokens.iter().enumerate().skip(first + 1);
            for (row, (position, &token)) in logits.chunks_exact(vocab).zip(next) {
                self.answers.add_prompt_logprobs(position, logprobs(row, token, top as usize, scratch)?);
            }
        }
        self.cached += rows - drafted;
        self.computed += rows as u64;
        if self.cached < self.tokens.len() {
            return Ok(None);
        }
        if self.choice == 0 && self.tokens.len() == self.prompt {
            self.answers.prompt_done();
        }
        if self.beam.is_some() {
            return self.collect(&logits[logits.len() - vocab..], scratch).map(|()| None);
        }
        if let Some(sampled) = sampled {
            let token = sampled.token;
            let finish_reason = self.take_token(sampled)?;
            self.constraint.iter().for_each(|constraint| constraint.took(token));
            return Ok(finish_reason);
        }
        // Those from the row of the last token on.
        let rows = logits.len() / vocab - drafted - 1..;
        let mut rows = rows.map(|row| (&logits[row * vocab..][..vocab], maxima.chunk(row)));
        let mut draft = &draft[..];
        loop {
            let (logits, maxima) = rows.next().expect("a row for the last token and for each that is drafted");
            scratch.maxima.clear();
            scratch.maxima.extend_from_slice(maxima);
            let before = self.tokens.len();
            let finish_reason = self.take_next(logits, scratch)?;
            // Their rows are computed.
            let taken = &self.tokens[before..];
            let right = taken.iter().zip(draft).take_while(|(taken, guess)| taken == guess).count();
            self.cached += right;
            if finish_reason.is_some() || right < taken.len() {
                return Ok(finish_reason);
            }
            draft = &draft[right..];
            rows.by_ref().take(right - 1).for_each(drop);
        }
    }

    /// Takes the next token, or several if a grammar allows no others.
    fn take_next(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<Option<FinishReason>> {
        match self.constraint.clone() {
            Some(constraint) => self.take_allowed(&constraint, logits, scratch),
            None => {
                let token = self.sampler.sample(logits, self.next_position(), None, scratch)?;
                self.take(token, logits, scratch)
            }
        }
    }

    /// Takes the next tokens that the grammar allows: those that are the only ones, or one of several.
    fn take_allowed(
        &mut self,
        constraint: &GrammarState,
        logits: &[f32],
        scratch: &mut Scratch,
    ) -> Result<Option<FinishReason>> {
        let NextTokens { forced, end, mask } = constraint.next()?;
        for &token in &forced {
            let finish_reason = self.take(token, logits, scratch)?;
            constraint.took(token);
            if finish_reason.is_some() {
                return Ok(finish_reason);
            }
        }
        let token = match end {
            // With log probabilities each token needs logits of its own.
            _ if !forced.is_empty() && (end.is_none() || self.logprobs.is_some()) => return Ok(None),
            Some(end) => end,
            None => self.sampler.sample(logits, self.next_position(), Some(&mask), scratch)?,
        };
        let finish_reason = self.take(token, logits, scratch)?;
        constraint.took(token);
        Ok(finish_reason)
    }

    /// Takes a token that was chosen by its logits or by the grammar.
    fn take(&mut self, token: u32, logits: &[f32], scratch: &mut Scratch) -> Result<Option<FinishReason>> {
        let logprobs = self.logprobs.map(|top| logprobs(logits, token, top as usize, scratch)).transpose()?;
        self.take_token(Sampled { token, logprobs })
    }

    /// The mask of the token that a step of so many rows samples, if a grammar lets it choose among several.
    pub(super) fn mask(&self, rows: usize) -> Option<Arc<[u32]>> {
        // The sequence itself fails by an error.
        let NextTokens { forced, end, mask } = self.mask_needed(rows)?.next().ok()?;
        (forced.is_empty() && end.is_none()).then_some(mask)
    }

    /// The grammar whose mask a step of so many rows needs.
    pub(super) fn mask_needed(&self, rows: usize) -> Option<&Arc<GrammarState>> {
        self.constraint.as_ref().filter(|_| self.cached + rows >= self.tokens.len())
    }

    /// Takes the next token. Returns why the answer ended, if it did.
    fn take_token(&mut self, sampled: Sampled) -> Result<Option<FinishReason>> {
        self.sampler.observe(sampled.token);
        self.drafts.iter_mut().for_each(|drafts| drafts.came(sampled.token));
        self.items.extend(&[sampled.token]);
        self.say(sampled)
    }

    /// Adds a token to the answer and delivers it. Returns why the answer ended, if it did.
    pub(super) fn say(&mut self, Sampled { token, logprobs }: Sampled) -> Result<Option<FinishReason>> {
        self.clock.tick();
        self.tokens.push(token);
        self.answer_logprobs.extend(logprobs.clone());

        let mut finish_reason = None;
        let mut text = String::new();
        let ends = self.ends.tokens.contains(&token);
        if !ends || self.text.include_stop {
            text = self.text.push(token, &mut finish_reason)?;
        }
        if ends {
            finish_reason = Some(FinishReason::Stop);
        } else if finish_reason.is_none() && self.tokens.len() - self.prompt == self.ends.max_new_tokens {
            finish_reason = Some(FinishReason::Length);
        }
        if finish_reason.is_some() {
            text.push_str(&self.text.finish()?);
        }
        self.text.text.push_str(&text);
        self.answers.send(Token { choice: self.choice, id: token, text, logprobs, finish_reason });
        Ok(finish_reason)
    }

    /// Why the sequence ends before its next token, if it does.
    pub(super) fn ends_early(&self, now: Instant) -> Option<FinishReason> {
        if self.answers.is_cancelled() {
            return Some(FinishReason::Cancelled);
        }
        self.answers.deadline().filter(|&deadline| deadline <= now).map(|_| FinishReason::Timeout)
    }

    /// The answer, as far as it is generated.
    pub(super) fn answer(&mut self, finish_reason: FinishReason) -> Choice {
        if matches!(finish_reason, FinishReason::Cancelled | FinishReason::Timeout) {
            let left = self.text.finish().unwrap_or_default();
            self.text.text.push_str(&left);
        }
        let Clock { arrived, started, first_token, last_token } = self.clock;
        let since = |time: Option<Instant>, from: Instant| time.map_or_else(Default::default, |time| time - from);
        let missing = match finish_reason {
            FinishReason::Stop => None,
            _ => self.constraint.as_ref().and_then(|constraint| constraint.missing()),
        };
        Choice {
            missing,
            text: std::mem::take(&mut self.text.text),
            tokens: self.tokens.split_off(self.prompt),
            logprobs: std::mem::take(&mut self.answer_logprobs),
            finish_reason,
            timings: Timings {
                queued: since(started, arrived),
                first_token: since(first_token, arrived),
                generation: since(last_token, first_token.unwrap_or(arrived)),
            },
            score: None,
        }
    }
}
