//! Log probabilities, in the shapes of chats and of completions.

use pagoda::engine::TokenLogprobs;
use pagoda::text::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};

/// What OpenAI has for the logarithm of 0, which JSON can not have.
const NEVER: f32 = -9999.0;

/// The tokens of a chat's answer.
#[derive(Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: Likely,
    top_logprobs: Vec<Likely>,
}

#[derive(Serialize)]
struct Likely {
    token: String,
    logprob: f32,
    /// A token can end inside a character.
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Of tokens and what the model thought of each.
    pub fn new<'a>(tokens: impl Iterator<Item = (u32, &'a TokenLogprobs)>, tokenizer: &Tokenizer) -> Self {
        let likely = |id: u32, logprob: f32| {
            let token = text_of(id, tokenizer);
            let bytes = tokenizer.token_bytes(id).map_or_else(|| token.as_bytes().to_vec(), <[u8]>::to_vec);
            Likely { token, logprob: finite(logprob), bytes }
        };
        let content = tokens.map(|(id, found)| ChatToken {
            token: likely(id, found.logprob),
            top_logprobs: found.top.iter().map(|&(id, logprob)| likely(id, logprob)).collect(),
        });
        Self { content: content.collect(), refusal: None }
    }
}

/// The tokens of a completion. `text_offset` counts characters.
#[derive(Default, Serialize)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds a token at an offset, and returns the offset after it. The first token of a prompt has no probability.
    pub fn push(&mut self, id: u32, found: Option<&TokenLogprobs>, offset: usize, tokenizer: &Tokenizer) -> usize {
        let text = text_of(id, tokenizer);
        let after = offset + text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(found.map(|found| finite(found.logprob)));
        self.top_logprobs.push(found.map(|found| {
            let mut top = Map::new();
            for &(id, logprob) in &found.top {
                // Of two tokens with the same text the likelier one comes first.
                top.entry(text_of(id, tokenizer)).or_insert_with(|| finite(logprob).into());
            }
            top
        }));
        self.text_offset.push(offset);
        after
    }
}

fn text_of(id: u32, tokenizer: &Tokenizer) -> String {
    tokenizer.decode(&[id], false).unwrap_or_default()
}

fn finite(logprob: f32) -> f32 {
    logprob.max(NEVER)
}
