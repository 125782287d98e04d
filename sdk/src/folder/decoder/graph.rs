//! What a decoder's graph declares: its inputs and outputs, the operators that attend, and the files with its weights.

use prost::Message;
use prost::bytes::Bytes;

use super::super::onnx::{DEFAULT, TensorProto};
use crate::tensor::ElementType;

/// A graph, as far as the forms of decoders are seen by it.
pub(super) struct DecoderGraph {
    pub(super) inputs: Vec<GraphValue>,
    pub(super) outputs: Vec<GraphValue>,
    pub(super) attentions: Vec<GroupQuery>,
    /// GroupQueryAttention nodes inside of branches and loops.
    pub(super) inner_attentions: usize,
    /// Bits of the weights, where they are quantised: the least of all matrices.
    pub(super) weight_bits: Option<i64>,
    /// The files that tensors are in, as the graph names them.
    pub(super) locations: Vec<String>,
}

/// An input or an output.
pub(super) struct GraphValue {
    pub(super) name: String,
    /// `None`: no tensor, or one of a type that ONNX Runtime does not have either.
    pub(super) element: Option<ElementType>,
    /// Each dimension, a number or a name; `None`: not even their number is declared.
    pub(super) dims: Option<Vec<Option<i64>>>,
}

/// A node of com.microsoft.GroupQueryAttention.
pub(super) struct GroupQuery {
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Tokens that a row sees; below 1: all.
    pub(super) window: i64,
    /// Whether its past is a ring, in which the oldest tokens are overwritten.
    pub(super) is_ring: bool,
}

/// The places of past and present keys; those of values follow.
const PAST: usize = 3;
const PRESENT: usize = 1;

impl DecoderGraph {
    /// Reads an .onnx file. Messages of errors continue its name.
    pub(super) fn read(file: Bytes) -> Result<Self, String> {
        let model = ModelProto::decode(file)
            .map_err(|error| format!("this is no ONNX model: {error}. Export the model again"))?;
        let graph = model.graph.ok_or("there is no graph in it: export the model again")?;
        let mut found = Self {
            inputs: graph.input.iter().map(GraphValue::of).collect(),
            outputs: graph.output.iter().map(GraphValue::of).collect(),
            attentions: Vec::new(),
            inner_attentions: 0,
            weight_bits: None,
            locations: Vec::new(),
        };
        // Graphs of old versions list their weights among the inputs.
        found.inputs.retain(|input| graph.initializer.iter().all(|tensor| tensor.name != input.name));
        found.walk(&graph, true);
        found.locations.sort_unstable();
        found.locations.dedup();
        Ok(found)
    }

    fn walk(&mut self, graph: &GraphProto, is_outer: bool) {
        graph.initializer.iter().for_each(|tensor| self.note_file(tensor));
        for node in &graph.node {
            match (node.domain.as_str(), node.op_type.as_str()) {
                ("com.microsoft", "GroupQueryAttention") if is_outer => self.attentions.push(GroupQuery::of(node)),
                ("com.microsoft", "GroupQueryAttention") => self.inner_attentions += 1,
                ("com.microsoft", "MatMulNBits") => self.note_bits(node.whole("bits").unwrap_or(4)),
                (_, "MatMulInteger" | "DynamicQuantizeMatMul" | "QLinearMatMul") => self.note_bits(8),
                _ => {}
            }
            for attribute in &node.attribute {
                attribute.t.iter().for_each(|tensor| self.note_file(tensor));
                attribute.g.iter().for_each(|graph| self.walk(graph, false));
                attribute.graphs.iter().for_each(|graph| self.walk(graph, false));
            }
        }
    }

    fn note_bits(&mut self, bits: i64) {
        self.weight_bits = Some(self.weight_bits.map_or(bits, |least| least.min(bits)));
    }

    fn note_file(&mut self, tensor: &TensorProto) {
        if tensor.data_location != DEFAULT {
            let location = tensor.external_data.iter().find(|entry| entry.key == "location");
            self.locations.extend(location.map(|entry| entry.value.clone()));
        }
    }

    /// The attention that reads these past tensors and makes these present ones.
    pub(super) fn attention_of(&self, past: [&str; 2], present: [&str; 2]) -> Option<&GroupQuery> {
        self.attentions.iter().find(|node| {
            let reads = (0..2).all(|part| node.inputs.get(PAST + part).is_some_and(|name| name == past[part]));
            let makes = (0..2).all(|part| node.outputs.get(PRESENT + part).is_some_and(|name| name == present[part]));
            reads && makes
        })
    }
}

impl GraphValue {
    fn of(value: &ValueInfoProto) -> Self {
        let tensor = value.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref());
        let dim = |dim: &DimensionProto| dim.dim_value;
        Self {
            name: value.name.clone(),
            element: tensor.and_then(|tensor| ElementType::from_number(tensor.elem_type)),
            dims: tensor.and_then(|tensor| Some(tensor.shape.as_ref()?.dim.iter().map(dim).collect())),
        }
    }
}

impl GroupQuery {
    fn of(node: &NodeProto) -> Self {
        Self {
            inputs: node.input.clone(),
            outputs: node.output.clone(),
            window: node.whole("local_window_size").unwrap_or(-1),
            is_ring: node.whole("sliding_window_cache").unwrap_or(0) != 0,
        }
    }
}

impl NodeProto {
    /// The value of an attribute that is a whole number.
    fn whole(&self, name: &str) -> Option<i64> {
        self.attribute.iter().find(|attribute| attribute.name == name).map(|attribute| attribute.i)
    }
}

// The messages of ONNX's onnx.proto, with the fields that are looked into.

#[derive(Message)]
struct ModelProto {
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphProto>,
}

#[derive(Message)]
struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfoProto>,
}

#[derive(Message)]
struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    output: Vec<String>,
    #[prost(string, tag = "4")]
    op_type: String,
    #[prost(message, repeated, tag = "5")]
    attribute: Vec<AttributeProto>,
    #[prost(string, tag = "7")]
    domain: String,
}

#[derive(Message)]
struct AttributeProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, tag = "3")]
    i: i64,
    #[prost(message, optional, boxed, tag = "5")]
    t: Option<Box<TensorProto>>,
    #[prost(message, optional, boxed, tag = "6")]
    g: Option<Box<GraphProto>>,
    #[prost(message, repeated, tag = "11")]
    graphs: Vec<GraphProto>,
}

#[derive(Message)]
struct ValueInfoProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    r#type: Option<TypeProto>,
}

#[derive(Message)]
struct TypeProto {
    #[prost(message, optional, tag = "1")]
    tensor_type: Option<TensorTypeProto>,
}

#[derive(Message)]
struct TensorTypeProto {
    #[prost(int32, tag = "1")]
    elem_type: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<ShapeProto>,
}

#[derive(Message)]
struct ShapeProto {
    #[prost(message, repeated, tag = "1")]
    dim: Vec<DimensionProto>,
}

#[derive(Message)]
struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    dim_value: Option<i64>,
}
