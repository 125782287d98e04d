//! Decoders of other exporters, rewritten: their attention over past tensors becomes one over pages.
//!
//! All operators but attention work on each token alone. So the graph stays as it is, as one that has a batch of one, whose tokens
//! are those of all sequences; attention alone knows where a sequence begins, and appends to its pages. What is known of a graph is
//! found by trials ([`trial`]): runs by hand in which shapes, masks and positions are computed, and weights are not.
//!
//! [`graph`] is the graph; [`attention`] recognises the attention of each layer, [`rest`] checks what is left, and [`paged`] or
//! [`functional`] write the new one.

mod attention;
mod emit;
mod folder;
mod functional;
mod graph;
mod head;
mod operators;
mod paged;
mod proto;
mod rest;
mod trial;
mod value;

use prost::bytes::Bytes;

pub use folder::convert;
use graph::Graph;
use paged::{PagedNames, Recognised};
use rest::Rest;

use crate::folder::generate::Functional;
use crate::tensor::ElementType;

/// The names of a graph with past and present tensors, and the sizes of those.
struct Names<'a> {
    input_ids: &'a str,
    attention_mask: &'a str,
    position_ids: Option<&'a str>,
    use_cache_branch: Option<&'a str>,
    past_keys: &'a [String],
    past_values: &'a [String],
    logits: &'a str,
    present_keys: &'a [String],
    present_values: &'a [String],
    kv_heads: usize,
    head_size: usize,
    /// The type of keys and values.
    element: ElementType,
    /// Tokens of a page.
    page_size: usize,
}

/// What a graph is rewritten to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvertTo {
    /// PagedAttention over pages: what Pagoda runs fastest, with batches of any sequences, shared prefixes, policies, quantised pages.
    Paged,
    /// Standard operators that read pages by Gather and return new rows, for runtimes without Pagoda's operators.
    Functional,
}

/// The names of a rewritten graph.
enum Sides {
    Paged(PagedNames),
    Functional(Functional),
}

/// A rewritten graph, and what it says of the model.
struct Converted {
    /// The model. Weights that lie outside of it stay where they are.
    bytes: Vec<u8>,
    sides: Sides,
    /// Query heads, which all layers have as many of.
    heads: usize,
    /// For each layer the tokens that a row sees; 0: all.
    windows: Vec<usize>,
    /// Logits of a row.
    vocab_size: usize,
    /// The files that weights lie in, as the graph names them.
    locations: Vec<String>,
}

/// Rewrites a model; or says what of it was not recognised, node by node.
fn rewrite(bytes: Bytes, names: &Names<'_>, to: ConvertTo) -> Result<Converted, Vec<String>> {
    let one = |error: String| vec![error];
    let mut graph = Graph::read(bytes, names.use_cache_branch).map_err(one)?;
    check_names(&graph, names)?;
    let attentions = attention::recognise(&graph, names)?;
    let heads = attentions.first().map_or(0, |attention| attention.heads);
    if let Some((layer, other)) = attentions.iter().enumerate().find(|(_, other)| other.heads != heads) {
        return Err(one(format!("layer {layer} has {} query heads, and layer 0 has {heads}", other.heads)));
    }
    let rest = Rest::check(&graph, names, &attentions)?;
    let head = head::find(&graph, names, &rest.trial).map_err(one)?;
    let width = |name: &str| rest.trial.dims(name).and_then(<[usize]>::last).copied();
    let vocab_size = width(names.logits).ok_or_else(|| one(format!("{:?} has no known shape", names.logits)))?;
    let parts = Recognised { attentions: &attentions, counted: &rest.counted, head: &head, vocab_size };
    let sides = match to {
        ConvertTo::Paged => paged::rewrite(&mut graph, names, &parts).map(Sides::Paged),
        ConvertTo::Functional => functional::rewrite(&mut graph, names, &parts, &rest.trial).map(Sides::Functional),
    };
    let sides = sides.map_err(one)?;
    let constants = graph.nodes.iter().flat_map(|node| &node.attribute).filter_map(|attribute| attribute.t.as_ref());
    let mut locations: Vec<String> = graph.tensors().iter().chain(constants).filter_map(location).collect();
    locations.sort();
    locations.dedup();
    Ok(Converted {
        bytes: graph.into_bytes(),
        sides,
        heads,
        windows: attentions.iter().map(|attention| attention.window).collect(),
        vocab_size,
        locations,
    })
}

/// Checks that the graph has the inputs and outputs that it is to have.
fn check_names(graph: &Graph, names: &Names<'_>) -> Result<(), Vec<String>> {
    let mut wrong = Vec::new();
    let single =
        [names.input_ids, names.attention_mask].into_iter().chain(names.position_ids).chain(names.use_cache_branch);
    let pasts = || names.past_keys.iter().chain(names.past_values);
    for name in single.chain(pasts().map(String::as_str)).filter(|name| graph.input(name).is_none()) {
        wrong.push(format!("the graph has no input {name:?}"));
    }
    for past in pasts() {
        let (heads, size, element) = (names.kv_heads, names.head_size, names.element);
        let Some(input) = graph.input(past) else { continue };
        if input.element() != element as i32 {
            let found = ElementType::from_number(input.element()).map_or("no tensor", ElementType::name);
            wrong.push(format!("{past:?} has the type {found}, and others {}", element.name()));
        }
        let dims = input.dims().unwrap_or_default();
        let fits = |dim: Option<usize>, size: usize| dim.is_none_or(|dim| dim == size);
        if !matches!(dims[..], [_, found, _, width] if fits(found, heads) && fits(width, size)) {
            wrong.push(format!("{past:?} has the shape {dims:?}, and [batch, {heads}, past, {size}] is needed"));
        }
    }
    let presents = names.present_keys.iter().chain(names.present_values).map(String::as_str);
    for name in presents.chain([names.logits]).filter(|name| graph.output(name).is_none()) {
        wrong.push(format!("the graph has no output {name:?}"));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// The file that a weight lies in.
fn location(tensor: &proto::TensorProto) -> Option<String> {
    tensor.external_data.iter().find(|entry| entry.key == "location").map(|entry| entry.value.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(name: &str) -> Bytes {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoders").join(name);
        let file = ["model.onnx", "decoder_model_merged.onnx"]
            .map(|file| folder.join(file))
            .into_iter()
            .find(|it| it.exists());
        std::fs::read(file.unwrap()).unwrap().into()
    }

    struct Owned {
        past: [Vec<String>; 2],
        present: [Vec<String>; 2],
    }

    impl Owned {
        fn new(layers: usize) -> Self {
            let all = |kind: &str, part: &str| (0..layers).map(|layer| format!("{kind}.{layer}.{part}")).collect();
            Self {
                past: ["key", "value"].map(|part| all("past_key_values", part)),
                present: ["key", "value"].map(|part| all("present", part)),
            }
        }

        fn names(&self, positions: bool, kv_heads: usize) -> Names<'_> {
            Names {
                input_ids: "input_ids",
                attention_mask: "attention_mask",
                position_ids: positions.then_some("position_ids"),
                use_cache_branch: None,
                past_keys: &self.past[0],
                past_values: &self.past[1],
                logits: "logits",
                present_keys: &self.present[0],
                present_values: &self.present[1],
                kv_heads,
                head_size: 16,
                element: ElementType::F32,
                page_size: 32,
            }
        }
    }

    #[test]
    fn decoders_are_recognised() {
        let two = Owned::new(2);
        let one = Owned::new(1);
        let f16 = |names| Names { element: ElementType::F16, ..names };
        let merged = |names| Names { use_cache_branch: Some("use_cache_branch"), ..names };
        for (name, names, windows) in [
            ("llama-genai", two.names(false, 2), &[0, 0][..]),
            ("llama-genai-unpacked", two.names(false, 2), &[0, 0]),
            ("llama-genai-int4", two.names(false, 2), &[0, 0]),
            ("llama-genai-dml", f16(two.names(true, 2)), &[0, 0]),
            ("qwen2-genai", two.names(false, 2), &[0, 6]),
            ("qwen2-genai-ring", two.names(false, 2), &[0, 6]),
            ("llama-optimum", two.names(true, 2), &[0, 0]),
            ("qwen2-optimum", two.names(true, 2), &[0, 6]),
            ("gemma3-optimum", two.names(false, 1), &[6, 0]),
            ("llama-1-optimum-merged", merged(one.names(true, 2)), &[0]),
        ] {
            let made = rewrite(decoder(name), &names, ConvertTo::Paged);
            let made = made.unwrap_or_else(|wrong| panic!("{name}: {wrong:#?}"));
            assert_eq!((made.heads, &made.windows[..], made.vocab_size), (4, windows, 272), "{name}");
            let made = rewrite(decoder(name), &names, ConvertTo::Functional);
            let made = made.unwrap_or_else(|wrong| panic!("{name}: {wrong:#?}"));
            assert!(matches!(made.sides, Sides::Functional(_)), "{name}");
        }
    }
}
