//! From a grammar to the state of an answer that has no tokens yet.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::Grammar;
use super::state::{GrammarState, Vocabulary};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;
use crate::text::Tokenizer;

/// The largest grammar.
const MOST_BYTES: usize = 1 << 20;
/// How many compiled grammars are kept: applications send the same few again and again.
const KEPT: usize = 16;
/// The states of the lexer of one answer, of 1 to 2 KB each.
const MOST_LEXER_STATES: usize = 50_000;

/// Compiles grammars for one vocabulary. A generator has its own; this is for callers that choose tokens themselves.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
    /// The latest first.
    kept: Mutex<Vec<(Grammar, Matcher)>>,
}

impl GrammarCompiler {
    /// For a model of `vocab_size` logits. `eos` are the tokens that end an answer.
    ///
    /// # Errors
    /// UNSUPPORTED if the model has no end-of-sequence token. MODEL if the vocabulary can not be used.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize, eos: &[u32]) -> Result<Self> {
        let Some(&first) = eos.first() else {
            let message = "the model has no end-of-sequence token, by which an answer with a grammar ends";
            return Err(Error::new(Status::Unsupported, message).about("grammar"));
        };
        // A special token is no text: the marker keeps it apart from text that reads the same.
        let word = |id: u32| match tokenizer.token_bytes(id) {
            _ if tokenizer.is_special(id) || eos.contains(&id) => special(tokenizer, id),
            Some(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => bytes.to_vec(),
            _ => Vec::new(),
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|error| {
            Error::new(Status::Model, format!("the vocabulary can not be used for grammars: {error}"))
        })?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MOST_LEXER_STATES;
        limits.verbose_errors = false;
        Ok(Self { factory, vocabulary: Arc::new(Vocabulary { eos: eos.to_vec(), words }), kept: Mutex::default() })
    }

    /// The state of an answer without tokens. `most_forced` is how many tokens may be taken without logits.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a grammar that can not be read, is too large, or that nothing satisfies.
    pub fn compile(&self, grammar: &Grammar, most_forced: usize) -> Result<Arc<GrammarState>> {
        let kept = self.kept.lock().iter().find(|(other, _)| other == grammar).map(|(_, matcher)| matcher.deep_clone());
        let matcher = match kept {
            Some(matcher) => matcher,
            None => {
                let matcher = self.matcher(grammar).map_err(|reason| refused(grammar, &reason))?;
                let mut kept = self.kept.lock();
                kept.insert(0, (grammar.clone(), matcher.deep_clone()));
                kept.truncate(KEPT);
                matcher
            }
        };
        Ok(Arc::new(GrammarState::new(matcher, Arc::clone(&self.vocabulary), most_forced)))
    }

    fn matcher(&self, grammar: &Grammar) -> Result<Matcher, String> {
        let parsed = parse(grammar)?;
        let mut matcher = Matcher::new(self.factory.create_parser(parsed));
        if let Some(error) = matcher.get_error() {
            return Err(error);
        }
        // What nothing satisfies is often found only here.
        let mask = matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        if mask.is_zero() {
            return Err("no text satisfies it".into());
        }
        Ok(matcher)
    }
}

/// A special token among the words of a trie.
fn special(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let name = tokenizer.token(id).unwrap_or_else(|| format!("<[{id}]>"));
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
}

/// Reads a grammar.
fn parse(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    let bytes = match grammar {
        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
        Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
    };
    if bytes > MOST_BYTES {
        return Err(format!("it has {bytes} bytes, and the most is {MOST_BYTES}"));
    }
    Ok(match grammar {
        Grammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
            TopLevelGrammar::from_json_schema(schema)
        }
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        Grammar::Choice(texts) if texts.iter().all(String::is_empty) => return Err("it has no text to choose".into()),
        Grammar::Choice(texts) => {
            // A string of JSON is one of Lark, too.
            let quoted: Vec<_> = texts.iter().map(|text| serde_json::Value::from(text.as_str()).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
        }
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

fn refused(grammar: &Grammar, reason: &str) -> Error {
    let reason = reason.trim_end_matches('.');
    Error::invalid(format!("grammar.{}", grammar.kind()), format!("{reason}; correct it, or make it smaller"))
}
