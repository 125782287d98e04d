//! What both kinds of streams keep: how much of each answer was sent, and the tokens of all.

use pagoda::GenerateResponse;
use pagoda::engine::{FinishReason, Token};

use super::answer::Usage;

/// The answers of a stream, prompt by prompt, `n` to each.
pub struct Sent {
    n: usize,
    /// Bytes of each answer's text that were sent, and whether its end was.
    answers: Vec<(usize, bool)>,
    /// The tokens of the prompts that have ended.
    pub usage: Usage,
}

/// The rest of an answer.
pub struct Rest<'a> {
    /// Which answer.
    pub index: usize,
    /// The text that was not sent.
    pub text: &'a str,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

impl Sent {
    /// For so many prompts. `echoed` has the bytes of text that begin the answers of each, and were sent.
    pub fn new(n: usize, echoed: &[usize]) -> Self {
        let answers = echoed.iter().flat_map(|&echoed| std::iter::repeat_n((echoed, false), n)).collect();
        Self { n, answers, usage: Usage::default() }
    }

    /// Counts a token that is sent. Returns which answer it belongs to.
    pub fn token(&mut self, prompt: usize, token: &Token) -> usize {
        let index = prompt * self.n + token.choice as usize;
        let (sent, ended) = &mut self.answers[index];
        *sent += token.text.len();
        *ended |= token.finish_reason.is_some();
        index
    }

    /// The answers of a prompt whose end was not sent: those that were cancelled or timed out end without a token.
    pub fn rest<'a>(&mut self, prompt: usize, response: &'a GenerateResponse) -> Vec<Rest<'a>> {
        self.usage.add(response);
        let mut rest = Vec::new();
        for (choice, answer) in response.choices.iter().enumerate() {
            let index = prompt * self.n + choice;
            let (sent, ended) = &mut self.answers[index];
            if !std::mem::replace(ended, true) {
                let text = answer.text.get(*sent..).unwrap_or_default();
                rest.push(Rest { index, text, finish_reason: answer.finish_reason });
            }
        }
        rest
    }
}
