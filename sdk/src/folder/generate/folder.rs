//! What a folder of the kind `generate` says of its model.

use std::ops::Deref;

use pagoda_kernels::KvFormat;

use super::super::contents::{FolderContents, FolderFile};
use super::super::kv_format::{FORMATS, TokenShape, word};
use super::form::Form;
use super::read;
use crate::tensor::ElementType;

/// A model folder of the kind `generate`, read and checked: the fields are what its pagoda.json says, or, of a decoder that another
/// exporter wrote, its graph and its configurations. Those of [`FolderContents`] are its own too.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateFolder {
    pub(in super::super) contents: FolderContents,
    /// How the graph takes keys and values.
    pub form: Form,
    /// What the model was trained as: the `model_type` of its config.json, such as `llama`.
    pub architecture: String,
    /// The type of activations and of native weights.
    pub compute: ElementType,
    /// How the matrices are stored.
    pub weights: WeightFormat,
    /// How many logits a row has. Token ids are below it.
    pub vocab_size: u32,
    /// How many numbers a row has between layers.
    pub hidden_size: u32,
    /// The attention of each layer.
    pub attention: Attention,
    /// Keys and values.
    pub kv: KvLayout,
    /// How much one sequence may have.
    pub limits: Limits,
    /// Tokens with a meaning.
    pub tokens: SpecialTokens,
    /// The defaults of requests.
    pub generation: Generation,
    /// From text to tokens.
    pub text: TextFiles,
    /// The inputs of a graph in the paged form, by role; empty for other forms, which have their names with them.
    pub inputs: Inputs,
    /// The outputs of a graph in the paged form, by role; empty for other forms.
    pub outputs: Outputs,
    /// Present if the model drafts for another one, and reads the keys and values of it.
    pub main: Option<MainModel>,
}

/// How the matrices of a model are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Numbers of the type that the model computes in.
    Native,
    /// 8 bits, in blocks of 32.
    Int8,
    /// 4 bits, in blocks of 32; embedding and head have 8.
    Int4,
}

/// The attention of each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Layers.
    pub layers: u32,
    /// Query heads of each.
    pub heads: u32,
    /// For each layer the tokens that a row sees, itself included; 0: all.
    pub windows: Vec<u32>,
}

/// The shape of keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers that have them.
    pub layers: u32,
    /// Heads of a layer.
    pub heads: u32,
    /// The size of a head.
    pub head_size: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// The type in which the model computes them, and in which [`KvFormat::Native`] pages hold them.
    pub element: ElementType,
    /// How pages hold them.
    pub format: KvFormat,
    /// Bytes of one token in all layers, with its scales.
    pub bytes_per_token: u64,
}

/// How much one sequence may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a prompt and of what is generated after it.
    pub max_context: u32,
}

/// Tokens with a meaning; `None` where the model has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a sequence.
    pub bos: Option<u32>,
    /// Each of these ends a sequence, or a turn of a chat.
    pub eos: Vec<u32>,
    /// Fills up batches; Pagoda's rows are jagged and need none.
    pub pad: Option<u32>,
    /// Stands for what the tokenizer does not know.
    pub unk: Option<u32>,
    /// Whether the tokenizer puts `bos` before a text.
    pub add_bos: bool,
}

/// The defaults of requests; `None` where the checkpoint says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Whether tokens are drawn; otherwise the likeliest is taken.
    pub do_sample: Option<bool>,
    /// What logits are divided by; 0: the likeliest token is taken.
    pub temperature: Option<f64>,
    /// How many of the likeliest tokens are drawn from; 0: all.
    pub top_k: Option<u32>,
    /// The probability that the tokens drawn from have together.
    pub top_p: Option<f64>,
    /// The least probability of a token that is drawn, as a part of the likeliest one's.
    pub min_p: Option<f64>,
    /// What makes tokens that were there before less likely; 1: nothing.
    pub repetition_penalty: Option<f64>,
    /// The length of token sequences of which none comes twice; 0: any may.
    pub no_repeat_ngram_size: Option<u32>,
    /// The most tokens to generate.
    pub max_new_tokens: Option<u32>,
    /// The tokens before which none of `eos` comes.
    pub min_new_tokens: Option<u32>,
}

/// The files that make tokens of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFiles {
    /// A tokenizer.json, as Hugging Face's tokenizers read it.
    pub tokenizer: String,
    /// The Jinja template that makes one text of the messages of a chat, or a JSON file that has it as `chat_template`:
    /// [`GenerateFolder::chat_template`] reads either.
    pub chat_template: Option<String>,
    /// The texts of special tokens, by the names that the template has for them, such as `bos_token`.
    pub template_tokens: Vec<(String, String)>,
}

/// The inputs of a graph, by role. Rows are jagged: one graph serves prefill, decode, and batches of both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// The token of each row.
    pub input_ids: String,
    /// The position of each row in its sequence; `None` for a model without rotation.
    pub positions: Option<String>,
    /// Where the rows of each sequence begin.
    pub row_offsets: String,
    /// How many tokens of each sequence are cached.
    pub cached_len: String,
    /// Where the pages of each sequence begin.
    pub page_indptr: String,
    /// Pages.
    pub page_ids: String,
    /// The rows whose logits are returned.
    pub logits_rows: String,
    /// The pool of each layer.
    pub kv_pools: Vec<String>,
    /// The scales of each layer's pool; none for [`KvFormat::Native`].
    pub kv_scales: Vec<String>,
}

/// What a model that drafts reads of the model that it drafts for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MainModel {
    /// The layers whose pools are read, from 0 on.
    pub layers: Vec<u32>,
    /// Heads of a layer's keys and values.
    pub heads: u32,
    /// The size of a head.
    pub head_size: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// The type of keys and values. Pages are [`KvFormat::Native`].
    pub element: ElementType,
    /// The input that has how many tokens of each sequence are cached.
    pub cached_len: String,
    /// The input that has where the pages of each sequence begin.
    pub page_indptr: String,
    /// The input that has the pages.
    pub page_ids: String,
    /// The input of each layer's pool.
    pub kv_pools: Vec<String>,
}

/// The outputs of a graph, by role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outputs {
    /// The logits, f32.
    pub logits: String,
    /// The largest of each 32 logits of a row, f32: an output of `cpu_model` alone; `None` if it has none.
    pub logits_max: Option<String>,
    /// The pool of each layer, with what is new.
    pub kv_pools: Vec<String>,
    /// The scales of each layer's pool, with what is new.
    pub kv_scales: Vec<String>,
}

impl GenerateFolder {
    /// The names of the graph's inputs, and of its outputs.
    pub fn graph_names(&self) -> (Vec<&str>, Vec<&str>) {
        let (inputs, outputs) = match self.form {
            Form::Paged => read::paged_names(self),
            _ => self.form.names(),
        };
        (inputs.into_iter().map(String::as_str).collect(), outputs.into_iter().map(String::as_str).collect())
    }

    /// Bytes of the keys and values of a sequence of so many tokens, in whole pages.
    pub fn sequence_bytes(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.kv.page_size.into()).saturating_mul(self.kv.bytes_per_token)
    }

    /// Bytes of the graph and its weights.
    pub fn model_bytes(&self) -> u64 {
        // A session has one of the graphs.
        let others = [self.cpu_model.as_ref(), Some(&self.text.tokenizer), self.text.chat_template.as_ref()];
        let is_other = |file: &FolderFile| others.contains(&Some(&file.name)) || file.name.ends_with(".json");
        self.files.iter().filter(|file| !is_other(file)).map(|file| file.bytes).sum()
    }
}

impl Deref for GenerateFolder {
    type Target = FolderContents;

    fn deref(&self) -> &FolderContents {
        &self.contents
    }
}

impl WeightFormat {
    /// Its word in pagoda.json, such as `int8`.
    pub fn name(self) -> &'static str {
        word(&read::WEIGHTS, self)
    }
}

impl KvLayout {
    /// The word of its format in pagoda.json, such as `int8`.
    pub fn format_name(&self) -> &'static str {
        word(&FORMATS, self.format)
    }

    /// Bytes of one token in all layers, with its scales, where pages are of another format than the model was exported with.
    /// `None` for int4 where heads have an odd size: it has two numbers in a byte.
    pub fn bytes_per_token_in(&self, format: KvFormat) -> Option<u64> {
        self.token_shape().bytes_if_possible(format)
    }

    pub(in super::super) fn token_shape(&self) -> TokenShape {
        let &Self { layers, heads, head_size, element, .. } = self;
        TokenShape { layers, heads, head_size, element }
    }
}
