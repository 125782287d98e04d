//! What all answers have: an id, a time, the model, why they ended, and the number of tokens.

use std::time::SystemTime;

use pagoda::GenerateResponse;
use pagoda::engine::FinishReason;
use serde::Serialize;

use crate::models::Served;
use crate::unique::unique;

/// What every object of an answer begins with.
#[derive(Clone, Serialize)]
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    /// The version of the model: answers of one seed are the same as long as it is.
    system_fingerprint: String,
}

impl Head {
    /// Of an answer of this model. `prefix` begins its id.
    pub fn new(prefix: &str, object: &'static str, served: &Served) -> Self {
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut system_fingerprint = served.version();
        system_fingerprint.truncate(16);
        Self { id: format!("{prefix}-{}", unique()), object, created, model: served.name.clone(), system_fingerprint }
    }
}

/// The number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokens,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct PromptTokens {
    cached_tokens: usize,
}

impl Usage {
    /// Adds those of a prompt and its answers.
    pub fn add(&mut self, response: &GenerateResponse) {
        self.prompt_tokens += response.prompt_tokens.len();
        self.completion_tokens += response.choices.iter().map(|choice| choice.tokens.len()).sum::<usize>();
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
        self.prompt_tokens_details.cached_tokens += response.cached_tokens as usize;
    }
}

/// OpenAI has two words for an answer of text: it ended by itself, or it was cut, by its length, its time limit or the end of the
/// server.
pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length | FinishReason::Cancelled | FinishReason::Timeout => "length",
    }
}
