//! The report on a folder of the kind `generate`.

mod text;

use std::collections::BTreeMap;

use pagoda::folder::GenerateFolder;
use pagoda::folder::generate::Form;
use serde::Serialize;

use super::File;
use super::by_format::ByFormat;

/// The report on a folder.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    folder: String,
    kind: &'static str,
    /// How the graph takes keys and values: `paged`, `functional` or `past_present`.
    form: &'static str,
    /// The graph's kind, in words.
    taken_as: String,
    /// What is lost against the paged form.
    notes: Vec<String>,
    version: &'a str,
    /// Whether every file is as it was exported. Always true: otherwise there is no report.
    whole: bool,
    architecture: &'a str,
    /// The type of activations and of native weights.
    compute: &'static str,
    /// How the matrices are stored: `native`, `int8` or `int4`.
    weights: &'static str,
    vocab_size: u32,
    hidden_size: u32,
    attention: Attention<'a>,
    kv: Kv,
    limits: Limits,
    tokens: Tokens<'a>,
    generation: Generation,
    text: Text<'a>,
    inputs: Vec<&'a str>,
    outputs: Vec<&'a str>,
    files: Vec<File<'a>>,
    bytes_on_disk: u64,
    memory: Memory,
}

#[derive(Serialize)]
struct Attention<'a> {
    layers: u32,
    heads: u32,
    /// Of each layer; 0: none.
    windows: &'a [u32],
}

#[derive(Serialize)]
struct Kv {
    layers: u32,
    heads: u32,
    head_size: u32,
    page_size: u32,
    #[serde(rename = "type")]
    element: &'static str,
    format: &'static str,
    bytes_per_token: u64,
}

#[derive(Serialize)]
struct Limits {
    max_context: u32,
}

#[derive(Serialize)]
struct Tokens<'a> {
    bos: Option<u32>,
    eos: &'a [u32],
    pad: Option<u32>,
    unk: Option<u32>,
    add_bos: bool,
}

/// Only what the model sets.
#[derive(Serialize)]
struct Generation {
    #[serde(skip_serializing_if = "Option::is_none")]
    do_sample: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repetition_penalty: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_repeat_ngram_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_new_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_new_tokens: Option<u32>,
}

#[derive(Serialize)]
struct Text<'a> {
    tokenizer: &'a str,
    chat_template: Option<&'a str>,
    template_tokens: BTreeMap<&'a str, &'a str>,
}

/// Estimated bytes in service.
#[derive(Serialize)]
struct Memory {
    /// The graph and its weights, once.
    session_weights: u64,
    kv_per_token: u64,
    /// The same with another `kv_format`.
    kv_per_token_by_format: ByFormat,
    kv_per_1000_tokens: u64,
    /// Keys and values of a sequence of `max_context` tokens, in whole pages.
    kv_of_longest_sequence: u64,
}

impl<'a> Report<'a> {
    pub(super) fn new(folder: &'a GenerateFolder) -> Self {
        let GenerateFolder { attention, kv, tokens, generation, text, .. } = folder;
        let (graph_inputs, mut graph_outputs) = folder.graph_names();
        // Of the graph for the CPU alone.
        graph_outputs.retain(|name| Some(*name) != folder.outputs.logits_max.as_deref());
        Self {
            folder: folder.path().display().to_string(),
            kind: folder.kind.name(),
            form: folder.form.name(),
            taken_as: taken_as(folder),
            notes: notes(folder),
            version: &folder.version,
            whole: true,
            architecture: &folder.architecture,
            compute: folder.compute.name(),
            weights: folder.weights.name(),
            vocab_size: folder.vocab_size,
            hidden_size: folder.hidden_size,
            attention: Attention { layers: attention.layers, heads: attention.heads, windows: &attention.windows },
            kv: Kv {
                layers: kv.layers,
                heads: kv.heads,
                head_size: kv.head_size,
                page_size: kv.page_size,
                element: kv.element.name(),
                format: kv.format_name(),
                bytes_per_token: kv.bytes_per_token,
            },
            limits: Limits { max_context: folder.limits.max_context },
            tokens: Tokens {
                bos: tokens.bos,
                eos: &tokens.eos,
                pad: tokens.pad,
                unk: tokens.unk,
                add_bos: tokens.add_bos,
            },
            generation: Generation {
                do_sample: generation.do_sample,
                temperature: generation.temperature,
                top_k: generation.top_k,
                top_p: generation.top_p,
                min_p: generation.min_p,
                repetition_penalty: generation.repetition_penalty,
                no_repeat_ngram_size: generation.no_repeat_ngram_size,
                max_new_tokens: generation.max_new_tokens,
                min_new_tokens: generation.min_new_tokens,
            },
            text: Text {
                tokenizer: &text.tokenizer,
                chat_template: text.chat_template.as_deref(),
                template_tokens: text
                    .template_tokens
                    .iter()
                    .map(|(name, text)| (name.as_str(), text.as_str()))
                    .collect(),
            },
            inputs: graph_inputs,
            outputs: graph_outputs,
            files: File::all(folder),
            bytes_on_disk: folder.files.iter().map(|file| file.bytes).sum(),
            memory: Memory {
                session_weights: folder.model_bytes(),
                kv_per_token: kv.bytes_per_token,
                kv_per_token_by_format: ByFormat::new(|format| kv.bytes_per_token_in(format)),
                kv_per_1000_tokens: kv.bytes_per_token.saturating_mul(1000),
                kv_of_longest_sequence: folder.sequence_bytes(folder.limits.max_context.into()),
            },
        }
    }
}

/// How the graph is run, and what is lost.
fn notes(folder: &GenerateFolder) -> Vec<String> {
    let notes = folder.form.notes().into_iter().map(str::to_owned);
    #[cfg(feature = "llm")]
    if matches!(folder.form, Form::PastPresent(_)) {
        return match folder.is_rewritten() {
            Ok(()) => vec![
                "a generator rewrites the graph for pages when it opens it, and nothing is lost".into(),
                "`pagoda convert` writes the rewritten graph; PAGODA_REWRITTEN=0 has a generator run it as it is"
                    .into(),
            ],
            Err(error) => notes.chain(error.message().lines().map(str::to_owned)).collect(),
        };
    }
    notes.collect()
}

/// What kind of graph it is.
fn taken_as(folder: &GenerateFolder) -> String {
    match &folder.form {
        Form::PastPresent(names) => {
            let branches = if names.use_cache_branch.is_some() { ", with a branch for prompts" } else { "" };
            format!("{}, past and present tensors, {}{branches}", folder.model, names.attention.name())
        }
        Form::Functional(_) => format!("{}, which reads pages by Gather", folder.model),
        _ => format!("{}, with PagedAttention", folder.model),
    }
}
