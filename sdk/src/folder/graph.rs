//! Graphs that are rewritten in memory when a model is opened, for pages of another form or for a GPU: what the rewriters share.

use pagoda_kernels::KvFormat;
use prost::Message;
use prost::bytes::Bytes;

use super::kv_format::{FORMATS, word};
use crate::tensor::ElementType;

/// The type of a layer's pool, and of its scales.
#[derive(Clone, Copy)]
pub(super) struct PoolType {
    pub(super) page_size: u32,
    pub(super) heads: u32,
    pub(super) head_size: u32,
    /// That of native pages.
    pub(super) element: ElementType,
    pub(super) format: KvFormat,
}

/// The names of the scales of pools; none for native pages.
pub(super) fn scales_names(format: KvFormat, pools: &[String]) -> Vec<String> {
    match format {
        KvFormat::Native => Vec::new(),
        _ => pools.iter().map(|name| format!("{name}.scales")).collect(),
    }
}

/// Gives the pools among a graph's inputs, or outputs, their new types, and replaces their scales.
pub(super) fn replace(
    values: &mut Vec<ValueInfoProto>,
    (pools, scales): (&[String], &[String]),
    old_scales: &[String],
    pool: &PoolType,
) -> Result<(), String> {
    values.retain(|value| !old_scales.contains(&value.name));
    let (numbers, width) = match pool.format {
        KvFormat::Native => (pool.element, pool.head_size as usize),
        format => (ElementType::U8, format.pool_width(pool.head_size as usize)),
    };
    for name in pools {
        let value = values.iter_mut().find(|value| value.name == *name);
        value.ok_or_else(|| format!("its graph has no `{name}`"))?.r#type =
            Some(TypeProto::pages(pool, numbers, width));
    }
    values.extend(scales.iter().map(|name| ValueInfoProto {
        name: name.clone(),
        r#type: Some(TypeProto::pages(pool, ElementType::F16, pool.format.scales_width())),
        ..ValueInfoProto::default()
    }));
    Ok(())
}

/// `AttributeProto.type`: a text.
const STRING: i32 = 3;

impl AttributeProto {
    pub(super) fn text(name: &str, value: &str) -> Self {
        Self { name: name.into(), s: value.as_bytes().to_vec().into(), r#type: STRING, ..Self::default() }
    }
}

impl NodeProto {
    /// Sets the attribute `kv_format`; a native pool has none.
    pub(super) fn set_format(&mut self, format: KvFormat) {
        let named =
            |attribute: &Bytes| AttributeProto::decode(attribute.clone()).is_ok_and(|it| it.name == "kv_format");
        self.attribute.retain(|attribute| !named(attribute));
        if format != KvFormat::Native {
            self.set(&AttributeProto::text("kv_format", word(&FORMATS, format)));
        }
    }

    /// Adds an attribute, which it must not have.
    pub(super) fn set(&mut self, attribute: &AttributeProto) {
        self.attribute.push(attribute.encode_to_vec().into());
    }
}

/// Sets the name at a place; without a name the place is empty.
pub(super) fn put(names: &mut Vec<String>, at: usize, name: Option<&String>) {
    if names.len() <= at && name.is_some() {
        names.resize(at + 1, String::new());
    }
    if let Some(place) = names.get_mut(at) {
        *place = name.cloned().unwrap_or_default();
    }
}

/// A dimension of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Dimension<'a> {
    Number(i64),
    Named(&'a str),
}

impl TypeProto {
    pub(super) fn tensor(element: ElementType, dims: &[Dimension<'_>]) -> Self {
        let dim = |dim: &Dimension<'_>| match *dim {
            Dimension::Number(number) => DimensionProto { dim_value: Some(number), ..DimensionProto::default() },
            Dimension::Named(name) => DimensionProto { dim_param: Some(name.into()), ..DimensionProto::default() },
        };
        let shape = ShapeProto { dim: dims.iter().map(dim).collect() };
        let tensor = TensorTypeProto { elem_type: element as i32, shape: Some(shape) };
        Self { tensor_type: Some(tensor), ..Self::default() }
    }

    fn pages(pool: &PoolType, element: ElementType, width: usize) -> Self {
        let [page_size, heads, width] = [pool.page_size.into(), pool.heads.into(), width as i64].map(Dimension::Number);
        Self::tensor(element, &[Dimension::Named("pages"), Dimension::Number(2), page_size, heads, width])
    }
}

// The messages of ONNX's onnx.proto on the way to an attention node, with all of their fields: what is not looked into is
// kept as the bytes that it was.

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
    #[prost(bytes = "bytes", tag = "7")]
    pub(super) graph: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub(super) opset_import: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "14")]
    pub(super) metadata_props: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "20")]
    pub(super) training_info: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "25")]
    pub(super) functions: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "26")]
    pub(super) configuration: Vec<Bytes>,
}

#[derive(Message)]
pub(super) struct GraphProto {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(super) node: Vec<Bytes>,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) initializer: Vec<Bytes>,
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

#[derive(Clone, Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
    #[prost(string, tag = "4")]
    pub(super) op_type: String,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) attribute: Vec<Bytes>,
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

/// Those of a number or a text alone.
#[derive(Message)]
pub(super) struct AttributeProto {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(float, optional, tag = "2")]
    pub(super) f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub(super) i: Option<i64>,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) s: Bytes,
    #[prost(int32, tag = "20")]
    pub(super) r#type: i32,
}

#[derive(Message)]
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

#[derive(Message)]
pub(super) struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor_type: Option<TensorTypeProto>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub(super) sequence_type: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub(super) map_type: Option<Bytes>,
    #[prost(string, tag = "6")]
    pub(super) denotation: String,
    #[prost(bytes = "bytes", optional, tag = "8")]
    pub(super) sparse_tensor_type: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub(super) optional_type: Option<Bytes>,
}

#[derive(Message)]
pub(super) struct TensorTypeProto {
    #[prost(int32, tag = "1")]
    pub(super) elem_type: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<ShapeProto>,
}

#[derive(Message)]
pub(super) struct ShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) dim: Vec<DimensionProto>,
}

#[derive(Message)]
pub(super) struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) dim_param: Option<String>,
    #[prost(string, tag = "3")]
    pub(super) denotation: String,
}
