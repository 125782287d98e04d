//! The messages of ONNX's onnx.proto that a graph is made of, with all of their fields: a graph is read, changed and written.

use prost::Message;
use prost::bytes::Bytes;

#[derive(Message)]
pub(super) struct ModelProto {
    #[prost(int64, tag = "1")]
    pub(super) ir_version: i64,
    #[prost(string, tag = "2")]
    pub(super) producer_name: String,
    #[prost(string, tag = "3")]
    pub(super) producer_version: String,
    #[prost(string, tag = "4")]
    pub(super) domain: String,
    #[prost(int64, tag = "5")]
    pub(super) model_version: i64,
    #[prost(string, tag = "6")]
    pub(super) doc_string: String,
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub(super) opset_import: Vec<OpsetProto>,
    #[prost(bytes = "bytes", repeated, tag = "14")]
    pub(super) metadata_props: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "20")]
    pub(super) training_info: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "25")]
    pub(super) functions: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "26")]
    pub(super) configuration: Vec<Bytes>,
}

#[derive(Clone, Message)]
pub(super) struct OpsetProto {
    #[prost(string, tag = "1")]
    pub(super) domain: String,
    #[prost(int64, tag = "2")]
    pub(super) version: i64,
}

#[derive(Clone, Message)]
pub(super) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) node: Vec<NodeProto>,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializer: Vec<TensorProto>,
    #[prost(string, tag = "10")]
    pub(super) doc_string: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub(super) output: Vec<ValueInfoProto>,
    #[prost(bytes = "bytes", repeated, tag = "13")]
    pub(super) value_info: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "14")]
    pub(super) quantization_annotation: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "15")]
    pub(super) sparse_initializer: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "16")]
    pub(super) metadata_props: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
    #[prost(string, tag = "4")]
    pub(super) op_type: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) attribute: Vec<AttributeProto>,
    #[prost(string, tag = "6")]
    pub(super) doc_string: String,
    #[prost(string, tag = "7")]
    pub(super) domain: String,
    #[prost(string, tag = "8")]
    pub(super) overload: String,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub(super) metadata_props: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "10")]
    pub(super) device_configurations: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AttributeProto {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(float, optional, tag = "2")]
    pub(super) f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub(super) i: Option<i64>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub(super) s: Option<Bytes>,
    #[prost(message, optional, tag = "5")]
    pub(super) t: Option<TensorProto>,
    /// A graph: see [`AttributeProto::graph`].
    #[prost(bytes = "bytes", optional, tag = "6")]
    pub(super) g: Option<Bytes>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub(super) floats: Vec<f32>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub(super) ints: Vec<i64>,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub(super) strings: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "10")]
    pub(super) tensors: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub(super) graphs: Vec<Bytes>,
    #[prost(string, tag = "13")]
    pub(super) doc_string: String,
    #[prost(bytes = "bytes", optional, tag = "14")]
    pub(super) tp: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "15")]
    pub(super) type_protos: Vec<Bytes>,
    #[prost(int32, tag = "20")]
    pub(super) r#type: i32,
    #[prost(string, tag = "21")]
    pub(super) ref_attr_name: String,
    #[prost(bytes = "bytes", optional, tag = "22")]
    pub(super) sparse_tensor: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "23")]
    pub(super) sparse_tensors: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub(super) dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(super) data_type: i32,
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub(super) segment: Option<Bytes>,
    #[prost(float, repeated, tag = "4")]
    pub(super) float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "5")]
    pub(super) int32_data: Vec<i32>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub(super) string_data: Vec<Bytes>,
    #[prost(int64, repeated, tag = "7")]
    pub(super) int64_data: Vec<i64>,
    #[prost(string, tag = "8")]
    pub(super) name: String,
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub(super) raw_data: Option<Bytes>,
    #[prost(double, repeated, tag = "10")]
    pub(super) double_data: Vec<f64>,
    #[prost(uint64, repeated, tag = "11")]
    pub(super) uint64_data: Vec<u64>,
    #[prost(string, tag = "12")]
    pub(super) doc_string: String,
    #[prost(message, repeated, tag = "13")]
    pub(super) external_data: Vec<EntryProto>,
    #[prost(int32, tag = "14")]
    pub(super) data_location: i32,
    #[prost(bytes = "bytes", repeated, tag = "16")]
    pub(super) metadata_props: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EntryProto {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

#[derive(Clone, Message)]
pub(super) struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) r#type: Option<TypeProto>,
    #[prost(string, tag = "3")]
    pub(super) doc_string: String,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(super) metadata_props: Vec<Bytes>,
}

/// That of a tensor; the others are no inputs of a decoder.
#[derive(Clone, Message)]
pub(super) struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor_type: Option<TensorTypeProto>,
    #[prost(string, tag = "6")]
    pub(super) denotation: String,
}

#[derive(Clone, Message)]
pub(super) struct TensorTypeProto {
    #[prost(int32, tag = "1")]
    pub(super) elem_type: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<ShapeProto>,
}

#[derive(Clone, Message)]
pub(super) struct ShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) dim: Vec<DimensionProto>,
}

#[derive(Clone, Message)]
pub(super) struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) dim_param: Option<String>,
    #[prost(string, tag = "3")]
    pub(super) denotation: String,
}

/// `AttributeProto.type`.
const FLOAT: i32 = 1;
const INT: i32 = 2;
const STRING: i32 = 3;
const INTS: i32 = 7;

impl AttributeProto {
    pub(super) fn float(name: &str, f: f32) -> Self {
        Self { name: name.into(), f: Some(f), r#type: FLOAT, ..Self::default() }
    }

    pub(super) fn int(name: &str, i: i64) -> Self {
        Self { name: name.into(), i: Some(i), r#type: INT, ..Self::default() }
    }

    pub(super) fn text(name: &str, text: &str) -> Self {
        Self { name: name.into(), s: Some(text.as_bytes().to_vec().into()), r#type: STRING, ..Self::default() }
    }

    pub(super) fn ints(name: &str, ints: &[i64]) -> Self {
        Self { name: name.into(), ints: ints.to_vec(), r#type: INTS, ..Self::default() }
    }

    /// The graph that it has, such as a branch of an If.
    pub(super) fn graph(&self) -> Option<Result<GraphProto, prost::DecodeError>> {
        self.g.clone().map(GraphProto::decode)
    }
}

impl NodeProto {
    pub(super) fn new(op: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        // ONNX Runtime's messages name nodes.
        let name = outputs.first().map(|output| format!("{output}/{op}")).unwrap_or_default();
        Self { op_type: op.into(), name, input: owned(inputs), output: owned(outputs), ..Self::default() }
    }

    pub(super) fn with(mut self, attribute: AttributeProto) -> Self {
        self.attribute.push(attribute);
        self
    }

    pub(super) fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|attribute| attribute.name == name)
    }

    /// A whole number of it, or what stands for it where it is not there.
    pub(super) fn int(&self, name: &str, absent: i64) -> i64 {
        self.attribute(name).map_or(absent, |attribute| attribute.i.unwrap_or(0))
    }

    pub(super) fn float(&self, name: &str, absent: f32) -> f32 {
        self.attribute(name).map_or(absent, |attribute| attribute.f.unwrap_or(0.0))
    }

    pub(super) fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|attribute| &attribute.ints[..])
    }

    /// An operator of ONNX itself.
    pub(super) fn is(&self, op: &str) -> bool {
        self.op_type == op && matches!(self.domain.as_str(), "" | "ai.onnx")
    }

    /// An operator of ONNX Runtime.
    pub(super) fn is_microsoft(&self, op: &str) -> bool {
        self.op_type == op && self.domain == "com.microsoft"
    }

    /// An input that is there: an empty name stands for none.
    pub(super) fn given(&self, at: usize) -> Option<&str> {
        self.input.get(at).map(String::as_str).filter(|name| !name.is_empty())
    }

    pub(super) fn made(&self, at: usize) -> Option<&str> {
        self.output.get(at).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// What messages call it: its operator and its name.
    pub(super) fn words(&self) -> String {
        match (self.name.as_str(), self.output.first()) {
            ("", Some(output)) => format!("{} that makes {output:?}", self.op_type),
            (name, _) => format!("{} {name:?}", self.op_type),
        }
    }
}

/// A dimension of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Dimension<'a> {
    Number(usize),
    Named(&'a str),
}

impl ValueInfoProto {
    pub(super) fn new(name: &str, element: i32, dims: &[Dimension<'_>]) -> Self {
        let dim = |dim: &Dimension<'_>| match *dim {
            Dimension::Number(number) => DimensionProto { dim_value: Some(number as i64), ..DimensionProto::default() },
            Dimension::Named(name) => DimensionProto { dim_param: Some(name.into()), ..DimensionProto::default() },
        };
        let shape = ShapeProto { dim: dims.iter().map(dim).collect() };
        let tensor = TensorTypeProto { elem_type: element, shape: Some(shape) };
        let r#type = Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() });
        Self { name: name.into(), r#type, ..Self::default() }
    }

    /// The type of its numbers; 0: it is no tensor.
    pub(super) fn element(&self) -> i32 {
        self.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref()).map_or(0, |tensor| tensor.elem_type)
    }

    /// Its dimensions, `None` for those that are not numbers; `None` for no shape at all.
    pub(super) fn dims(&self) -> Option<Vec<Option<usize>>> {
        let shape = self.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?;
        Some(shape.dim.iter().map(|dim| dim.dim_value.and_then(|number| number.try_into().ok())).collect())
    }
}

impl TensorProto {
    /// A list of i64.
    pub(super) fn of_ints(name: &str, numbers: &[i64]) -> Self {
        let raw: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self {
            name: name.into(),
            dims: vec![numbers.len() as i64],
            data_type: 7,
            raw_data: Some(raw.into()),
            ..Self::default()
        }
    }
}
