//! Between messages and tensors.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use half::{bf16, f16};
use pagoda::json::Json;
use pagoda::{ElementType, Error, Result, Status, Tensor};
use prost::encoding::{WireType, encode_key, encode_varint};

use super::messages::{
    InferInputTensor, InferOutputTensor, InferParameter, InferParameterChoice, InferTensorContents, ModelInferRequest,
    ModelInferResponse,
};
use crate::kserve::tensors::{InferRequest, Outputs};
use crate::kserve::{datatype, values};

/// The number of `ModelInferResponse.raw_output_contents`, its last field.
const RAW_OUTPUT_CONTENTS: u32 = 6;

/// What a message asks.
pub fn request(message: ModelInferRequest) -> Result<InferRequest> {
    let ModelInferRequest { inputs, raw_input_contents, .. } = message;
    if !raw_input_contents.is_empty() && raw_input_contents.len() != inputs.len() {
        let message =
            format!("{} tensors of bytes for {} inputs: send one for each", raw_input_contents.len(), inputs.len());
        return Err(Error::invalid("raw_input_contents", message));
    }
    let mut request = InferRequest { id: message.id, ..InferRequest::default() };
    let mut raw = raw_input_contents.into_iter();
    for (at, input) in inputs.into_iter().enumerate() {
        let tensor = tensor(&format!("inputs[{at}]"), &input, raw.next())?;
        request.inputs.push((input.name, Arc::new(tensor)));
    }
    for output in message.outputs {
        if request.outputs.contains(&output.name) {
            return Err(Error::invalid("outputs", format!("{:?} is there twice", output.name)));
        }
        request.outputs.push(output.name);
    }
    request.parameters = message.parameters.into_iter().map(|(name, parameter)| (name, value(parameter))).collect();
    Ok(request)
}

fn value(parameter: InferParameter) -> Json {
    match parameter.parameter_choice {
        None => Json::Null,
        Some(InferParameterChoice::Bool(flag)) => Json::Flag(flag),
        Some(InferParameterChoice::Int64(number)) => Json::Whole(number.into()),
        Some(InferParameterChoice::Uint64(number)) => Json::Whole(number.into()),
        Some(InferParameterChoice::Double(number)) => Json::Real(number),
        Some(InferParameterChoice::String(text)) => Json::Text(text),
    }
}

fn tensor(path: &str, input: &InferInputTensor, raw: Option<Bytes>) -> Result<Tensor> {
    let element = datatype::named(&format!("{path}.datatype"), &input.datatype)?;
    match (raw, &input.contents) {
        (Some(raw), None) => values::from_bytes(path, element, &input.shape, &raw),
        (None, Some(contents)) => {
            typed(element, &input.shape, contents).map_err(|error| error.about(format!("{path}.contents")))
        }
        // A tensor without elements has none.
        (None, None) => values::from_bytes(path, element, &input.shape, &[]),
        (Some(_), Some(_)) => {
            Err(Error::invalid(path, "it is in `contents` and in `raw_input_contents`: send one of them"))
        }
    }
}

fn typed(element: ElementType, shape: &[i64], contents: &InferTensorContents) -> Result<Tensor> {
    fn narrow<T: TryFrom<N>, N: Copy + std::fmt::Display>(numbers: &[N]) -> Result<Vec<T>> {
        let one = |&number: &N| {
            T::try_from(number).map_err(|_| Error::invalid("contents", format!("{number} is beyond the type")))
        };
        numbers.iter().map(one).collect()
    }
    check_others(element, contents)?;
    match element {
        ElementType::Bool => Tensor::from_bools(shape, &contents.bool_contents),
        ElementType::I8 => Tensor::from_slice(shape, &narrow::<i8, _>(&contents.int_contents)?),
        ElementType::I16 => Tensor::from_slice(shape, &narrow::<i16, _>(&contents.int_contents)?),
        ElementType::I32 => Tensor::from_slice(shape, &contents.int_contents),
        ElementType::I64 => Tensor::from_slice(shape, &contents.int64_contents),
        ElementType::U8 => Tensor::from_slice(shape, &narrow::<u8, _>(&contents.uint_contents)?),
        ElementType::U16 => Tensor::from_slice(shape, &narrow::<u16, _>(&contents.uint_contents)?),
        ElementType::U32 => Tensor::from_slice(shape, &contents.uint_contents),
        ElementType::U64 => Tensor::from_slice(shape, &contents.uint64_contents),
        ElementType::F16 => {
            let numbers: Vec<f16> = contents.fp32_contents.iter().map(|&number| f16::from_f32(number)).collect();
            Tensor::from_slice(shape, &numbers)
        }
        ElementType::Bf16 => {
            let numbers: Vec<bf16> = contents.fp32_contents.iter().map(|&number| bf16::from_f32(number)).collect();
            Tensor::from_slice(shape, &numbers)
        }
        ElementType::F32 => Tensor::from_slice(shape, &contents.fp32_contents),
        ElementType::F64 => Tensor::from_slice(shape, &contents.fp64_contents),
        _ => {
            let text = |bytes: &Bytes| {
                String::from_utf8(bytes.to_vec())
                    .map_err(|error| Error::invalid("contents", format!("a text is not UTF-8: {error}")))
            };
            Tensor::from_strings(shape, contents.bytes_contents.iter().map(text).collect::<Result<_>>()?)
        }
    }
}

/// Elements in a list of another type are not ignored.
fn check_others(element: ElementType, contents: &InferTensorContents) -> Result<()> {
    use ElementType as E;
    let lists = [
        ("bool_contents", contents.bool_contents.len(), &[E::Bool][..]),
        ("int_contents", contents.int_contents.len(), &[E::I8, E::I16, E::I32]),
        ("int64_contents", contents.int64_contents.len(), &[E::I64]),
        ("uint_contents", contents.uint_contents.len(), &[E::U8, E::U16, E::U32]),
        ("uint64_contents", contents.uint64_contents.len(), &[E::U64]),
        ("fp32_contents", contents.fp32_contents.len(), &[E::F16, E::Bf16, E::F32]),
        ("fp64_contents", contents.fp64_contents.len(), &[E::F64]),
        ("bytes_contents", contents.bytes_contents.len(), &[E::String]),
    ];
    match lists.iter().find(|(_, count, elements)| *count > 0 && !elements.contains(&element)) {
        None => Ok(()),
        Some((name, ..)) => {
            let message = format!("{name} has elements, which a tensor of this type does not have there");
            Err(Error::invalid("contents", message))
        }
    }
}

/// The response without the bytes of its tensors, and these.
pub fn response(model: &str, version: &str, id: &str, outputs: Outputs) -> Result<(ModelInferResponse, Vec<Bytes>)> {
    let mut response = ModelInferResponse {
        model_name: model.to_owned(),
        model_version: version.to_owned(),
        id: id.to_owned(),
        ..ModelInferResponse::default()
    };
    let mut raw = Vec::new();
    for (name, tensor) in outputs {
        let element = tensor.element_type();
        let datatype = datatype::name(element).ok_or_else(|| {
            let message = format!("{} has no name in this protocol: ask for other outputs", element.name());
            Error::new(Status::Unsupported, message).about(format!("outputs.{name}"))
        })?;
        let shape = tensor.dims().to_vec();
        raw.push(values::to_bytes(tensor)?);
        response.outputs.push(InferOutputTensor { name, datatype: datatype.to_owned(), shape, ..Default::default() });
    }
    Ok((response, raw))
}

/// Tensors as the last fields of a response, without a copy.
pub fn tail(raw: Vec<Bytes>) -> Vec<Bytes> {
    let mut tail = Vec::with_capacity(2 * raw.len());
    for bytes in raw {
        let mut head = BytesMut::new();
        encode_key(RAW_OUTPUT_CONTENTS, WireType::LengthDelimited, &mut head);
        encode_varint(bytes.len() as u64, &mut head);
        tail.extend([head.freeze(), bytes]);
    }
    tail
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn input(datatype: &str, shape: &[i64], contents: Option<InferTensorContents>) -> InferInputTensor {
        InferInputTensor {
            name: "x".into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            contents: contents.map(Box::new),
            ..Default::default()
        }
    }

    #[test]
    fn a_response_with_a_tail_is_the_whole_message() {
        let outputs = || vec![("y".to_owned(), Tensor::from_slice(&[3], &[1_f32, 2.0, 3.0]).unwrap())];
        let (response, raw) = response("m", "1", "id", outputs()).unwrap();
        let mut parts = response.encode_to_vec();
        tail(raw.clone()).iter().for_each(|part| parts.extend_from_slice(part));
        let whole = ModelInferResponse { raw_output_contents: raw, ..response };
        assert_eq!(ModelInferResponse::decode(parts.as_slice()).unwrap(), whole);
    }

    #[test]
    fn what_does_not_fit_names_its_place() {
        let numbers =
            |numbers: &[i32]| Some(InferTensorContents { int_contents: numbers.to_vec(), ..Default::default() });
        let raw = Bytes::from_static(&[0; 4]);
        for (input, raw, message) in [
            (input("INT9", &[1], None), None, "inputs[0].datatype: \"INT9\" is no type"),
            (input("INT32", &[2], numbers(&[1])), None, "inputs[0].contents: "),
            (input("INT8", &[1], numbers(&[300])), None, "inputs[0].contents: 300 is beyond the type"),
            (input("FP32", &[1], numbers(&[1])), None, "inputs[0].contents: int_contents has elements"),
            (input("INT32", &[1], numbers(&[1])), Some(raw.clone()), "inputs[0]: it is in `contents` and in"),
            (input("INT32", &[2], None), Some(raw), "inputs[0]: 4 bytes are not the 2 elements"),
            (input("INT32", &[1], None), None, "inputs[0]: 0 bytes are not the 1 elements"),
        ] {
            let message_of = ModelInferRequest {
                inputs: vec![input],
                raw_input_contents: raw.into_iter().collect(),
                ..Default::default()
            };
            let error = request(message_of).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
