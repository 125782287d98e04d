//! The form of a decoder's graph: which input and which output is what, and whether they are as they have to be.

use super::super::generate::form::{PastAttention, PastPresent};
use super::Rings;
use super::document::Document;
use super::graph::{DecoderGraph, GraphValue};
use crate::error::{Error, Result, Status};
use crate::tensor::ElementType;

/// What stands for the number of a layer.
const LAYER: &str = "%d";
/// Most inputs or outputs that an error names.
const SHOWN: usize = 8;

/// A graph's form, and the sizes that it declares.
pub(super) struct Declared {
    pub(super) form: PastPresent,
    pub(super) element: ElementType,
    pub(super) layers: u32,
    /// Heads of keys and values, where the graph says a number, with the name of the input that does.
    pub(super) heads: Option<(i64, String)>,
    /// The same of the size of a head.
    pub(super) head_size: Option<(i64, String)>,
    /// The same of the logits of a row.
    pub(super) vocab_size: Option<(i64, String)>,
    /// The window of each layer, where attention nodes say it; 0: all.
    pub(super) windows: Option<Vec<u32>>,
}

/// The names that a graph may have; those of layers with [`LAYER`].
struct Names<'a> {
    input_ids: &'a str,
    attention_mask: &'a str,
    position_ids: &'a str,
    past: [&'a str; 2],
    logits: &'a str,
    present: [&'a str; 2],
}

/// Of optimum, transformers.js and onnxruntime-genai.
const USUAL: Names<'static> = Names {
    input_ids: "input_ids",
    attention_mask: "attention_mask",
    position_ids: "position_ids",
    past: ["past_key_values.%d.key", "past_key_values.%d.value"],
    logits: "logits",
    present: ["present.%d.key", "present.%d.value"],
};
const USE_CACHE_BRANCH: &str = "use_cache_branch";

impl<'a> Names<'a> {
    /// As genai_config.json says, where it does.
    fn of(genai: Option<&'a Document>) -> Result<Self> {
        let named = |side, key, usual| -> Result<&'a str> {
            let found = genai.and_then(|genai| genai.at(&["model", "decoder", side, key]));
            found.map_or(Ok(usual), |found| found.text())
        };
        let of_layers = |side, key, usual: &'static str| -> Result<&'a str> {
            let name = named(side, key, usual)?;
            if name.matches(LAYER).count() != 1 {
                let message = format!(
                    "`model.decoder.{side}.{key}`: expected a name with one {LAYER} for the layer, found {name:?}"
                );
                return Err(super::document::wrong("genai_config.json", message));
            }
            Ok(name)
        };
        Ok(Self {
            input_ids: named("inputs", "input_ids", USUAL.input_ids)?,
            attention_mask: named("inputs", "attention_mask", USUAL.attention_mask)?,
            position_ids: named("inputs", "position_ids", USUAL.position_ids)?,
            past: [
                of_layers("inputs", "past_key_names", USUAL.past[0])?,
                of_layers("inputs", "past_value_names", USUAL.past[1])?,
            ],
            logits: named("outputs", "logits", USUAL.logits)?,
            present: [
                of_layers("outputs", "present_key_names", USUAL.present[0])?,
                of_layers("outputs", "present_value_names", USUAL.present[1])?,
            ],
        })
    }
}

/// Finds the form of a graph. Error messages continue the name of its file.
pub(super) fn declared(graph: &DecoderGraph, genai: Option<&Document>, rings: Rings) -> Result<Declared> {
    let names = Names::of(genai)?;
    let layers = layers(graph, &names)?;
    let all = |pattern: &str| (0..layers).map(|layer| pattern.replace(LAYER, &layer.to_string())).collect::<Vec<_>>();
    let [past_keys, past_values] = names.past.map(all);
    let [present_keys, present_values] = names.present.map(all);
    let input = |name: &str| graph.inputs.iter().find(|value| value.name == name);
    let optional = |name: &str| input(name).map(|value| value.name.clone());
    let position_ids = optional(names.position_ids);
    let (past_names, present_names) = ([&past_keys[..], &past_values], [&present_keys[..], &present_values]);
    let attention = attention(graph, position_ids.is_some(), past_names, present_names, rings)?;
    let logits = output(graph, names.logits, "which has the scores of the next token")?;
    let form = PastPresent {
        input_ids: names.input_ids.to_owned(),
        attention_mask: names.attention_mask.to_owned(),
        position_ids,
        use_cache_branch: optional(USE_CACHE_BRANCH),
        past_keys,
        past_values,
        logits: names.logits.to_owned(),
        logits_element: one_of(logits, &[ElementType::F32, ElementType::F16])?,
        present_keys,
        present_values,
        attention,
    };
    rows(graph, &form)?;
    check_all_known(graph, &form)?;
    let past = past(graph, &form)?;
    let windows = (attention == PastAttention::GroupQuery).then(|| windows(graph, &form));
    let vocab_size = free(logits, 3, &[0, 1])?[2].map(|size| (size, logits.name.clone()));
    Ok(Declared {
        form,
        element: past.element,
        layers: layers as u32,
        heads: past.heads,
        head_size: past.head_size,
        vocab_size,
        windows,
    })
}

/// How many layers have a past.
fn layers(graph: &DecoderGraph, names: &Names<'_>) -> Result<usize> {
    let has = |layer: &usize| {
        let name = names.past[0].replace(LAYER, &layer.to_string());
        graph.inputs.iter().any(|input| input.name == name)
    };
    let layers = (0..).take_while(has).count();
    if layers == 0 {
        let first = names.past[0].replace(LAYER, "0");
        return Err(unsupported(format!(
            "it takes no {first:?}, so that it is no decoder with a past; it takes {}. Export the model with its past (with \
             optimum: `--task text-generation-with-past`), or name its inputs in genai_config.json",
            shown(&graph.inputs)
        )));
    }
    Ok(layers)
}

/// Whether all layers attend by the same operator, and which.
fn attention(
    graph: &DecoderGraph,
    has_positions: bool,
    [past_keys, past_values]: [&[String]; 2],
    [present_keys, present_values]: [&[String]; 2],
    rings: Rings,
) -> Result<PastAttention> {
    if graph.inner_attentions > 0 {
        let message =
            "it has GroupQueryAttention inside of a branch, which is not known here: export it without branches";
        return Err(unsupported(message.into()));
    }
    if graph.attentions.is_empty() {
        return Ok(if has_positions { PastAttention::Masked } else { PastAttention::ByColumn });
    }
    for layer in 0..past_keys.len() {
        let past = [past_keys[layer].as_str(), &past_values[layer]];
        let present = [present_keys[layer].as_str(), &present_values[layer]];
        let Some(node) = graph.attention_of(past, present) else {
            return Err(unsupported(format!(
                "its layer {layer} does not attend as others do: no GroupQueryAttention reads {:?} and makes {:?}. Export the \
                 model again with one kind of attention in all layers",
                past[0], present[0]
            )));
        };
        if node.is_ring && rings == Rings::Refused {
            return Err(unsupported(format!(
                "the past of layer {layer}, {:?}, is a ring (sliding_window_cache), in which the oldest tokens are overwritten: \
                 it can not be shared or cut. Rewrite the graph with `pagoda convert`, or build it again with `--extra_options \
                 windowed_kv_cache=false`",
                past[0]
            )));
        }
    }
    Ok(PastAttention::GroupQuery)
}

fn windows(graph: &DecoderGraph, form: &PastPresent) -> Vec<u32> {
    let of_layer = |layer: usize| {
        let past = [form.past_keys[layer].as_str(), &form.past_values[layer]];
        let present = [form.present_keys[layer].as_str(), &form.present_values[layer]];
        graph.attention_of(past, present).map_or(0, |node| node.window.try_into().unwrap_or(0))
    };
    (0..form.past_keys.len()).map(of_layer).collect()
}

/// Checks the inputs that have a number for each row.
fn rows(graph: &DecoderGraph, form: &PastPresent) -> Result<()> {
    for name in [&form.input_ids, &form.attention_mask].into_iter().chain(&form.position_ids) {
        let value = input(graph, name)?;
        one_of(value, &[ElementType::I64])?;
        free(value, 2, &[0, 1])?;
    }
    if let Some(name) = &form.use_cache_branch {
        one_of(input(graph, name)?, &[ElementType::Bool])?;
    }
    Ok(())
}

/// Refuses graphs with inputs that nothing is known to put into.
fn check_all_known(graph: &DecoderGraph, form: &PastPresent) -> Result<()> {
    let single = [&form.input_ids, &form.attention_mask].into_iter().chain(&form.position_ids);
    let known: Vec<&String> =
        single.chain(&form.use_cache_branch).chain(&form.past_keys).chain(&form.past_values).collect();
    match graph.inputs.iter().find(|input| !known.contains(&&input.name)) {
        None => Ok(()),
        Some(input) => Err(unsupported(format!(
            "it takes the input {:?}, which is not known here: export a decoder of text alone, with input_ids, attention_mask, \
             position_ids and past_key_values",
            input.name
        ))),
    }
}

/// What past and present tensors have in common.
struct Past {
    element: ElementType,
    heads: Option<(i64, String)>,
    head_size: Option<(i64, String)>,
}

fn past(graph: &DecoderGraph, form: &PastPresent) -> Result<Past> {
    let native = [ElementType::F32, ElementType::F16, ElementType::Bf16];
    let first = input(graph, &form.past_keys[0])?;
    let element = one_of(first, &native)?;
    let mut past = Past { element, heads: None, head_size: None };
    let inputs = form.past_keys.iter().chain(&form.past_values).map(|name| input(graph, name));
    let what = "which has the keys or values that the next call needs";
    let outputs = form.present_keys.iter().chain(&form.present_values).map(|name| output(graph, name, what));
    for value in inputs.chain(outputs) {
        let value = value?;
        let found = one_of(value, &native)?;
        if found != element {
            return Err(differs("has the type", value, found.name(), &first.name, element.name()));
        }
        let dims = free(value, 4, &[0, 2])?;
        for (number, known, what) in
            [(dims[1], &mut past.heads, "heads"), (dims[3], &mut past.head_size, "numbers a head")]
        {
            match (number, &known) {
                (Some(number), Some((before, name))) if number != *before => {
                    return Err(refused(format!(
                        "{:?} has {number} {what}, and {name:?} has {before}: only decoders whose layers are all alike are run",
                        value.name
                    )));
                }
                (Some(number), None) => *known = Some((number, value.name.clone())),
                _ => {}
            }
        }
    }
    Ok(past)
}

fn differs(what: &str, value: &GraphValue, found: &str, first: &str, before: &str) -> Error {
    let message = format!("{:?} {what} {found}, and {first:?} {before}", value.name);
    unsupported(format!("{message}: only decoders whose layers are all alike are run"))
}

fn input<'a>(graph: &'a DecoderGraph, name: &str) -> Result<&'a GraphValue> {
    graph.inputs.iter().find(|value| value.name == name).ok_or_else(|| {
        refused(format!("it has no input {name:?}; it takes {}. Export the model again", shown(&graph.inputs)))
    })
}

fn output<'a>(graph: &'a DecoderGraph, name: &str, what: &str) -> Result<&'a GraphValue> {
    graph.outputs.iter().find(|value| value.name == name).ok_or_else(|| {
        let has = shown(&graph.outputs);
        refused(format!("it has no output {name:?}, {what}; it has {has}. Export the model again"))
    })
}

/// The type of a value, which has to be one of these.
fn one_of(value: &GraphValue, types: &[ElementType]) -> Result<ElementType> {
    value.element.filter(|element| types.contains(element)).ok_or_else(|| {
        let expected = types.iter().map(|element| element.name()).collect::<Vec<_>>().join(" or ");
        let found = value.element.map_or("none that is known", ElementType::name);
        let again = "export the model again, or rewrite it with `pagoda convert`";
        unsupported(format!("{:?} has the type {found}, and here it has to be {expected}: {again}", value.name))
    })
}

/// The dimensions of a value, of which there have to be so many, those at `any` free.
fn free<'a>(value: &'a GraphValue, rank: usize, any: &[usize]) -> Result<&'a [Option<i64>]> {
    let name = &value.name;
    let again = "export the model again with shapes of this rank";
    let Some(dims) = &value.dims else {
        return Err(refused(format!("{name:?} does not declare how many dimensions it has, expected {rank}: {again}")));
    };
    if dims.len() != rank {
        return Err(unsupported(format!("{name:?} has {} dimensions, expected {rank}: {again}", dims.len())));
    }
    for &at in any {
        if let Some(size) = dims[at] {
            return Err(unsupported(format!(
                "dimension {at} of {name:?} is {size}, and has to be free, for batches and sequences of any size: export the \
                 model again with dynamic axes"
            )));
        }
    }
    Ok(dims)
}

/// The names of values, the first of them.
fn shown(values: &[GraphValue]) -> String {
    let names: Vec<_> = values.iter().take(SHOWN).map(|value| value.name.as_str()).collect();
    let more = values.len().saturating_sub(SHOWN);
    match (names.is_empty(), more) {
        (true, _) => "nothing".to_owned(),
        (false, 0) => names.join(", "),
        _ => format!("{} and {more} more", names.join(", ")),
    }
}

fn refused(message: String) -> Error {
    Error::new(Status::Model, message)
}

fn unsupported(message: String) -> Error {
    Error::new(Status::Unsupported, message)
}
