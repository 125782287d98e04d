//! Writes the graph of pages: rows of all sequences are the tokens of one batch of one, and only PagedAttention knows sequences.

use std::collections::HashMap;

use super::attention::{Attention, Layout, Projected, Rows, Sinks};
use super::graph::Graph;
use super::head::Head;
use super::proto::{AttributeProto, Dimension, NodeProto, TensorProto, ValueInfoProto};
use super::rest::Counted;
use super::Names;
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

    let mut emit = Emit { names, paged: &made, graph, nodes: Vec::new() };
    emit.cast(&made.inputs[INPUT_IDS], of_ids, &[1, -1], &old_ids);
    if let Some(((_, old), element)) = old_positions.as_ref().zip(of_positions) {
        emit.cast(&made.inputs[POSITIONS], element, &[1, -1], old);
    }
    for counted in parts.counted {
        emit.replace(&counted.name);
        emit.cast(&made.inputs[POSITIONS], counted.element, &counted.dims, &counted.name);
    }
    for (layer, attention) in parts.attentions.iter().enumerate() {
        emit.replace(&attention.output.name);
        emit.attention(layer, attention)?;
    }
    emit.logits(parts, &old_logits, of_logits);
    let nodes = [emit.nodes, std::mem::take(&mut graph.nodes)].concat();
    graph.import("ai.pagoda", 1);
    graph.set_nodes(nodes)?;
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

/// Nodes in the making.
struct Emit<'a> {
    names: &'a Names<'a>,
    paged: &'a PagedNames,
    graph: &'a mut Graph,
    nodes: Vec<NodeProto>,
}

impl Emit<'_> {
    /// A list of numbers that nodes read.
    fn ints(&mut self, numbers: &[i64]) -> String {
        let name = format!("pagoda.{}", numbers.iter().map(i64::to_string).collect::<Vec<_>>().join("x"));
        if self.graph.tensor(&name).is_none() {
            self.graph.add_tensor(TensorProto::of_ints(&name, numbers));
        }
        name
    }

    fn reshape(&mut self, from: &str, dims: &[i64], to: &str) {
        let shape = self.ints(dims);
        self.nodes.push(NodeProto::new("Reshape", &[from, &shape], &[to]));
    }

    /// Numbers of another type and shape.
    fn cast(&mut self, from: &str, element: i32, dims: &[i64], to: &str) {
        let cast = format!("{to}.cast");
        self.nodes.push(NodeProto::new("Cast", &[from], &[&cast]).with(AttributeProto::int("to", element.into())));
        self.reshape(&cast, dims, to);
    }

    fn swap(&mut self, from: &str, to: &str) {
        let order = AttributeProto::ints("perm", &[0, 2, 1, 3]);
        self.nodes.push(NodeProto::new("Transpose", &[from], &[to]).with(order));
    }

    /// Leaves a value to a new node: its own makes one that nothing reads.
    fn replace(&mut self, name: &str) {
        for output in self.graph.nodes.iter_mut().flat_map(|node| &mut node.output).filter(|output| *output == name) {
            output.push_str(".replaced");
        }
    }

    fn attention(&mut self, layer: usize, attention: &Attention) -> Result<(), String> {
        let Attention { heads, output, rotary, sinks, .. } = attention;
        let (kv_heads, size) = (self.names.kv_heads, self.names.head_size);
        let made = format!("paged_attention_{layer}");
        let projected = match &attention.projected {
            Projected::Apart(rows) => rows.clone(),
            Projected::Packed(name) => self.split(layer, name, [*heads, kv_heads, kv_heads].map(|count| count * size))?,
        };
        let counts = [*heads, kv_heads, kv_heads];
        let mut inputs = Vec::new();
        for ((rows, count), part) in projected.iter().zip(counts).zip(["query", "key", "value"]) {
            inputs.push(self.heads_of_rows(rows, count, &format!("{made}.{part}")));
        }
        inputs.extend(self.paged.inputs[POSITIONS + 1..LOGITS_ROWS].iter().cloned());
        inputs.push(self.paged.pools[layer].clone());
        if let Some(rotary) = rotary {
            let (cos, sin) = (self.in_f32(&rotary.cos), self.in_f32(&rotary.sin));
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
        node.attribute.extend(floats.iter().filter(|it| it.1 != 0.0).map(|&(name, value)| AttributeProto::float(name, value)));
        node.attribute.extend((attention.window > 0).then(|| AttributeProto::int("window", attention.window as i64)));
        let word = |interleaved| if interleaved { "interleaved" } else { "half" };
        node.attribute.extend(rotary.as_ref().map(|rotary| AttributeProto::text("rotary", word(rotary.interleaved))));
        self.nodes.push(node);
        match output.layout {
            Layout::Flat => self.reshape(&made, &[1, -1, (heads * size) as i64], &output.name),
            Layout::Heads => {
                let by_token = format!("{made}.by_token");
                self.reshape(&made, &[1, -1, *heads as i64, size as i64], &by_token);
                self.swap(&by_token, &output.name);
            }
        }
        Ok(())
    }

    /// `[tokens, heads, head_size]`.
    fn heads_of_rows(&mut self, rows: &Rows, heads: usize, to: &str) -> String {
        let mut from = rows.name.clone();
        if rows.layout == Layout::Heads {
            let by_token = format!("{to}.by_token");
            self.swap(&from, &by_token);
            from = by_token;
        }
        self.reshape(&from, &[-1, heads as i64, self.names.head_size as i64], to);
        to.to_owned()
    }

    /// Queries, keys and values out of one row.
    fn split(&mut self, layer: usize, packed: &str, widths: [usize; 3]) -> Result<[Rows; 3], String> {
        if self.graph.opset() < 13 {
            return Err(format!("the graph has opset {}, and 13 or more is needed: export it again", self.graph.opset()));
        }
        let lengths = self.ints(&widths.map(|width| width as i64));
        let parts = ["query", "key", "value"].map(|part| format!("paged_attention_{layer}.packed_{part}"));
        let outputs: Vec<&str> = parts.iter().map(String::as_str).collect();
        let node = NodeProto::new("Split", &[packed, &lengths], &outputs).with(AttributeProto::int("axis", -1));
        self.nodes.push(node);
        Ok(parts.map(|name| Rows { name, layout: Layout::Flat }))
    }

    /// A table of a rotation, in the type that the operator takes.
    fn in_f32(&mut self, table: &str) -> String {
        let is_f32 = |tensor: &TensorProto| tensor.data_type == ElementType::F32 as i32;
        if self.graph.tensor(table).is_some_and(is_f32) {
            return table.to_owned();
        }
        let name = format!("{table}.f32");
        if self.nodes.iter().all(|node| node.made(0) != Some(&name)) {
            let to = AttributeProto::int("to", ElementType::F32 as i64);
            self.nodes.push(NodeProto::new("Cast", &[table], &[&name]).with(to));
        }
        name
    }

    /// Zeros of the type of queries.
    fn zeros(&mut self, count: usize) -> String {
        let name = format!("pagoda.zeros_{count}");
        if self.graph.tensor(&name).is_none() {
            let bytes = vec![0; count * self.names.element.bits() / 8];
            self.graph.add_tensor(TensorProto {
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
            let node = self.graph.nodes.iter_mut().find(|node| node.made(0) == Some(product));
            if let Some(input) = node.and_then(|node| node.input.first_mut()) {
                *input = chosen;
            }
        } else {
            from = chosen;
        }
        self.nodes.push(gather);
        if element != ElementType::F32 as i32 {
            let name = format!("{old}.f32");
            let to = AttributeProto::int("to", ElementType::F32 as i64);
            self.nodes.push(NodeProto::new("Cast", &[&from], &[&name]).with(to));
            from = name;
        }
        self.reshape(&from, &[-1, parts.vocab_size as i64], &self.paged.logits);
    }
}
