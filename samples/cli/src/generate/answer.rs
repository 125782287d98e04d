//! The answer to a request, as text or as JSON.

use std::time::Duration;

use pagoda::engine::{Choice, FinishReason, Token, TokenLogprobs};
use pagoda::text::Tokenizer;
use pagoda::{Error, GenerateResponse};
use serde::Serialize;
use serde_json::Value;

use crate::words::{count, counted};

/// A request that failed, as JSON.
#[derive(Serialize)]
pub struct Failed<'a> {
    id: &'a Value,
    line: u64,
    error: String,
    status: &'static str,
}

impl<'a> Failed<'a> {
    /// The error of a line.
    pub fn new(id: &'a Value, line: u64, error: &Error) -> Self {
        Self { id, line, error: error.to_string(), status: error.status().name() }
    }
}

/// A whole answer, as JSON.
#[derive(Serialize)]
pub struct Answer<'a> {
    id: &'a Value,
    choices: Vec<ChoiceObject<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prompt_logprobs: Vec<Option<Logprobs>>,
    usage: Usage,
    timings: Times,
}

#[derive(Serialize)]
struct ChoiceObject<'a> {
    text: &'a str,
    tokens: &'a [u32],
    finish_reason: &'static str,
    /// What the grammar expects next, if the answer was cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<&'a str>,
    /// Of a beam search.
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<Logprobs>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    cached_tokens: u32,
    completion_tokens: usize,
}

/// The times of all choices together, in milliseconds since the request.
#[derive(Serialize)]
struct Times {
    queued_ms: f64,
    first_token_ms: f64,
    total_ms: f64,
    tokens_per_second: Option<f64>,
}

/// What the model thought of a token. A number that JSON can not have, −∞, is null.
#[derive(Serialize)]
struct Logprobs {
    token: u32,
    text: String,
    logprob: f32,
    rank: u32,
    top: Vec<Top>,
}

#[derive(Serialize)]
struct Top {
    token: u32,
    text: String,
    logprob: f32,
}

impl<'a> Answer<'a> {
    /// Of a request with this id.
    pub fn new(id: &'a Value, response: &'a GenerateResponse, tokenizer: &Tokenizer) -> Self {
        let choices = response.choices.iter().map(|choice| ChoiceObject {
            text: &choice.text,
            tokens: &choice.tokens,
            finish_reason: choice.finish_reason.name(),
            missing: choice.missing.as_deref(),
            score: choice.score,
            logprobs: Logprobs::all(&choice.tokens, &choice.logprobs, tokenizer),
        });
        let of_prompt = response.prompt_tokens.iter().zip(&response.prompt_logprobs);
        let figures = Figures::of(response);
        Self {
            id,
            choices: choices.collect(),
            prompt_logprobs: of_prompt
                .map(|(&token, found)| found.as_ref().map(|found| Logprobs::new(token, found, tokenizer)))
                .collect(),
            usage: Usage {
                prompt_tokens: figures.prompt,
                cached_tokens: figures.cached,
                completion_tokens: figures.tokens,
            },
            timings: Times {
                queued_ms: milliseconds(figures.queued),
                first_token_ms: milliseconds(figures.first_token),
                total_ms: milliseconds(figures.total),
                tokens_per_second: figures.tokens_per_second().map(|rate| (rate * 1e2).round() / 1e2),
            },
        }
    }
}

impl Logprobs {
    fn new(token: u32, found: &TokenLogprobs, tokenizer: &Tokenizer) -> Self {
        let top = found.top.iter().map(|&(token, logprob)| Top { token, text: text_of(token, tokenizer), logprob });
        let (logprob, rank) = (found.logprob, found.rank);
        Self { token, text: text_of(token, tokenizer), logprob, rank, top: top.collect() }
    }

    fn all(tokens: &[u32], found: &[TokenLogprobs], tokenizer: &Tokenizer) -> Vec<Self> {
        tokens.iter().zip(found).map(|(&token, found)| Self::new(token, found, tokenizer)).collect()
    }
}

fn text_of(token: u32, tokenizer: &Tokenizer) -> String {
    tokenizer.decode(&[token], false).unwrap_or_default()
}

/// A token as it comes, as JSON.
#[derive(Serialize)]
pub struct TokenObject<'a> {
    id: &'a Value,
    choice: u32,
    token: u32,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

impl<'a> TokenObject<'a> {
    /// Of a request with this id.
    pub fn new(id: &'a Value, token: &'a Token, tokenizer: &Tokenizer) -> Self {
        Self {
            id,
            choice: token.choice,
            token: token.id,
            text: &token.text,
            logprobs: token.logprobs.as_ref().map(|found| Logprobs::new(token.id, found, tokenizer)),
            finish_reason: token.finish_reason.map(FinishReason::name),
        }
    }
}

/// What an answer took, for people.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    prompt: usize,
    cached: u32,
    /// The tokens of all choices.
    tokens: usize,
    choices: usize,
    queued: Duration,
    first_token: Duration,
    /// From the request to the last token.
    total: Duration,
}

impl Figures {
    /// Of a response.
    pub fn of(response: &GenerateResponse) -> Self {
        let choices = &response.choices;
        let times = || choices.iter().filter(|choice| !choice.tokens.is_empty()).map(|choice| choice.timings);
        Self {
            prompt: response.prompt_tokens.len(),
            cached: response.cached_tokens,
            tokens: choices.iter().map(|choice| choice.tokens.len()).sum(),
            choices: choices.len(),
            queued: choices.first().map(|choice| choice.timings.queued).unwrap_or_default(),
            first_token: times().map(|times| times.first_token).min().unwrap_or_default(),
            total: times().map(|times| times.first_token + times.generation).max().unwrap_or_default(),
        }
    }

    /// After the first token of each choice. `None` if there is no other.
    fn tokens_per_second(&self) -> Option<f64> {
        let (tokens, time) = (self.tokens.saturating_sub(self.choices), (self.total - self.first_token).as_secs_f64());
        (tokens > 0 && time > 0.0).then(|| tokens as f64 / time)
    }
}

/// `24 tokens, 31.5 tokens/s, the first after 0.21 s; 12 of 30 tokens of the prompt were cached`.
impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&counted(self.tokens as u64, "token"))?;
        if let Some(rate) = self.tokens_per_second() {
            write!(f, ", {rate:.1} tokens/s")?;
        }
        if self.tokens > 0 {
            write!(f, ", the first after {:.2} s", self.first_token.as_secs_f64())?;
        }
        let (cached, prompt) = (count(self.cached.into()), count(self.prompt as u64));
        write!(f, "; {cached} of {prompt} prompt tokens cached")
    }
}

/// `, stopped` and the like: why an answer ended, if not by itself.
pub fn cut(choice: &Choice) -> &'static str {
    match choice.finish_reason {
        FinishReason::Stop => "",
        FinishReason::Length => ", cut",
        FinishReason::Cancelled => ", stopped",
        FinishReason::Timeout => ", out of time",
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use pagoda::engine::Timings;

    use super::*;

    fn response() -> GenerateResponse {
        let choice = |tokens: usize, first: u64, rest: u64| Choice {
            tokens: vec![1; tokens],
            timings: Timings {
                queued: Duration::from_millis(1),
                first_token: Duration::from_millis(first),
                generation: Duration::from_millis(rest),
            },
            ..Choice::default()
        };
        GenerateResponse {
            choices: vec![choice(5, 200, 800), choice(3, 250, 250)],
            prompt_tokens: vec![0; 1500],
            cached_tokens: 1200,
            ..GenerateResponse::default()
        }
    }

    #[test]
    fn figures_are_of_all_choices() {
        let text = Figures::of(&response()).to_string();
        assert_eq!(text, "8 tokens, 7.5 tokens/s, the first after 0.20 s; 1,200 of 1,500 prompt tokens cached");
        let one = GenerateResponse { choices: vec![Choice::default()], ..response() };
        assert_eq!(Figures::of(&one).to_string(), "0 tokens; 1,200 of 1,500 prompt tokens cached");
    }

    #[test]
    fn a_failure_names_request_line_and_status() {
        let id = "a".into();
        let text = serde_json::to_string(&Failed::new(&id, 4, &Error::invalid("prompt", "missing"))).unwrap();
        assert_eq!(text, r#"{"id":"a","line":4,"error":"prompt: missing","status":"INVALID_ARGUMENT"}"#);
    }
}
