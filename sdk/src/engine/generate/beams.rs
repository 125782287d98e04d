//! Beam search: which beams go on, which answers are finished, and when the search ends. As in transformers 5.
//!
//! A beam is a [`Sequence`]. The scheduler runs the beams of a search like any other sequences, and parts them when the last
//! tokens of all of them are computed.

use std::sync::Arc;

use super::beam::{Beam, Continuation, Hypothesis, Search};
use super::beam_options::{BeamOptions, EarlyStop};
use super::plan::Precedence;
use super::request::{Choice, FinishReason};
use super::sampling::{Sampled, Scratch, TokenLogprobs, logprobs};
use super::sequence::{NewSequence, Sequence};
use super::sequence_text::SequenceText;
use crate::error::{Error, Result};
use crate::kv::Owner;

impl Search {
    /// Chooses the beams that go on, in order of their scores. None: the search has ended. `beams` are all that there are, by
    /// rank, and their last tokens are computed.
    pub(super) fn select(&mut self, beams: &[&Sequence], scratch: &mut Scratch) -> Result<Vec<Continuation>> {
        let (width, first) = (self.options.width as usize, beams[0]);
        let length = first.tokens.len() - first.prompt + 1;
        let is_last = length == first.ends.max_new_tokens;
        let mut going = Vec::with_capacity(width);
        for (rank, continuation) in self.continuations(beams).into_iter().enumerate() {
            if rank >= width && going.len() == width {
                break;
            }
            let parent = beams[continuation.parent];
            if !is_last && !parent.is_ended_by(continuation.token)? {
                if going.len() < width {
                    going.push(continuation);
                }
            } else if rank < width {
                // Those of a lower rank are no better than beams that go on.
                let score = self.options.score(continuation.score, length);
                self.finished.push(Hypothesis::ended(parent, continuation.token, score, is_last, scratch)?);
            }
        }
        self.keep_best(width);
        if going.is_empty() && self.finished.is_empty() {
            let failed = beams.iter().find_map(|beam| beam.beam.as_ref()?.continuations.as_ref()?.as_ref().err());
            return Err(failed.cloned().unwrap_or_else(|| Error::invalid("beams", "no token is left for any of them")));
        }
        if going.first().is_none_or(|best| self.is_done(best.score, length, first.ends.max_new_tokens)) {
            going.clear();
        }
        Ok(going)
    }

    /// The best continuations of all beams, the best first; of equals that of the better beam, and then the token of the lower
    /// id.
    fn continuations(&self, beams: &[&Sequence]) -> Vec<Continuation> {
        let mut all = Vec::with_capacity(beams.len() * self.looked_at);
        for (parent, beam) in beams.iter().enumerate() {
            let Some(Beam { score, continuations: Some(Ok(tokens)), .. }) = &beam.beam else { continue };
            let of_token =
                |&(token, logprob): &(u32, f32)| Continuation { parent, token, score: score + f64::from(logprob) };
            all.extend(tokens.iter().map(of_token));
        }
        // It keeps the order of equals.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(self.looked_at);
        all
    }

    /// Whether the search ends before its beams do. `best` is the sum of the best of them.
    fn is_done(&self, best: f64, length: usize, max_new_tokens: usize) -> bool {
        let BeamOptions { width, length_penalty, early_stop } = self.options;
        let Some(worst) = self.finished.last().filter(|_| self.finished.len() == width as usize) else { return false };
        let length = match early_stop {
            EarlyStop::WhenFull => return true,
            EarlyStop::Never if length_penalty > 0.0 => max_new_tokens,
            _ => length,
        };
        self.options.score(best, length) <= worst.score
    }

    fn keep_best(&mut self, count: usize) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(count);
    }

    /// A beam is gone for which so many rows were computed.
    pub(super) fn lost(&mut self, computed: u64) {
        self.computed += computed;
    }

    /// The rows that were computed for the beams that are gone.
    pub(super) fn computed(&self) -> u64 {
        self.computed
    }

    /// Delivers the tokens of the best answers, and returns these. `beams` are those that are left, one at least. They are answers,
    /// too, if the search ends early.
    pub(super) fn answer(&mut self, beams: &[&Sequence], early: Option<FinishReason>) -> Result<Vec<Choice>> {
        if let Some(reason) = early {
            let options = self.options;
            self.finished.extend(beams.iter().map(|beam| Hypothesis::cut(beam, &options, reason)));
        }
        self.keep_best(self.n);
        let found = std::mem::take(&mut self.finished).into_iter().enumerate();
        found.map(|(choice, found)| beams[0].tell(choice as u32, found, self.text.clone())).collect()
    }
}

impl Hypothesis {
    /// A beam that a token has ended, or that has as many as it may with it.
    fn ended(beam: &Sequence, token: u32, score: f64, is_last: bool, scratch: &mut Scratch) -> Result<Self> {
        let mut found = Self { score, reason: None, ..Self::of(beam) };
        found.tokens.push(token);
        found.logprobs.extend(beam.logprobs_of(token, scratch)?);
        found.constraint = beam.constraint.as_ref().filter(|_| is_last).map(|constraint| {
            let after = constraint.fork();
            after.took(token);
            after
        });
        found.clock.tick();
        Ok(found)
    }

    /// A beam as far as it is.
    fn cut(beam: &Sequence, options: &BeamOptions, reason: FinishReason) -> Self {
        let found = Self::of(beam);
        let score = beam.beam.as_ref().map_or(0.0, |beam| options.score(beam.score, found.tokens.len()));
        Self { score, reason: Some(reason), constraint: beam.constraint.clone(), ..found }
    }

    fn of(beam: &Sequence) -> Self {
        let (tokens, logprobs) = (beam.tokens[beam.prompt..].to_vec(), beam.answer_logprobs.clone());
        Self { tokens, logprobs, score: 0.0, constraint: None, reason: None, clock: beam.clock.clone() }
    }
}

impl Sequence {
    /// Takes the logits of a beam's last token.
    pub(super) fn collect(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<()> {
        let next = self.constraint.as_ref().map(|constraint| constraint.next()).transpose()?;
        let mask = next.as_ref().map(|next| &*next.mask);
        let Some(beam) = &mut self.beam else { return Ok(()) };
        let count = beam.search.lock().looked_at;
        // A beam from which nothing goes on is no error as long as others do.
        beam.continuations = Some(self.sampler.continuations(logits, mask, count, scratch));
        if self.logprobs.is_some() {
            beam.logits.clear();
            beam.logits.extend_from_slice(logits);
        }
        Ok(())
    }

    /// A beam that goes on with another token. Nothing is cached of it yet.
    pub(super) fn branch(&self, owner: Owner, precedence: Precedence) -> Self {
        let new = NewSequence {
            choice: self.choice,
            precedence,
            owner,
            is_session: false,
            tokens: self.tokens.clone(),
            items: self.items.clone(),
            text: self.text.clone(),
            ends: self.ends.clone(),
            sampler: self.sampler.clone(),
            logprobs: self.logprobs,
            prompt_logprobs: None,
            policy: None,
            constraint: self.constraint.as_ref().map(|constraint| constraint.fork()),
            beam: self.beam.as_ref().map(|beam| Beam {
                search: Arc::clone(&beam.search),
                continuations: None,
                logits: beam.logits.clone(),
                text: beam.text.clone(),
                ..*beam
            }),
            max_draft: 0,
            drafts_by_model: false,
            arrived: self.clock.arrived,
        };
        let mut branch = Self::new(Arc::clone(&self.answers), new);
        branch.prompt = self.prompt;
        branch.clock = self.clock.clone();
        branch.answer_logprobs.clone_from(&self.answer_logprobs);
        branch
    }

    /// Goes on with a token, as the beam of this rank.
    pub(super) fn go_on(&mut self, with: Continuation, rank: usize, scratch: &mut Scratch) -> Result<()> {
        let Continuation { token, score, .. } = with;
        let logprobs = self.logprobs_of(token, scratch)?;
        self.answer_logprobs.extend(logprobs);
        self.sampler.observe(token);
        self.items.extend(&[token]);
        self.tokens.push(token);
        self.clock.tick();
        self.constraint.iter().for_each(|constraint| constraint.took(token));
        let Some(beam) = &mut self.beam else { return Ok(()) };
        (beam.rank, beam.score, beam.continuations) = (rank, score, None);
        match &mut beam.text {
            Some(text) => text.push(token, &mut None).map(drop),
            None => Ok(()),
        }
    }

    /// Whether an answer ends with this token, or with a text that ends in it.
    fn is_ended_by(&self, token: u32) -> Result<bool> {
        if self.ends.tokens.contains(&token) {
            return Ok(true);
        }
        let Some(mut text) = self.beam.as_ref().and_then(|beam| beam.text.clone()) else { return Ok(false) };
        let mut found = None;
        text.push(token, &mut found)?;
        Ok(found.is_some())
    }

    fn logprobs_of(&self, token: u32, scratch: &mut Scratch) -> Result<Option<TokenLogprobs>> {
        let logits = self.beam.as_ref().map_or(&[][..], |beam| &beam.logits);
        self.logprobs.map(|top| logprobs(logits, token, top as usize, scratch)).transpose()
    }

    /// Delivers an answer that was found.
    fn tell(&self, choice: u32, found: Hypothesis, text: SequenceText) -> Result<Choice> {
        let mut answer = self.branch(self.owner, self.precedence);
        (answer.choice, answer.text, answer.constraint) = (choice, text, found.constraint);
        answer.tokens.truncate(self.prompt);
        answer.answer_logprobs.clear();
        let (mut reason, mut logprobs) = (found.reason, found.logprobs.into_iter());
        for token in found.tokens {
            reason = answer.say(Sampled { token, logprobs: logprobs.next() })?.or(reason);
        }
        answer.clock = found.clock;
        let told = answer.answer(reason.unwrap_or(FinishReason::Length));
        Ok(Choice { score: Some(found.score as f32), ..told })
    }
}
