//! One answer, and which tokens its grammar allows next.

use std::sync::Arc;

use llguidance::Matcher;

use crate::error::{Error, Result, Status};
use crate::sync::Mutex;

/// How many of the allowed tokens a message lists.
const LISTED: usize = 5;

/// What the constraints of a model share.
pub(super) struct Vocabulary {
    pub(super) eos: Vec<u32>,
    /// The bytes of each token.
    pub(super) words: Vec<Vec<u8>>,
}

/// The grammar of one answer, after the tokens that it has. The thread that needs what comes next computes it, unless another
/// one has done so before.
pub struct GrammarState {
    vocabulary: Arc<Vocabulary>,
    /// How many tokens may be taken without logits.
    most_forced: usize,
    state: Mutex<State>,
}

struct State {
    matcher: Matcher,
    /// The tokens that the answer got, and the matcher does not know yet.
    taken: Vec<u32>,
    /// What comes after them, if it was computed.
    next: Option<Result<NextTokens>>,
}

/// What comes next in an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NextTokens {
    /// The tokens that come first, each the only one that is allowed in its place.
    pub forced: Vec<u32>,
    /// The token that ends the answer after them, if nothing else is allowed there.
    pub end: Option<u32>,
    /// The tokens that are allowed after them: bit i % 32 of word i / 32 is that of token i.
    pub mask: Arc<[u32]>,
}

impl NextTokens {
    /// Whether a token may come next: the first of `forced`, or one of `mask`.
    pub fn allows(&self, token: u32) -> bool {
        match self.forced.first() {
            Some(&only) => only == token,
            None => self.mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1),
        }
    }
}

impl GrammarState {
    pub(super) fn new(matcher: Matcher, vocabulary: Arc<Vocabulary>, most_forced: usize) -> Self {
        let state = State { matcher, taken: Vec::new(), next: None };
        Self { vocabulary, most_forced, state: Mutex::new(state) }
    }

    /// The same for another answer.
    pub fn fork(&self) -> Arc<Self> {
        let state = self.state.lock();
        let copy = State { matcher: state.matcher.deep_clone(), taken: state.taken.clone(), next: state.next.clone() };
        let Self { vocabulary, most_forced, .. } = self;
        Arc::new(Self { vocabulary: Arc::clone(vocabulary), most_forced: *most_forced, state: Mutex::new(copy) })
    }

    /// What comes next.
    ///
    /// # Errors
    /// RUNTIME if the grammar is too complex after these tokens.
    pub fn next(&self) -> Result<NextTokens> {
        let mut state = self.state.lock();
        if state.next.is_none() {
            let next = self.compute(&mut state).map_err(|error| {
                let message = format!("the next token can not be found: {error}; make the grammar simpler");
                Error::new(Status::Runtime, message).about("grammar")
            });
            state.next = Some(next);
        }
        state.next.clone().expect("it was computed")
    }

    /// The answer got another token. After one that was not allowed, [`next`](Self::next) fails.
    pub fn took(&self, token: u32) {
        let mut state = self.state.lock();
        match &mut state.next {
            // The matcher knows those that are forced.
            Some(Ok(next)) if next.forced.first() == Some(&token) => drop(next.forced.remove(0)),
            Some(Ok(next)) if !next.forced.is_empty() => {
                let message = format!("token {token} came where only token {} is allowed", next.forced[0]);
                state.next = Some(Err(Error::invalid("token", message)));
            }
            Some(Err(_)) => {}
            _ => {
                state.taken.push(token);
                state.next = None;
            }
        }
    }

    /// What the grammar expects where the answer stops, or `None` if it may stop there.
    pub fn missing(&self) -> Option<String> {
        let next = self.next().ok()?;
        if self.vocabulary.eos.iter().any(|&token| next.allows(token)) {
            return None;
        }
        let text = |token: u32| String::from_utf8_lossy(&self.vocabulary.words[token as usize]).into_owned();
        if !next.forced.is_empty() {
            return Some(format!("next is {:?}", next.forced.iter().map(|&token| text(token)).collect::<String>()));
        }
        let allowed: Vec<u32> = (0..self.vocabulary.words.len() as u32).filter(|&token| next.allows(token)).collect();
        let listed: Vec<_> = allowed.iter().take(LISTED).map(|&token| format!("{:?}", text(token))).collect();
        let more =
            if allowed.len() > LISTED { format!(" or one of {} more", allowed.len() - LISTED) } else { String::new() };
        Some(format!("next is {}{more}", listed.join(", ")))
    }

    fn compute(&self, state: &mut State) -> Result<NextTokens, String> {
        let State { matcher, taken, .. } = state;
        matcher.consume_tokens(taken).map_err(|error| error.to_string())?;
        taken.clear();
        let eos = &self.vocabulary.eos;
        let mut forced = Vec::new();
        loop {
            let mask = matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
            let allowed = mask.num_set();
            let may_end = mask.is_allowed(eos[0]);
            if may_end && allowed == 1 {
                return Ok(NextTokens { forced, end: Some(eos[0]), mask: self.words(&mask, may_end) });
            }
            match mask.first_bit_set() {
                None => return Err("no token is allowed".into()),
                Some(only) if allowed == 1 && forced.len() < self.most_forced => {
                    matcher.consume_token(only as u32).map_err(|error| error.to_string())?;
                    forced.push(only as u32);
                }
                _ => return Ok(NextTokens { forced, end: None, mask: self.words(&mask, may_end) }),
            }
        }
    }

    /// A mask as samplers take it, with all tokens that end an answer if one is allowed.
    fn words(&self, mask: &llguidance::toktrie::SimpleVob, may_end: bool) -> Arc<[u32]> {
        let mut words = mask.as_slice()[..self.vocabulary.words.len().div_ceil(32)].to_vec();
        for &token in self.vocabulary.eos.iter().filter(|_| may_end) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        words.into()
    }
}
