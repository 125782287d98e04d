//! From a request to its sequences: tokens, limits, owners and samplers.

use std::cmp::Reverse;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Instant;

use super::Shared;
use super::answers::{Answers, Sink};
use super::beam::Beam;
use super::draft;
use super::grammar::GrammarState;
use super::policy::ChosenPolicy;
use super::prefix_items::PrefixItems;
use super::request::{ContextEnd, GenerateRequest, GenerateResponse, Prompt};
use super::sampling::Sampler;
use super::sequence::{Ends, NewSequence, Sequence};
use super::sequence_text::SequenceText;
use crate::checksum::xxh3;
use crate::error::{Error, Result, Status};
use crate::kv::{KvCache, Owner};
use crate::runtime::Watcher;
use crate::text::{Detokeniser, Stops};

/// The bit of owners that are no session.
const NO_SESSION: u64 = 1 << 63;
/// The maximum number of answers to a request.
const MOST_ANSWERS: u32 = 1024;
/// The maximum number of likeliest tokens with log probabilities.
const MOST_LOGPROBS: u32 = 1000;

/// How many tokens that are the only ones allowed are taken at once.
const MOST_FORCED: usize = 32;

/// The owner of a session's keys and values.
pub(super) fn session_owner(session: &str) -> Owner {
    Owner(xxh3(session.as_bytes()) & !NO_SESSION)
}

impl Shared {
    /// Checks a request and queues its sequences.
    pub(super) fn submit(self: &Arc<Self>, request: &GenerateRequest, sink: Sink) -> Result<Arc<Answers>> {
        self.try_submit(request, sink).inspect_err(|_| self.counters.refused())
    }

    fn try_submit(self: &Arc<Self>, request: &GenerateRequest, sink: Sink) -> Result<Arc<Answers>> {
        let arrived = Instant::now();
        let model = &self.model;
        let sampling = request.sampling(&model.folder.generation, model.folder.vocab_size)?;
        let tokens = model.tokens(&request.prompt)?;
        let n = request.n.unwrap_or(1);
        self.check(request, tokens.len(), n)?;
        let policy = self.policy(request, &tokens)?;
        let max_new_tokens = self.max_new_tokens(request, tokens.len())?;
        let constraint = self.constraint(request)?;
        let prompt_text = request.echo.then(|| model.tokenizer.decode(&tokens, request.skip_special.unwrap_or(true)));
        let prompt_text = prompt_text.transpose()?.unwrap_or_default();
        let mut items = PrefixItems::default();
        items.extend(&tokens);

        let response = GenerateResponse {
            prompt_tokens: tokens.clone(),
            prompt_logprobs: if request.prompt_logprobs.is_some() { vec![None] } else { Vec::new() },
            version: Arc::clone(&model.version),
            ..GenerateResponse::default()
        };
        let deadline = request.timeout.and_then(|timeout| arrived.checked_add(timeout));
        let answers = Arc::new(Answers::new(sink, request.cancel.clone(), deadline, n as usize, response));
        let eos = &model.folder.tokens.eos;
        let mut end_tokens = request.stop_tokens.clone();
        if !request.ignore_eos || constraint.is_some() {
            end_tokens.extend(eos);
        }
        let seed = request.seed.unwrap_or_else(random);
        let skip_special = request.skip_special.unwrap_or(true);
        let new = |choice: u32| -> Result<Sequence> {
            let stops = Stops::new(request.stop.clone())?.include(request.include_stop);
            let sampler = Sampler::new(
                &sampling,
                seed.wrapping_add(u64::from(choice)),
                eos,
                model.folder.vocab_size as usize,
                &tokens,
                max_new_tokens,
            )?;
            let session = request.session.as_ref();
            let text = SequenceText {
                detokeniser: Detokeniser::new(Arc::clone(&model.tokenizer), skip_special),
                stops,
                text: prompt_text.clone(),
                include_stop: request.include_stop,
            };
            let precedence = (Reverse(request.priority), 0);
            let new = NewSequence {
                choice,
                precedence,
                owner: session.map_or_else(|| new_owner(&model.kv), |session| session_owner(session)),
                is_session: session.is_some(),
                tokens: tokens.clone(),
                items: items.clone(),
                beam: request.beams.map(|beams| Beam::first(beams, n as usize, &end_tokens, &text, precedence)),
                text,
                ends: Ends { max_new_tokens: max_new_tokens as usize, tokens: end_tokens.clone() },
                sampler,
                logprobs: request.logprobs,
                prompt_logprobs: request.prompt_logprobs.filter(|_| choice == 0),
                policy: policy.clone(),
                constraint: constraint.as_ref().map(|constraint| constraint.fork()),
                max_draft: if request.beams.is_some() { 0 } else { self.max_draft(request) as usize },
                drafts_by_model: self.options.draft_model.is_some(),
                arrived,
            };
            Ok(Sequence::new(Arc::clone(&answers), new))
        };
        // A search begins with one beam.
        let sequences = (0..if request.beams.is_some() { 1 } else { n }).map(new).collect::<Result<Vec<_>>>()?;
        self.queue(sequences)?;
        if let Some(cancel) = &request.cancel {
            let watcher: Arc<dyn Watcher> = Arc::clone(self) as _;
            cancel.watch(Arc::downgrade(&watcher));
        }
        Ok(answers)
    }

    /// The policy of a request's sequences, if they have slots.
    fn policy(&self, request: &GenerateRequest, tokens: &[u32]) -> Result<Option<Arc<ChosenPolicy>>> {
        let own = request.kv_policy.as_ref();
        let Some(open) = &self.model.policy else {
            return match own.filter(|own| !own.is_dense()) {
                None => Ok(None),
                Some(own) => {
                    let message = format!(
                        "the generator was opened without slots, which {} needs: set options.kv_policy",
                        own.name
                    );
                    Err(Error::new(Status::Unsupported, message).about("kv_policy"))
                }
            };
        };
        let first_message = match &request.prompt {
            Prompt::Chat(chat) if open.protects_first_message(own) => self.model.first_message(chat, tokens),
            _ => None,
        };
        open.choose(own, first_message).map(Some)
    }

    /// The grammar of a request's answers. Log probabilities need the logits of every token.
    fn constraint(&self, request: &GenerateRequest) -> Result<Option<Arc<GrammarState>>> {
        // A beam takes no token without its score.
        let most_forced = match request.logprobs {
            _ if request.beams.is_some() => 0,
            Some(_) => 1,
            None => MOST_FORCED,
        };
        let compile = |grammar| self.model.grammars()?.compile(grammar, most_forced);
        request.grammar.as_ref().map(compile).transpose()
    }

    fn queue(&self, sequences: Vec<Sequence>) -> Result<()> {
        let mut inbox = self.inbox.lock();
        let most = self.options.queue as usize;
        let waiting = inbox.waiting + inbox.new.len();
        if waiting + sequences.len() > most {
            let message = format!(
                "{waiting} answers wait already and {} more would exceed the {most} of options.queue: try again later",
                sequences.len()
            );
            return Err(Error::new(Status::Capacity, message));
        }
        for mut sequence in sequences {
            sequence.precedence.1 = inbox.next;
            if let Some(beam) = &mut sequence.beam {
                beam.leader = sequence.precedence;
            }
            inbox.next += sequence.places() as u64;
            inbox.new.push(sequence);
        }
        drop(inbox);
        self.changed.notify_all();
        Ok(())
    }

    fn check(&self, request: &GenerateRequest, prompt: usize, n: u32) -> Result<()> {
        if prompt == 0 {
            return Err(Error::invalid("prompt", "it has no tokens: a model continues at least one"));
        }
        if n == 0 || n > MOST_ANSWERS {
            return Err(Error::invalid("n", format!("{n} is not between 1 and {MOST_ANSWERS}")));
        }
        if request.session.is_some() && n > 1 {
            let message = format!("{n} answers in a session, which goes on after one of them: ask for 1");
            return Err(Error::invalid("n", message));
        }
        if request.session.as_ref().is_some_and(String::is_empty) {
            return Err(Error::invalid("session", "it is empty: leave it out for a request without a session"));
        }
        for (name, top) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            if let Some(top) = top.filter(|&top| top > MOST_LOGPROBS) {
                return Err(Error::invalid(name, format!("{top} is not between 0 and {MOST_LOGPROBS}")));
            }
        }
        draft::check("max_draft", self.max_draft(request))?;
        self.check_beams(request, n)?;
        let most = self.options.max_prompt_tokens as usize;
        if most > 0 && prompt > most {
            let message = format!("{prompt} tokens are more than the {most} of options.max_prompt_tokens");
            return Err(Error::invalid("prompt", message));
        }
        Ok(())
    }

    fn max_draft(&self, request: &GenerateRequest) -> u32 {
        request.max_draft.unwrap_or(self.options.max_draft)
    }

    fn check_beams(&self, request: &GenerateRequest, n: u32) -> Result<()> {
        let Some(beams) = &request.beams else { return Ok(()) };
        beams.check()?;
        let width = beams.width;
        let (field, message) = if n > width {
            ("n", format!("{n} answers of {width} beams: ask for {width} at most, or for more beams"))
        } else if request.session.is_some() {
            ("session", "a session goes on after one answer, and beams are several: leave one of them out".to_owned())
        } else if request.do_sample == Some(true) {
            ("do_sample", "beams are searched, and nothing is drawn: leave one of them out".to_owned())
        } else if request.do_sample.is_none() && request.temperature.is_some_and(|temperature| temperature != 0.0) {
            ("temperature", "beams are searched, and nothing is drawn: leave one of them out".to_owned())
        } else if width > self.options.max_batch {
            let most = self.options.max_batch;
            ("beams.width", format!("{width} beams are more than the {most} sequences of options.max_batch"))
        } else if self.model.policy.is_some() {
            let message =
                "beams share pages, and the generator was opened with options.kv_policy, with which nothing is shared";
            return Err(Error::new(Status::Unsupported, message).about("beams"));
        } else {
            return Ok(());
        };
        Err(Error::invalid(field, message))
    }

    /// The maximum number of tokens of an answer: what the request asks for, within the limits.
    fn max_new_tokens(&self, request: &GenerateRequest, prompt: usize) -> Result<u32> {
        let model = &self.model;
        let context = model.folder.limits.max_context as usize;
        // A cache of fixed length from which no token leaves.
        let dense = self.options.kv_policy.as_ref().filter(|policy| policy.is_dense() && policy.cache_length > 0);
        let (context, whose) = match dense.map(|policy| policy.cache_length as usize) {
            Some(length) if length < context => (length, "options.kv_policy.cache_length"),
            _ => (context, "the model's context"),
        };
        // The last token of an answer is not computed, but counts as part of the context.
        let room = context.saturating_sub(prompt);
        let pool = (model.pages * u64::from(model.folder.kv.page_size)) as usize;
        if room == 0 {
            let message = format!("{prompt} tokens leave no room for an answer in {whose} of {context}");
            return Err(Error::invalid("prompt", message));
        }
        let most = self.options.max_new_tokens;
        let asked = match request.max_new_tokens.or(model.folder.generation.max_new_tokens) {
            Some(0) => return Err(Error::invalid("max_new_tokens", "0 tokens are no answer; expected 1 or more")),
            Some(asked) if most > 0 && asked > most && request.max_new_tokens.is_some() => {
                let message = format!("{asked} is more than the {most} of options.max_new_tokens");
                return Err(Error::invalid("max_new_tokens", message));
            }
            Some(asked) => asked as usize,
            None if model.policy.is_some() => room,
            None => room.min(pool.saturating_sub(prompt).max(1)),
        };
        let asked = if most > 0 { asked.min(most as usize) } else { asked };
        let asked = match request.context_end {
            ContextEnd::Refuse if asked > room && request.max_new_tokens.is_some() => {
                let message = format!(
                    "{asked} tokens after a prompt of {prompt} are more than {whose} of {context}: ask for \
                     {room} at most, or set context_end to stop"
                );
                return Err(Error::invalid("max_new_tokens", message));
            }
            _ => asked.min(room),
        };
        if model.pages_of(prompt + asked) > model.pages {
            let message = format!(
                "a prompt of {prompt} tokens and {asked} new ones need {} pages and the pool has {}: raise options.kv_size, \
                 or ask for fewer tokens",
                model.pages_of(prompt + asked),
                model.pages
            );
            return Err(Error::new(Status::Capacity, message).about("max_new_tokens"));
        }
        Ok(asked as u32)
    }
}

/// An owner for a sequence without a session. None that was stored by an earlier process is the same.
pub(super) fn new_owner(kv: &KvCache) -> Owner {
    loop {
        let owner = Owner(random() | NO_SESSION);
        if kv.lookup(&[owner])[0].length == 0 {
            return owner;
        }
    }
}

/// A number that differs from call to call and from process to process.
fn random() -> u64 {
    RandomState::new().hash_one(Instant::now())
}
