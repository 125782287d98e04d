//! What a caller asks for, and what the answer has.

use std::sync::Arc;
use std::time::Duration;

use super::beam_options::BeamOptions;
use super::grammar::Grammar;
use super::kv_policy::KvPolicy;
use super::sampling::{SamplingOptions, TokenLogprobs};
use crate::error::{Error, Result};
use crate::folder::generate::Generation;
use crate::runtime::Cancel;

/// A request for text.
///
/// What is `None` is as the model folder's `generation` says, and otherwise as the field's comment says.
#[derive(Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct GenerateRequest {
    /// What the text follows.
    pub prompt: Prompt,
    /// The maximum number of tokens of an answer. `None`: as many as the context has room for.
    pub max_new_tokens: Option<u32>,
    /// The number of tokens before which no end-of-sequence token is taken. `None`: 0.
    pub min_new_tokens: Option<u32>,
    /// Whether tokens are drawn; otherwise the likeliest is taken. `None`: drawn if `temperature` is given and not 0.
    pub do_sample: Option<bool>,
    /// What logits are divided by; 0: the likeliest token is taken. `None`: 1.
    pub temperature: Option<f32>,
    /// The number of likeliest tokens that are drawn from; 0: all. `None`: all.
    pub top_k: Option<u32>,
    /// The probability that the tokens drawn from have together. `None`: 1.
    pub top_p: Option<f32>,
    /// The least probability of a token that is drawn, relative to the likeliest one. `None`: 0.
    pub min_p: Option<f32>,
    /// The penalty of tokens in the prompt and in the answer so far. `None`: 1, which is none.
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens as often as the answer has them.
    pub frequency_penalty: f32,
    /// No sequence of so many tokens comes twice; 0: any may. `None`: 0.
    pub no_repeat_ngram_size: Option<u32>,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The token that the last of `max_new_tokens` is forced to be.
    pub forced_eos: Option<u32>,
    /// Whether end-of-sequence tokens do not end the answer.
    pub ignore_eos: bool,
    /// Texts that end the answer. The answer does not have them.
    pub stop: Vec<String>,
    /// Tokens that end the answer, beside the model's end-of-sequence tokens.
    pub stop_tokens: Vec<u32>,
    /// Whether the answer's text has the stop text that ended it.
    pub include_stop: bool,
    /// Whether the answer's text leaves special tokens out. `None`: it does.
    pub skip_special: Option<bool>,
    /// The seed of the draws. The same seed gives the same tokens. `None`: another one for each request.
    pub seed: Option<u64>,
    /// The log probabilities of the answer's tokens, and of so many likeliest tokens in their places.
    pub logprobs: Option<u32>,
    /// The same of the prompt's tokens. The prompt is then computed as a whole.
    pub prompt_logprobs: Option<u32>,
    /// The number of answers. `None`: 1.
    pub n: Option<u32>,
    /// Whether the text of an answer begins with the prompt.
    pub echo: bool,
    /// The conversation that the request belongs to. Its keys and values are kept, in the store too. Send the whole
    /// conversation as the prompt: only what is new is computed. Requests of one session run one at a time.
    pub session: Option<String>,
    /// Requests of higher priority run first. Requests of one priority run in order of arrival.
    pub priority: i32,
    /// The time limit. The answer then has what was generated until then.
    pub timeout: Option<Duration>,
    /// Cancels the request. The answer then has what was generated until then.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub cancel: Option<Arc<Cancel>>,
    /// What happens if prompt and answer do not fit into the model's context.
    pub context_end: ContextEnd,
    /// The policy of this request, if the generator was opened with one that has as many slots and whose graph returns what this
    /// one needs: with `h2o` any but those by lengths and errors. `cache_length` is 0, or the generator's. `None`: the generator's.
    pub kv_policy: Option<KvPolicy>,
    /// What the answer has to look like. It then ends where the grammar does, even with `ignore_eos` and before `min_new_tokens`;
    /// `forced_eos` has no effect. A token that is the only one allowed is taken whatever its logit is.
    pub grammar: Option<Grammar>,
    /// The maximum number of tokens that are guessed for one step, 64 at most; 0: none. The guesses are what followed the same
    /// tokens earlier in the prompt or in the answer, and as many are computed as pay off. The answer is the same, sooner where
    /// much of it repeats the prompt. With a cache policy nothing is guessed. `None`: as the generator's options say.
    pub max_draft: Option<u32>,
    /// A beam search, of which the answers are the `n` best, the best first; there are fewer where fewer are found. Nothing is drawn,
    /// and the request has no session. Penalties, bans and a grammar change log probabilities, as in transformers, rather
    /// than logits. A stream gets no token before the search has ended: then it gets those of the first answer, then those
    /// of the second, and so on. `None`: no search.
    pub beams: Option<BeamOptions>,
}

/// What a generated text follows.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Prompt {
    /// A text, with the special tokens that the model's tokenizer puts before a text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// The messages of a chat.
    Chat(Chat),
}

/// The messages of a chat, which the model's template makes a text of.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Chat {
    /// The messages, objects with `role` and `content` and whatever else the template takes.
    pub messages: Vec<serde_json::Value>,
    /// The tools that the model may call.
    pub tools: Option<serde_json::Value>,
    /// Whether the text ends before an answer of the model, rather than after the last message.
    pub add_generation_prompt: bool,
    /// More variables of the template.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

impl Chat {
    /// Messages that the model answers.
    pub fn new(messages: Vec<serde_json::Value>) -> Self {
        Self { messages, ..Self::default() }
    }
}

impl Default for Chat {
    /// No messages, and an answer of the model follows them.
    fn default() -> Self {
        Self { messages: Vec::new(), tools: None, add_generation_prompt: true, variables: serde_json::Map::new() }
    }
}

/// What happens if prompt and answer do not fit into the model's context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum ContextEnd {
    /// The request is refused.
    #[default]
    Refuse,
    /// The answer ends where the context does, as if `max_new_tokens` were less.
    Stop,
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}

impl From<Chat> for Prompt {
    fn from(chat: Chat) -> Self {
        Self::Chat(chat)
    }
}

impl GenerateRequest {
    /// A request with the model's defaults.
    pub fn new(prompt: impl Into<Prompt>) -> Self {
        Self { prompt: prompt.into(), ..Self::default() }
    }

    /// The options of the sampler: the request's, then the model's, then none.
    pub(super) fn sampling(&self, model: &Generation, vocab_size: u32) -> Result<SamplingOptions> {
        let of = |own: Option<f32>, models: Option<f64>, default| own.or(models.map(|n| n as f32)).unwrap_or(default);
        let given = self.temperature.map(|temperature| temperature != 0.0);
        let sampling = SamplingOptions {
            do_sample: self.do_sample.or(given).or(model.do_sample).unwrap_or(false),
            temperature: of(self.temperature, model.temperature, 1.0),
            top_k: self.top_k.or(model.top_k).unwrap_or(0),
            top_p: of(self.top_p, model.top_p, 1.0),
            min_p: of(self.min_p, model.min_p, 0.0),
            repetition_penalty: of(self.repetition_penalty, model.repetition_penalty, 1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            no_repeat_ngram_size: self.no_repeat_ngram_size.or(model.no_repeat_ngram_size).unwrap_or(0),
            logit_bias: self.logit_bias.clone(),
            min_new_tokens: self.min_new_tokens.or(model.min_new_tokens).unwrap_or(0),
            forced_eos: self.forced_eos.filter(|_| self.grammar.is_none()),
            ignore_eos: self.ignore_eos,
            seed: self.seed,
        };
        sampling.check(vocab_size as usize)?;
        if let Some(token) = self.stop_tokens.iter().find(|&&token| token >= vocab_size) {
            let message = format!("{token} is no token: the model has {vocab_size}, from 0 on");
            return Err(Error::invalid("stop_tokens", message));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::invalid("stop", "an empty text ends every answer at once: leave it out"));
        }
        Ok(sampling)
    }
}

/// The answers to a request.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct GenerateResponse {
    /// The answers, as many as `n`.
    pub choices: Vec<Choice>,
    /// The tokens of the prompt.
    pub prompt_tokens: Vec<u32>,
    /// The number of prompt tokens whose keys and values were cached, of the first answer.
    pub cached_tokens: u32,
    /// The number of rows that were computed for all answers.
    pub computed_tokens: u64,
    /// The log probabilities of the prompt's tokens, if they were asked for. The first token has none.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// The version of the model.
    pub version: Arc<str>,
}

/// One answer.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// Its tokens. Those that ended it are the last ones.
    pub tokens: Vec<u32>,
    /// The log probabilities of its tokens, if they were asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What the grammar expects next, if the answer ended before it was valid.
    pub missing: Option<String>,
    /// Its times.
    pub timings: Timings,
    /// Of a beam search: the sum of the log probabilities, over the number of tokens to the power of the length penalty.
    pub score: Option<f32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token, or a stop text.
    #[default]
    Stop,
    /// `max_new_tokens`, or the end of the context.
    Length,
    /// It was cancelled.
    Cancelled,
    /// Its time limit was over.
    Timeout,
}

impl FinishReason {
    /// Its word, e.g. `stop`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timeout",
        }
    }
}

/// The times of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct Timings {
    /// From the request to its first step.
    pub queued: Duration,
    /// From the request to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub generation: Duration,
}

impl Timings {
    /// The mean time between tokens of an answer.
    pub fn per_token(&self, tokens: usize) -> Duration {
        self.generation / (tokens.max(2) - 1) as u32
    }
}

/// A part of an answer, as it is generated.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Token {
    /// Which answer it belongs to.
    pub choice: u32,
    /// The token.
    pub id: u32,
    /// The text that is new. Empty if the token ends inside a character, or if the text may begin a stop text.
    pub text: String,
    /// The log probabilities, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Set if it is the last token of its answer.
    pub finish_reason: Option<FinishReason>,
}

/// What a stream of an answer gives.
#[derive(Clone, Debug)]
pub enum Event {
    /// A token.
    Token(Token),
    /// The end of all answers, with the whole response; or the error that ended the request.
    End(Result<GenerateResponse>),
}
