//! The sizes of a decoder: those that its graph declares, and those that its configurations say. They must not contradict.

use super::document::{Document, Found, wrong};
use super::names::Declared;
use crate::error::{Error, Result, Status};
use crate::folder::generate::read::MOST;

/// The configurations of a decoder.
pub(super) struct Configs {
    /// config.json.
    pub(super) model: Option<Document>,
    /// genai_config.json.
    pub(super) genai: Option<Document>,
}

/// What a model is made of.
pub(super) struct Sizes {
    pub(super) architecture: String,
    pub(super) vocab_size: u32,
    pub(super) hidden_size: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_size: u32,
    pub(super) windows: Vec<u32>,
    pub(super) max_context: u32,
}

/// A number, and what says it.
struct Claim {
    number: u32,
    by: String,
}

impl Configs {
    /// The value of the first of these keys in config.json.
    pub(super) fn model(&self, keys: &[&str]) -> Option<Found<'_>> {
        self.model.as_ref()?.any_of(keys)
    }

    /// The value at a path of genai_config.json.
    pub(super) fn genai(&self, path: &[&str]) -> Option<Found<'_>> {
        self.genai.as_ref()?.at(path)
    }

    fn claims(&self, keys: &[&str], path: &[&str]) -> Result<Vec<Claim>> {
        let both = [self.model(keys), self.genai(path)];
        let claim = |found: Found<'_>| Ok(Claim { number: found.whole(1..=MOST)?, by: found.place() });
        both.into_iter().flatten().map(claim).collect()
    }

    /// What error messages call the file that a missing number should be in.
    fn file(&self) -> &'static str {
        if self.model.is_some() { "config.json" } else { "genai_config.json" }
    }
}

/// The sizes of a decoder. `file` is its graph.
pub(super) fn sizes(configs: &Configs, declared: &Declared, file: &str) -> Result<Sizes> {
    let by_graph = |declared: &Option<(i64, String)>| -> Result<Option<Claim>> {
        let Some((number, name)) = declared else { return Ok(None) };
        let number = u32::try_from(*number).ok().filter(|number| (1..=MOST).contains(number)).ok_or_else(|| {
            wrong(file, format!("{name:?} has a dimension of {number}, which can not be: export the model again"))
        })?;
        Ok(Some(Claim { number, by: format!("{name:?} of {file}") }))
    };
    let decided = |what, graph: Option<Claim>, keys: &[&str], path: &[&str]| {
        let claims = configs.claims(keys, path)?;
        agreed(what, graph.into_iter().chain(claims).collect())
    };
    let needed = |what: &str, found: Option<u32>, key: &str| {
        found.ok_or_else(|| {
            let message = format!("`{key}` is missing, and nothing else says how many {what}: add it");
            wrong(configs.file(), message)
        })
    };
    let layers = Claim { number: declared.layers, by: format!("the past of {file}") };
    let layers_keys = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
    decided("layers", Some(layers), &layers_keys, &["model", "decoder", "num_hidden_layers"])?;

    let heads_keys = ["num_attention_heads", "n_head", "n_heads", "num_heads"];
    let heads = decided("query heads", None, &heads_keys, &["model", "decoder", "num_attention_heads"])?;
    let heads = needed("query heads there are", heads, heads_keys[0])?;
    let kv_path = ["model", "decoder", "num_key_value_heads"];
    let kv_heads = decided("heads of keys and values", by_graph(&declared.heads)?, &["num_key_value_heads"], &kv_path)?;
    let kv_heads = kv_heads.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let message =
            format!("the model has {heads} query heads, which is no multiple of its {kv_heads} of keys and values");
        return Err(wrong(configs.file(), message));
    }

    let hidden_keys = ["hidden_size", "n_embd", "d_model", "dim"];
    let hidden_size = decided("numbers a row", None, &hidden_keys, &["model", "decoder", "hidden_size"])?;
    let hidden_size = needed("numbers a row has", hidden_size, hidden_keys[0])?;
    let head_path = ["model", "decoder", "head_size"];
    let head_size = decided("numbers a head", by_graph(&declared.head_size)?, &["head_dim"], &head_path)?;
    let head_size = match head_size {
        Some(size) => size,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => needed("numbers a head has", None, "head_dim")?,
    };

    let vocab = decided("logits a row", by_graph(&declared.vocab_size)?, &["vocab_size"], &["model", "vocab_size"])?;
    let context_keys = ["max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"];
    // The shorter one: a builder may have made shorter tables of rotations.
    let context = configs.claims(&context_keys, &["model", "context_length"])?;
    let context = context.iter().map(|claim| claim.number).min();
    Ok(Sizes {
        architecture: architecture(configs)?,
        vocab_size: needed("logits a row has", vocab, "vocab_size")?,
        hidden_size,
        heads,
        kv_heads,
        head_size,
        windows: windows(configs, declared)?,
        max_context: needed("tokens a sequence may have", context, context_keys[0])?,
    })
}

/// The number that all claims have; `None` without any.
fn agreed(what: &str, claims: Vec<Claim>) -> Result<Option<u32>> {
    let Some((first, others)) = claims.split_first() else { return Ok(None) };
    match others.iter().find(|claim| claim.number != first.number) {
        None => Ok(Some(first.number)),
        Some(other) => {
            let message = format!("{what}: {} has {}, and {} {}", first.by, first.number, other.by, other.number);
            let message = format!("{message}: they do not belong together. Copy or export the whole model again");
            Err(Error::new(Status::Model, message))
        }
    }
}

fn architecture(configs: &Configs) -> Result<String> {
    let found = configs.model(&["model_type"]).or_else(|| configs.genai(&["model", "type"]));
    let found =
        found.ok_or_else(|| wrong(configs.file(), "`model_type` is missing: it says what the model is; add it"))?;
    match found.text()? {
        "" => Err(found.expected("a text that is not empty")),
        text => Ok(text.to_owned()),
    }
}

/// The window of each layer: what the attention nodes say, or else the configuration. It is for reports: the graph decides.
fn windows(configs: &Configs, declared: &Declared) -> Result<Vec<u32>> {
    if let Some(windows) = &declared.windows {
        return Ok(windows.clone());
    }
    let none = vec![0; declared.layers as usize];
    let is_off = configs.model(&["use_sliding_window"]).map(|found| found.flag()).transpose()? == Some(false);
    let Some(window) = configs.model(&["sliding_window"]).filter(|_| !is_off) else { return Ok(none) };
    let window = window.whole(0..=MOST)?;
    let Some(types) = configs.model(&["layer_types"]).and_then(|found| found.list()) else {
        return Ok(vec![window; none.len()]);
    };
    let of_layer = |kind: &Found<'_>| Ok(if kind.text()? == "sliding_attention" { window } else { 0 });
    let windows: Vec<u32> = types.iter().map(of_layer).collect::<Result<_>>()?;
    if windows.len() != none.len() {
        let (found, layers) = (windows.len(), none.len());
        return Err(wrong("config.json", format!("`layer_types` has {found} entries for {layers} layers")));
    }
    Ok(windows)
}
