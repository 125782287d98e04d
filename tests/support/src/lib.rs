//! What tests and benchmarks share: random numbers, temporary folders, and small ONNX graphs. The graphs are written
//! without Python, by the few parts of ONNX's protobuf format that they need.

mod blocked;
mod folder;
pub mod power;
mod random;
mod times;

pub use blocked::spawn_until_blocked;
pub use folder::Folder;
pub use random::{Random, mix};
pub use times::{kernel_cases, times};

/// An element type by its ONNX number.
pub type Element = i32;
/// 32-bit float.
pub const F32: Element = 1;
/// Signed 32-bit integer.
pub const I32: Element = 6;
/// Signed 64-bit integer.
pub const I64: Element = 7;
/// Text.
pub const STRING: Element = 8;
/// True or false.
pub const BOOL: Element = 9;
/// 16-bit float.
pub const F16: Element = 10;
/// 16-bit float with the exponent of a 32-bit one.
pub const BF16: Element = 16;

/// One dimension of an input or an output.
pub enum Dim {
    /// Fixed.
    Is(i64),
    /// Free, with a name.
    Any(&'static str),
}

/// An attribute of a node.
pub enum Attribute {
    /// An integer.
    Int(&'static str, i64),
    /// A real number.
    Float(&'static str, f32),
    /// A text.
    Text(&'static str, &'static str),
}

/// A graph being written.
#[derive(Default)]
pub struct Graph {
    nodes: Vec<u8>,
    weights: Vec<u8>,
    inputs: Vec<u8>,
    outputs: Vec<u8>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    #[must_use]
    pub fn input(mut self, name: &str, element: Element, dims: &[Dim]) -> Self {
        put_bytes(&mut self.inputs, 11, &value_info(name, element, dims));
        self
    }

    /// Adds an output.
    #[must_use]
    pub fn output(mut self, name: &str, element: Element, dims: &[Dim]) -> Self {
        put_bytes(&mut self.outputs, 12, &value_info(name, element, dims));
        self
    }

    /// Adds a weight: numbers that are part of the model.
    #[must_use]
    pub fn weight(self, name: &str, dims: &[i64], values: &[f32]) -> Self {
        let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, F32, dims, &values)
    }

    /// Adds a list of integers that is part of the model.
    #[must_use]
    pub fn integers(self, name: &str, values: &[i64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, I64, &[values.len() as i64], &bytes)
    }

    fn tensor(mut self, name: &str, element: Element, dims: &[i64], values: &[u8]) -> Self {
        let mut tensor = Vec::new();
        for &dim in dims {
            put_int(&mut tensor, 1, dim);
        }
        put_int(&mut tensor, 2, element.into());
        put_bytes(&mut tensor, 8, name.as_bytes());
        put_bytes(&mut tensor, 9, values);
        put_bytes(&mut self.weights, 5, &tensor);
        self
    }

    /// Adds a node of ONNX's own operators, or of ai.pagoda's if `operator` begins with `ai.pagoda.`. An input that is
    /// left out has the name "".
    #[must_use]
    pub fn node(mut self, operator: &str, inputs: &[&str], outputs: &[&str], attributes: &[Attribute]) -> Self {
        let mut node = Vec::new();
        for input in inputs {
            put_bytes(&mut node, 1, input.as_bytes());
        }
        for output in outputs {
            put_bytes(&mut node, 2, output.as_bytes());
        }
        let (domain, operator) = operator.rsplit_once('.').unwrap_or(("", operator));
        put_bytes(&mut node, 4, operator.as_bytes());
        for attribute in attributes {
            put_bytes(&mut node, 5, &attribute.encode());
        }
        put_bytes(&mut node, 7, domain.as_bytes());
        put_bytes(&mut self.nodes, 1, &node);
        self
    }

    /// The bytes of an .onnx file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut graph = self.nodes.clone();
        put_bytes(&mut graph, 2, b"graph");
        graph.extend(&self.weights);
        graph.extend(&self.inputs);
        graph.extend(&self.outputs);
        let mut model = Vec::new();
        put_int(&mut model, 1, 10); // IR version
        put_bytes(&mut model, 7, &graph);
        put_bytes(&mut model, 8, &opset("", 21));
        put_bytes(&mut model, 8, &opset("ai.pagoda", 1));
        model
    }
}

impl Attribute {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Int(name, value) => {
                put_bytes(&mut bytes, 1, name.as_bytes());
                put_int(&mut bytes, 3, *value);
                put_int(&mut bytes, 20, 2);
            }
            Self::Float(name, value) => {
                put_bytes(&mut bytes, 1, name.as_bytes());
                put_tag(&mut bytes, 2, 5);
                bytes.extend(value.to_le_bytes());
                put_int(&mut bytes, 20, 1);
            }
            Self::Text(name, value) => {
                put_bytes(&mut bytes, 1, name.as_bytes());
                put_bytes(&mut bytes, 4, value.as_bytes());
                put_int(&mut bytes, 20, 3);
            }
        }
        bytes
    }
}

fn opset(domain: &str, version: i64) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_bytes(&mut bytes, 1, domain.as_bytes());
    put_int(&mut bytes, 2, version);
    bytes
}

fn value_info(name: &str, element: Element, dims: &[Dim]) -> Vec<u8> {
    let mut shape = Vec::new();
    for dim in dims {
        let mut bytes = Vec::new();
        match dim {
            Dim::Is(size) => put_int(&mut bytes, 1, *size),
            Dim::Any(symbol) => put_bytes(&mut bytes, 2, symbol.as_bytes()),
        }
        put_bytes(&mut shape, 1, &bytes);
    }
    let (mut tensor, mut kind, mut info) = (Vec::new(), Vec::new(), Vec::new());
    put_int(&mut tensor, 1, element.into());
    put_bytes(&mut tensor, 2, &shape);
    put_bytes(&mut kind, 1, &tensor);
    put_bytes(&mut info, 1, name.as_bytes());
    put_bytes(&mut info, 2, &kind);
    info
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_tag(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_int(out: &mut Vec<u8>, field: u64, value: i64) {
    put_tag(out, field, 0);
    put_varint(out, value as u64);
}

fn put_tag(out: &mut Vec<u8>, field: u64, kind: u64) {
    put_varint(out, field << 3 | kind);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
