//! Writes the graph of pages: rows of all sequences are the tokens of one batch of one, and only PagedAttention knows sequences.

use std::collections::HashMap;

use super::Names;
use super::attention::{Attention, Layout, Rows, Sinks};
use super::emit::Emit;
use super::graph::Graph;
use super::head::Head;
use super::proto::{AttributeProto, Dimension, NodeProto, TensorProto, ValueInfoProto};
use super::rest::Counted;
use crate::tensor::ElementType;

/// The names of a graph of pages.
#[derive(Debug)]
pub(super) struct PagedNames {
    /// As in pagoda.json: by role.
    pub(super) inputs: [String; INPUTS.len()],
    pub(super) logits: String,
    pub(super) pools: Vec<String>,
    pub(super) pools_out: Vec<String>,
}

/// The indices of a graph of pages, i32, with their shapes.
pub(super) const INPUTS: [(&str, &str); 7] = [
    ("input_ids", "tokens"),
    ("positions", "tokens"),
    ("row_offsets", "sequences_and_1"),
    ("cached_len", "sequences"),
    ("page_indptr", "sequences_and_1"),
    ("page_ids", "pages_of_sequences"),
    ("logits_rows", "logits_rows"),
];
const INPUT_IDS: usize = 0;
const POSITIONS: usize = 1;
const LOGITS_ROWS: usize = 6;

/// What a graph was recognised as.
pub(super) struct Recognised<'a> {
    pub(super) attentions: &'a [Attention],
    pub(super) counted: &'a [Counted],
    pub(super) head: &'a Head,
    /// Logits of a row.
    pub(super) vocab_size: usize,
}

/// Rewrites the graph.
pub(super) fn rewrite(graph: &mut Graph, names: &Names<'_>, parts: &Recognised<'_>) -> Result<PagedNames, String> {
    let of_ids = graph.input(names.input_ids).map_or(ElementType::I64 as i32, ValueInfoProto::element);
    let of_positions = names.position_ids.and_then(|name| graph.input(name)).map(ValueInfoProto::element);
    let of_logits = graph.output(names.logits).map_or(0, ValueInfoProto::element);
    graph.set_inputs(Vec::new());
    graph.set_outputs(Vec::new());
    // Inputs and outputs have names that the old ones have.
    let old = |graph: &Graph, name: &str| graph.free_name(&format!("{name}.of_one_batch"));
    let (old_ids, old_logits) = (old(graph, names.input_ids), old(graph, names.logits));
    let old_positions = names.position_ids.map(|name| (name, old(graph, name)));
    let mut renamed = HashMap::from([(names.input_ids, old_ids.as_str()), (names.logits, old_logits.as_str())]);
    renamed.extend(old_positions.as_ref().map(|(name, old)| (*name, old.as_str())));
    graph.rename(&renamed);

    let inputs = INPUTS.map(|(name, _)| graph.free_name(name));
    let numbered = |name: &str| (0..parts.attentions.len()).map(|at| graph.free_name(&format!("{name}{at}"))).collect();
    let pools: Vec<String> = numbered("kv_pool_");
    let pools_out = pools.iter().map(|name| graph.free_name(&format!("{name}_out"))).collect();
    let made = PagedNames { inputs, logits: graph.free_name("logits"), pools, pools_out };
    declare(graph, names, parts, &made);

    graph.import("ai.pagoda", 1);
    let mut pages = Pages { names, paged: &made, emit: Emit::new(graph) };
    pages.index(INPUT_IDS, of_ids, &[1, -1], &old_ids);
    if let Some(((_, old), element)) = old_positions.as_ref().zip(of_positions) {
        pages.index(POSITIONS, element, &[1, -1], old);
    }
    for counted in parts.counted {
        pages.emit.replace(&counted.name);
        pages.index(POSITIONS, counted.element, &counted.dims, &counted.name);
    }
    for (layer, attention) in parts.attentions.iter().enumerate() {
        pages.emit.replace(&attention.output.name);
        pages.attention(layer, attention)?;
    }
    pages.logits(parts, &old_logits, of_logits);
    pages.emit.finish()?;
    Ok(made)
}

fn declare(graph: &mut Graph, names: &Names<'_>, parts: &Recognised<'_>, made: &PagedNames) {
    let index = |(name, (_, count)): (&String, &(_, &str))| {
        ValueInfoProto::new(name, ElementType::I32 as i32, &[Dimension::Named(count)])
    };
    let sizes = [names.page_size, names.kv_heads, names.head_size].map(Dimension::Number);
    let of_pool = [Dimension::Named("pages"), Dimension::Number(2), sizes[0], sizes[1], sizes[2]];
    let pool = |name: &String| ValueInfoProto::new(name, names.element as i32, &of_pool);
    let inputs = made.inputs.iter().zip(&INPUTS).map(index);
    graph.set_inputs(inputs.chain(made.pools.iter().map(pool)).collect());
    let of_logits = [Dimension::Named("logits_rows"), Dimension::Number(parts.vocab_size)];
    let logits = ValueInfoProto::new(&made.logits, ElementType::F32 as i32, &of_logits);
    graph.set_outputs([logits].into_iter().chain(made.pools_out.iter().map(pool)).collect());
}

/// Nodes over pages in the making.
struct Pages<'a> {
    names: &'a Names<'a>,
    paged: &'a PagedNames,
    emit: Emit<'a>,
}

impl Pages<'_> {
    /// An input in the type and shape that it had.
    fn index(&mut self, input: usize, element: i32, dims: &[i64], to: &str) {
        let cast = format!("{to}.cast");
        self.emit.cast(&self.paged.inputs[input], element, &cast);
        self.emit.reshape(&cast, dims, to);
    }

    fn attention(&mut self, layer: usize, attention: &Attention) -> Result<(), String> {
        let Attention { heads, output, rotary, sinks, .. } = attention;
        let (kv_heads, size) = (self.names.kv_heads, self.names.head_size);
        let made = format!("paged_attention_{layer}");
        let counts = [*heads, kv_heads, kv_heads];
        let projected = self.emit.apart(&attention.projected, counts.map(|count| count * size), &made)?;
        let mut inputs = Vec::new();
        for ((rows, count), part) in projected.iter().zip(counts).zip(["query", "key", "value"]) {
            inputs.push(self.heads_of_rows(rows, count, &format!("{made}.{part}")));
        }
        inputs.extend(self.paged.inputs[POSITIONS + 1..LOGITS_ROWS].iter().cloned());
        inputs.push(self.paged.pools[layer].clone());
        if let Some(rotary) = rotary {
            let (cos, sin) = (self.emit.in_f32(&rotary.cos), self.emit.in_f32(&rotary.sin));
            inputs.extend([String::new(), self.paged.inputs[POSITIONS].clone(), cos, sin]);
        }
        if let Some(sinks) = sinks {
            inputs.resize(12, String::new());
            inputs.push(match sinks {
                Sinks::Given(name) => name.clone(),
                Sinks::Zero => self.zeros(*heads),
            });
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let mut node = NodeProto::new("PagedAttention", &inputs, &[&made, &self.paged.pools_out[layer]]);
        node.domain = "ai.pagoda".into();
        let floats = [("scale", attention.scale), ("softcap", attention.softcap)];
        node.attribute
            .extend(floats.iter().filter(|it| it.1 != 0.0).map(|&(name, value)| AttributeProto::float(name, value)));
        node.attribute.extend((attention.window > 0).then(|| AttributeProto::int("window", attention.window as i64)));
        let word = |interleaved| if interleaved { "interleaved" } else { "half" };
        node.attribute.extend(rotary.as_ref().map(|rotary| AttributeProto::text("rotary", word(rotary.interleaved))));
        self.emit.node(node);
        match output.layout {
            Layout::Flat => self.emit.reshape(&made, &[1, -1, (heads * size) as i64], &output.name),
            Layout::Heads => {
                let by_token = format!("{made}.by_token");
                self.emit.reshape(&made, &[1, -1, *heads as i64, size as i64], &by_token);
                self.emit.swap(&by_token, &output.name);
            }
        }
        Ok(())
    }

    /// `[tokens, heads, head_size]`.
    fn heads_of_rows(&mut self, rows: &Rows, heads: usize, to: &str) -> String {
        let mut from = rows.name.clone();
        if rows.layout == Layout::Heads {
            let by_token = format!("{to}.by_token");
            self.emit.swap(&from, &by_token);
            from = by_token;
        }
        self.emit.reshape(&from, &[-1, heads as i64, self.names.head_size as i64], to);
        to.to_owned()
    }

    /// Zeros of the type of queries.
    fn zeros(&mut self, count: usize) -> String {
        let name = format!("pagoda.zeros_{count}");
        if self.emit.graph.tensor(&name).is_none() {
            let bytes = vec![0; count * self.names.element.bits() / 8];
            self.emit.graph.add_tensor(TensorProto {
                name: name.clone(),
                dims: vec![count as i64],
                data_type: self.names.element as i32,
                raw_data: Some(bytes.into()),
                ..TensorProto::default()
            });
        }
        name
    }

    /// Chooses rows, and gives their logits in f32.
    fn logits(&mut self, parts: &Recognised<'_>, old: &str, element: i32) {
        let rows = if parts.head.product.is_none() { old } else { &parts.head.rows };
        let chosen = format!("{rows}.asked");
        let axis = AttributeProto::int("axis", parts.head.axis as i64);
        let gather = NodeProto::new("Gather", &[rows, &self.paged.inputs[LOGITS_ROWS]], &[&chosen]).with(axis);
        let mut from = old.to_owned();
        if let Some(product) = &parts.head.product {
            let product = if product == self.names.logits { old } else { product };
            let node = self.emit.graph.nodes.iter_mut().find(|node| node.made(0) == Some(product));
            if let Some(input) = node.and_then(|node| node.input.first_mut()) {
                *input = chosen;
            }
        } else {
            from = chosen;
        }
        self.emit.node(gather);
        if element != ElementType::F32 as i32 {
            let name = format!("{old}.f32");
            self.emit.cast(&from, ElementType::F32 as i32, &name);
            from = name;
        }
        self.emit.reshape(&from, &[-1, parts.vocab_size as i64], &self.paged.logits);
    }
}
