//! Decoders of other exporters, rewritten: their attention over past tensors becomes PagedAttention over pages.
//!
//! All operators but attention work on each token alone. So the graph stays as it is, as one that has a batch of one, whose tokens
//! are those of all sequences; attention alone knows where a sequence begins, and appends to its pages. What is known of a graph is
//! found by trials ([`trial`]): runs by hand in which shapes, masks and positions are computed, and weights are not.

mod attention;
mod graph;
mod head;
mod operators;
mod paged;
mod proto;
mod rest;
mod trial;
mod value;

use prost::bytes::Bytes;

use graph::Graph;
use paged::{PagedNames, Recognised};
use rest::Rest;

use crate::tensor::ElementType;

/// The names of a graph with past and present tensors, and the sizes of those.
pub(crate) struct Names<'a> {
    pub(crate) input_ids: &'a str,
    pub(crate) attention_mask: &'a str,
    pub(crate) position_ids: Option<&'a str>,
    pub(crate) use_cache_branch: Option<&'a str>,
    pub(crate) past_keys: &'a [String],
    pub(crate) past_values: &'a [String],
    pub(crate) logits: &'a str,
    pub(crate) present_keys: &'a [String],
    pub(crate) present_values: &'a [String],
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
    /// The type of keys and values.
    pub(crate) element: ElementType,
    /// Tokens of a page.
    pub(crate) page_size: usize,
}

/// A graph of pages, and what it says of the model.
pub(crate) struct Converted {
    /// The model. Weights that lie outside of it stay where they are.
    pub(crate) bytes: Vec<u8>,
    pub(crate) names: PagedNames,
    /// Query heads, which all layers have as many of.
    pub(crate) heads: usize,
    /// For each layer the tokens that a row sees; 0: all.
    pub(crate) windows: Vec<usize>,
    /// Logits of a row.
    pub(crate) vocab_size: usize,
    /// Numbers of a row in front of the last product; `None`: it was not found.
    pub(crate) hidden_size: Option<usize>,
    /// The files that weights lie in, as the graph names them.
    pub(crate) locations: Vec<String>,
}

/// Rewrites a model; or says what of it was not recognised, node by node.
pub(crate) fn to_paged(bytes: Bytes, names: &Names<'_>) -> Result<Converted, Vec<String>> {
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
    let hidden_size = head.product.as_ref().and_then(|_| width(&head.rows));
    let parts = Recognised { attentions: &attentions, counted: &rest.counted, head: &head, vocab_size };
    let made = paged::rewrite(&mut graph, names, &parts).map_err(one)?;
    let mut locations: Vec<String> = graph.tensors().iter().filter_map(location).collect();
    locations.sort();
    locations.dedup();
    Ok(Converted {
        bytes: graph.into_bytes(),
        names: made,
        heads,
        windows: attentions.iter().map(|attention| attention.window).collect(),
        vocab_size,
        hidden_size,
        locations,
    })
}

/// Checks that the graph has the inputs and outputs that it is to have.
fn check_names(graph: &Graph, names: &Names<'_>) -> Result<(), Vec<String>> {
    let mut wrong = Vec::new();
    let single = [names.input_ids, names.attention_mask].into_iter().chain(names.position_ids).chain(names.use_cache_branch);
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
        let file = ["model.onnx", "decoder_model_merged.onnx"].map(|file| folder.join(file)).into_iter().find(|it| it.exists());
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
            let made = to_paged(decoder(name), &names).unwrap_or_else(|wrong| panic!("{name}: {wrong:#?}"));
            assert_eq!((made.heads, &made.windows[..], made.vocab_size), (4, windows, 272), "{name}");
            assert_eq!(made.hidden_size, Some(32), "{name}");
            std::fs::create_dir_all("/tmp/made").unwrap();
            std::fs::write(format!("/tmp/made/{name}.onnx"), &made.bytes).unwrap();
        }
    }
}
