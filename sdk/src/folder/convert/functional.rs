//! Writes the graph of standard operators: it reads pages by Gather, and returns new rows, which the runtime puts into its pages.
//! `sdk/docs/model-folder.md` has its inputs and outputs.

use std::collections::HashMap;

use super::Names;
use super::attention::{Attention, Layout, Rows};
use super::emit::Emit;
use super::graph::Graph;
use super::paged::Recognised;
use super::proto::{AttributeProto, Dimension, NodeProto, TensorProto, ValueInfoProto};
use super::trial::Trial;
use crate::folder::generate::Functional;
use crate::tensor::ElementType;

/// The version of ONNX's operators that have Attention, RotaryEmbedding and RMSNormalization.
const OPSET: i64 = 23;
/// From this one on, the operators of graphs of other exporters are the same in [`OPSET`].
const LEAST_OPSET: i64 = 18;

/// Rewrites the graph. `trial` knows its shapes.
pub(super) fn rewrite(
    graph: &mut Graph,
    names: &Names<'_>,
    parts: &Recognised<'_>,
    trial: &Trial,
) -> Result<Functional, String> {
    if graph.opset() < LEAST_OPSET {
        let found = graph.opset();
        return Err(format!(
            "the graph has opset {found}, and the functional form needs {LEAST_OPSET} or more: export it again"
        ));
    }
    if let Some(counted) = parts.counted.iter().find(|counted| counted.dims.len() < 2 || counted.dims[0] != 1) {
        return Err(format!("{:?} has positions without a dimension for sequences", counted.name));
    }
    if parts.attentions.iter().any(|attention| attention.sinks.is_some()) {
        return Err("its attention has sinks, which ONNX's Attention has no input for".into());
    }
    let of_ids = graph.input(names.input_ids).map_or(ElementType::I64 as i32, ValueInfoProto::element);
    let of_positions = names.position_ids.and_then(|name| graph.input(name)).map(ValueInfoProto::element);
    graph.set_inputs(Vec::new());
    graph.set_outputs(Vec::new());
    let old = |graph: &Graph, name: &str| graph.free_name(&format!("{name}.of_graph"));
    let (old_ids, old_logits) = (old(graph, names.input_ids), old(graph, names.logits));
    let old_positions = names.position_ids.map(|name| (name, old(graph, name)));
    let mut renamed = HashMap::from([(names.input_ids, old_ids.as_str()), (names.logits, old_logits.as_str())]);
    renamed.extend(old_positions.as_ref().map(|(name, old)| (*name, old.as_str())));
    graph.rename(&renamed);
    let made = declare(graph, names, parts);

    graph.raise_opset(OPSET);
    let mut rows = Gathered { names, made: &made, emit: Emit::new(graph) };
    rows.emit.cast(&made.input_ids, of_ids, &old_ids);
    if let Some(((_, old), element)) = old_positions.as_ref().zip(of_positions) {
        rows.emit.cast(&made.position_ids, element, old);
    }
    for counted in parts.counted {
        rows.emit.replace(&counted.name);
        let cast = format!("{}.cast", counted.name);
        rows.emit.cast(&made.position_ids, counted.element, &cast);
        let dims: Vec<i64> = [0].into_iter().chain(counted.dims[1..].iter().copied()).collect();
        rows.emit.reshape(&cast, &dims, &counted.name);
    }
    for (layer, attention) in parts.attentions.iter().enumerate() {
        rows.emit.replace(&attention.output.name);
        rows.attention(layer, attention)?;
    }
    rows.emit.cast(&old_logits, ElementType::F32 as i32, &made.logits);
    standardise(&mut rows.emit, trial, names);
    rows.emit.finish()?;
    Ok(made)
}

fn declare(graph: &mut Graph, names: &Names<'_>, parts: &Recognised<'_>) -> Functional {
    let layers = || 0..parts.attentions.len();
    let all = |graph: &Graph, name: &str| layers().map(|layer| graph.free_name(&format!("{name}.{layer}"))).collect();
    let made = Functional {
        input_ids: graph.free_name("input_ids"),
        position_ids: graph.free_name("position_ids"),
        key_slots: graph.free_name("key_slots"),
        value_slots: graph.free_name("value_slots"),
        attention_mask: graph.free_name("attention_mask"),
        kv_pools: all(graph, "kv_pool"),
        logits: graph.free_name("logits"),
        new_keys: all(graph, "new_key"),
        new_values: all(graph, "new_value"),
    };
    let [batch, new, past, total] = ["batch", "new", "past", "past_and_new"].map(Dimension::Named);
    let heads = [names.kv_heads, names.head_size].map(Dimension::Number);
    let (whole, element) = (ElementType::I64 as i32, names.element as i32);
    let mut inputs = vec![
        ValueInfoProto::new(&made.input_ids, whole, &[batch, new]),
        ValueInfoProto::new(&made.position_ids, whole, &[batch, new]),
        ValueInfoProto::new(&made.key_slots, whole, &[batch, past]),
        ValueInfoProto::new(&made.value_slots, whole, &[batch, past]),
        ValueInfoProto::new(&made.attention_mask, ElementType::Bool as i32, &[batch, Dimension::Number(1), new, total]),
    ];
    let pool = |name: &String| ValueInfoProto::new(name, element, &[Dimension::Named("rows"), heads[0], heads[1]]);
    inputs.extend(made.kv_pools.iter().map(pool));
    let of_logits = [batch, new, Dimension::Number(parts.vocab_size)];
    let mut outputs = vec![ValueInfoProto::new(&made.logits, ElementType::F32 as i32, &of_logits)];
    let rows = |name: &String| ValueInfoProto::new(name, element, &[batch, new, heads[0], heads[1]]);
    outputs.extend(made.new_keys.iter().zip(&made.new_values).flat_map(|(key, value)| [rows(key), rows(value)]));
    graph.set_inputs(inputs);
    graph.set_outputs(outputs);
    made
}

/// Nodes that gather rows in the making.
struct Gathered<'a> {
    names: &'a Names<'a>,
    made: &'a Functional,
    emit: Emit<'a>,
}

impl Gathered<'_> {
    fn attention(&mut self, layer: usize, attention: &Attention) -> Result<(), String> {
        let (heads, kv_heads, size) = (attention.heads, self.names.kv_heads, self.names.head_size);
        let made = format!("attention_{layer}");
        let counts = [heads, kv_heads, kv_heads];
        let apart = self.emit.apart(&attention.projected, counts.map(|count| count * size), &made)?;
        let [mut query, mut key, value] = [0, 1, 2].map(|at| self.flat(&apart[at], &format!("{made}.flat_{at}")));
        if attention.rotary.is_some() {
            query = self.rotated(&query, attention, heads, &format!("{made}.query"));
            key = self.rotated(&key, attention, kv_heads, &format!("{made}.key"));
        }
        let slots = [self.made.key_slots.clone(), self.made.value_slots.clone()];
        let new = [self.made.new_keys[layer].clone(), self.made.new_values[layer].clone()];
        let mut inputs = vec![query];
        for ((rows, new), slots) in [key, value].iter().zip(&new).zip(&slots) {
            self.emit.reshape(rows, &[0, 0, kv_heads as i64, size as i64], new);
            let (past, joined, flat) = (format!("{new}.past"), format!("{new}.joined"), format!("{new}.flat"));
            let gather = NodeProto::new("Gather", &[&self.made.kv_pools[layer], slots], &[&past]);
            self.emit.node(gather.with(AttributeProto::int("axis", 0)));
            let concat = NodeProto::new("Concat", &[&past, new], &[&joined]);
            self.emit.node(concat.with(AttributeProto::int("axis", 1)));
            self.emit.reshape(&joined, &[0, 0, (kv_heads * size) as i64], &flat);
            inputs.push(flat);
        }
        inputs.push(self.mask(attention.window));
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let flat = match attention.output.layout {
            Layout::Flat => attention.output.name.clone(),
            Layout::Heads => format!("{made}.flat"),
        };
        let mut node = NodeProto::new("Attention", &inputs, &[&flat]);
        node.attribute.push(AttributeProto::int("q_num_heads", heads as i64));
        node.attribute.push(AttributeProto::int("kv_num_heads", kv_heads as i64));
        let floats = [("scale", attention.scale), ("softcap", attention.softcap)];
        node.attribute
            .extend(floats.iter().filter(|it| it.1 != 0.0).map(|&(name, value)| AttributeProto::float(name, value)));
        self.emit.node(node);
        if attention.output.layout == Layout::Heads {
            let by_token = format!("{made}.by_token");
            self.emit.reshape(&flat, &[0, 0, heads as i64, size as i64], &by_token);
            self.emit.swap(&by_token, &attention.output.name);
        }
        Ok(())
    }

    /// `[batch, new, heads * head_size]`.
    fn flat(&mut self, rows: &Rows, to: &str) -> String {
        if rows.layout == Layout::Flat {
            return rows.name.clone();
        }
        let by_token = format!("{to}.by_token");
        self.emit.swap(&rows.name, &by_token);
        self.emit.reshape(&by_token, &[0, 0, -1], to);
        to.to_owned()
    }

    /// In f32, whatever the rows are: so are the tables.
    fn rotated(&mut self, rows: &str, attention: &Attention, heads: usize, to: &str) -> String {
        let Some(rotary) = &attention.rotary else { return rows.to_owned() };
        let (cos, sin) = (self.emit.in_f32(&rotary.cos), self.emit.in_f32(&rotary.sin));
        let (exact, turned, rotated) = (format!("{to}.f32"), format!("{to}.turned"), format!("{to}.rotated"));
        self.emit.cast(rows, ElementType::F32 as i32, &exact);
        let mut node = NodeProto::new("RotaryEmbedding", &[&exact, &cos, &sin, &self.made.position_ids], &[&turned])
            .with(AttributeProto::int("num_heads", heads as i64))
            .with(AttributeProto::int("interleaved", rotary.interleaved.into()));
        if 2 * rotary.pairs != self.names.head_size {
            node = node.with(AttributeProto::int("rotary_embedding_dim", 2 * rotary.pairs as i64));
        }
        self.emit.node(node);
        self.emit.cast(&turned, self.names.element as i32, &rotated);
        rotated
    }

    /// What the runtime says that a row sees, less what is out of the window. Past keys are in order, from position 0.
    fn mask(&mut self, window: usize) -> String {
        let mask = self.made.attention_mask.clone();
        if window == 0 {
            return mask;
        }
        let (positions, slots) = (self.made.position_ids.clone(), self.made.key_slots.clone());
        let axes = [self.emit.ints(&[1]), self.emit.ints(&[1, 3]), self.emit.ints(&[1, 2])];
        let [zero, one, size] = [0, 1, window as i64].map(|number| self.scalar(number));
        let (near, seen) = (format!("pagoda.near_{window}"), format!("pagoda.seen_{window}"));
        let nodes: [(&str, &[&str], &str); 8] = [
            ("Shape", &[&slots], "pagoda.slots"),
            ("Gather", &["pagoda.slots", &one], "pagoda.past"),
            ("Range", &[&zero, "pagoda.past", &one], "pagoda.places"),
            ("Expand", &["pagoda.places", "pagoda.slots"], "pagoda.past_positions"),
            ("Unsqueeze", &[&positions, &axes[1]], "pagoda.row_positions"),
            ("Unsqueeze", &["pagoda.positions", &axes[2]], "pagoda.key_positions"),
            ("Sub", &["pagoda.row_positions", "pagoda.key_positions"], "pagoda.distance"),
            ("Less", &["pagoda.distance", &size], &near),
        ];
        for (op, inputs, output) in nodes {
            self.emit.node(NodeProto::new(op, inputs, &[output]));
        }
        let joined = NodeProto::new("Concat", &["pagoda.past_positions", &positions], &["pagoda.positions"]);
        self.emit.node(joined.with(AttributeProto::int("axis", 1)));
        self.emit.node(NodeProto::new("And", &[&mask, &near], &[&seen]));
        seen
    }

    fn scalar(&mut self, number: i64) -> String {
        let name = format!("pagoda.scalar_{number}");
        if self.emit.graph.tensor(&name).is_none() {
            self.emit.graph.add_tensor(TensorProto { dims: Vec::new(), ..TensorProto::of_ints(&name, &[number]) });
        }
        name
    }
}

/// Puts ONNX's own operators in place of ONNX Runtime's, where there are such.
fn standardise(emit: &mut Emit<'_>, trial: &Trial, names: &Names<'_>) {
    let nodes = std::mem::take(&mut emit.graph.nodes);
    for node in nodes {
        let standard = match node.op_type.as_str() {
            "SimplifiedLayerNormalization" => Some(norm(&node, node.given(0), node.given(1))),
            "SkipSimplifiedLayerNormalization" => skip_norm(emit, &node),
            "RotaryEmbedding" if node.domain == "com.microsoft" => rotary(&node, trial, names),
            _ => None,
        };
        emit.graph.nodes.push(standard.unwrap_or(node));
    }
}

fn norm(node: &NodeProto, rows: Option<&str>, weight: Option<&str>) -> NodeProto {
    let inputs = [rows.unwrap_or_default(), weight.unwrap_or_default()];
    NodeProto::new("RMSNormalization", &inputs, &[node.made(0).unwrap_or_default()])
        .with(AttributeProto::int("axis", node.int("axis", -1)))
        .with(AttributeProto::float("epsilon", node.float("epsilon", 1e-5)))
}

/// The sum is an output too. One with a bias stays as it is.
fn skip_norm(emit: &mut Emit<'_>, node: &NodeProto) -> Option<NodeProto> {
    let (rows, added, weight) = (node.given(0)?, node.given(1)?, node.given(2)?);
    if node.given(3).is_some() {
        return None;
    }
    let sum = node.made(3).map_or_else(|| format!("{}.sum", node.made(0).unwrap_or_default()), str::to_owned);
    emit.graph.nodes.push(NodeProto::new("Add", &[rows, added], &[&sum]));
    Some(norm(node, Some(&sum), Some(weight)))
}

fn rotary(node: &NodeProto, trial: &Trial, names: &Names<'_>) -> Option<NodeProto> {
    if node.int("is_packed_batching", 0) != 0 || node.float("scale", 1.0) != 1.0 {
        return None;
    }
    let (rows, positions, cos, sin) = (node.given(0)?, node.given(1)?, node.given(2)?, node.given(3)?);
    let made = NodeProto::new("RotaryEmbedding", &[rows, cos, sin, positions], &[node.made(0)?])
        .with(AttributeProto::int("interleaved", node.int("interleaved", 0)))
        .with(AttributeProto::int("rotary_embedding_dim", node.int("rotary_embedding_dim", 0)));
    match trial.dims(rows)? {
        [_, _, width] => Some(made.with(AttributeProto::int("num_heads", (width / names.head_size) as i64))),
        _ => Some(made),
    }
}
