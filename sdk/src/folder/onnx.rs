//! The messages of ONNX's onnx.proto that can contain a tensor, at any depth. Other fields are skipped.

use prost::Message;
use prost::bytes::Bytes;

/// `TensorProto.data_location`: the numbers are in this message.
pub(super) const DEFAULT: i32 = 0;

#[derive(Message)]
pub(super) struct ModelProto {
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "20")]
    pub(super) training_info: Vec<TrainingInfoProto>,
    #[prost(message, repeated, tag = "25")]
    pub(super) functions: Vec<FunctionProto>,
}

#[derive(Message)]
pub(super) struct TrainingInfoProto {
    #[prost(message, optional, tag = "1")]
    pub(super) initialization: Option<GraphProto>,
    #[prost(message, optional, tag = "2")]
    pub(super) algorithm: Option<GraphProto>,
}

#[derive(Message)]
pub(super) struct FunctionProto {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "7")]
    pub(super) node: Vec<NodeProto>,
    /// Attributes with their default values.
    #[prost(message, repeated, tag = "11")]
    pub(super) attribute_proto: Vec<AttributeProto>,
}

#[derive(Message)]
pub(super) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "15")]
    pub(super) sparse_initializer: Vec<SparseTensorProto>,
}

#[derive(Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
    #[prost(string, tag = "4")]
    pub(super) op_type: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) attribute: Vec<AttributeProto>,
}

/// `type` says which of the fields is valid. It is not read: all of them are checked.
#[derive(Message)]
pub(super) struct AttributeProto {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(float, tag = "2")]
    pub(super) f: f32,
    #[prost(message, optional, boxed, tag = "5")]
    pub(super) t: Option<Box<TensorProto>>,
    #[prost(message, optional, boxed, tag = "6")]
    pub(super) g: Option<Box<GraphProto>>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub(super) floats: Vec<f32>,
    #[prost(message, repeated, tag = "10")]
    pub(super) tensors: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub(super) graphs: Vec<GraphProto>,
    #[prost(message, optional, boxed, tag = "22")]
    pub(super) sparse_tensor: Option<Box<SparseTensorProto>>,
    #[prost(message, repeated, tag = "23")]
    pub(super) sparse_tensors: Vec<SparseTensorProto>,
}

/// Numbers are slices of the mapped file and are not copied. For that, `float_data` and the like are declared as what a
/// packed field is on the wire: any number of pieces of bytes. One that is not packed is an error, and no writer of
/// ONNX makes one.
#[derive(Message)]
pub(super) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub(super) dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(super) data_type: i32,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub(super) float_data: Vec<Bytes>,
    /// Varints. The bits of numbers of 16 and of 8 bits are here too.
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub(super) int32_data: Vec<Bytes>,
    #[prost(string, tag = "8")]
    pub(super) name: String,
    #[prost(bytes = "bytes", tag = "9")]
    pub(super) raw_data: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "10")]
    pub(super) double_data: Vec<Bytes>,
    #[prost(message, repeated, tag = "13")]
    pub(super) external_data: Vec<StringStringEntryProto>,
    #[prost(int32, tag = "14")]
    pub(super) data_location: i32,
}

#[derive(Message)]
pub(super) struct SparseTensorProto {
    #[prost(message, optional, tag = "1")]
    pub(super) values: Option<TensorProto>,
    #[prost(message, optional, tag = "2")]
    pub(super) indices: Option<TensorProto>,
}

#[derive(Message)]
pub(super) struct StringStringEntryProto {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Graph;

    use super::*;

    #[test]
    fn weights_are_slices_of_the_file() {
        let file = Bytes::from(Graph::new().weight("w", &[3], &[1.0, 2.0, 3.0]).to_bytes());
        let model = ModelProto::decode(file.clone()).unwrap();
        let weight = &model.graph.unwrap().initializer[0];
        assert_eq!((weight.name.as_str(), &weight.dims[..], weight.raw_data.len()), ("w", &[3][..], 12));
        assert!(file.as_ptr_range().contains(&weight.raw_data.as_ptr()));
    }

    #[test]
    fn floats_that_come_in_pieces_are_all_there() {
        let pieces = TensorProto { float_data: vec![vec![1; 8].into(), vec![2; 4].into()], ..TensorProto::default() };
        let read = TensorProto::decode(pieces.encode_to_vec().as_slice()).unwrap();
        assert_eq!(read.float_data, [vec![1; 8], vec![2; 4]]);
    }

    #[test]
    fn nesting_has_an_end() {
        let mut graph = GraphProto::default();
        for _ in 0..40 {
            let attribute = AttributeProto { g: Some(Box::new(graph)), ..AttributeProto::default() };
            let node = NodeProto { attribute: vec![attribute], ..NodeProto::default() };
            graph = GraphProto { node: vec![node], ..GraphProto::default() };
        }
        let error = GraphProto::decode(graph.encode_to_vec().as_slice()).unwrap_err();
        assert!(error.to_string().contains("recursion limit"), "{error}");
    }
}
