//! The bodies of requests and responses: a JSON header, and the bytes of tensors behind it.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use pagoda::json::Json;
use pagoda::{Error, Result};
use pagoda_requests::fields::{flag, items, once, text, whole, wholes};
use serde::Serialize;
use serde_json::{Value, json};

use super::tensors::{InferRequest, Outputs};
use super::{datatype, json_data, values};
use crate::reply;

/// The bytes of the JSON header, if bytes of tensors follow it.
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// A request, and which outputs are to be bytes.
pub struct Body {
    /// The request.
    pub request: InferRequest,
    /// Whether an output that says nothing itself is.
    all_binary: bool,
    /// Those that say something themselves.
    binary: Vec<(String, bool)>,
}

impl Body {
    /// Reads a body.
    pub fn read(headers: &HeaderMap, body: &Bytes) -> Result<Self> {
        let (header, mut rest) = split(headers, body)?;
        let header =
            std::str::from_utf8(header).map_err(|error| Error::invalid("request", format!("not UTF-8: {error}")))?;
        let members = pagoda_requests::fields::object(header, r#"{"inputs": [{"name": "x", "shape": [1], …}]}"#)?;
        let mut read = Self { request: InferRequest::default(), all_binary: false, binary: Vec::new() };
        let (mut seen, mut has_inputs) = (Vec::new(), false);
        for (name, value) in &members {
            once(&mut seen, name, name)?;
            match name.as_str() {
                "id" => read.request.id = text(name, value)?,
                "parameters" => read.read_parameters(value)?,
                "inputs" => {
                    let Json::List(inputs) = value else {
                        return Err(Error::invalid(name, format!("{value} is not a list of tensors")));
                    };
                    for (at, input) in inputs.iter().enumerate() {
                        let (name, tensor) = read_input(&format!("inputs[{at}]"), input, &mut rest)?;
                        read.request.inputs.push((name, Arc::new(tensor)));
                    }
                    has_inputs = true;
                }
                "outputs" => read.read_outputs(value)?,
                _ => {
                    return Err(Error::invalid(
                        name,
                        "no such field; there is `id`, `parameters`, `inputs` and `outputs`",
                    ));
                }
            }
        }
        if !has_inputs {
            return Err(Error::invalid("inputs", "missing: which tensors?"));
        }
        if !rest.is_empty() {
            let message = format!("{} bytes follow the last tensor that has a binary_data_size", rest.len());
            return Err(Error::invalid("request", message));
        }
        Ok(read)
    }

    fn read_parameters(&mut self, value: &Json) -> Result<()> {
        let Json::Object(members) = value else {
            return Err(Error::invalid("parameters", format!("{value} is not an object")));
        };
        for (name, value) in members {
            if name == "binary_data_output" {
                self.all_binary = flag("parameters.binary_data_output", value)?;
            }
        }
        self.request.parameters.clone_from(members);
        Ok(())
    }

    fn read_outputs(&mut self, value: &Json) -> Result<()> {
        let outputs = items("outputs", value, "outputs", |path, output| {
            let Json::Object(members) = output else {
                return Err(Error::invalid(path, format!("{output} is not an object with a `name`")));
            };
            let field = |name: &str| members.iter().find(|(other, _)| other == name).map(|(_, value)| value);
            let name = field("name").ok_or_else(|| Error::invalid(format!("{path}.name"), "missing"))?;
            let binary = match field("parameters") {
                Some(Json::Object(parameters)) => parameters.iter().find(|(name, _)| name == "binary_data"),
                _ => None,
            };
            let binary =
                binary.map(|(_, value)| flag(format_args!("{path}.parameters.binary_data"), value)).transpose()?;
            Ok((text(format_args!("{path}.name"), name)?, binary))
        })?;
        for (name, binary) in outputs {
            if self.request.outputs.contains(&name) {
                return Err(Error::invalid("outputs", format!("{name:?} is there twice")));
            }
            self.binary.extend(binary.map(|binary| (name.clone(), binary)));
            self.request.outputs.push(name);
        }
        Ok(())
    }

    /// Which outputs are to be bytes.
    pub fn binary(&self) -> Binary {
        Binary { all: self.all_binary, own: self.binary.clone() }
    }
}

/// Which outputs are to be bytes.
pub struct Binary {
    all: bool,
    own: Vec<(String, bool)>,
}

/// The JSON header, and what follows it.
fn split<'a>(headers: &HeaderMap, body: &'a Bytes) -> Result<(&'a [u8], &'a [u8])> {
    let Some(length) = headers.get(HEADER_LENGTH) else { return Ok((body, &[])) };
    let length = length.to_str().ok().and_then(|text| text.parse::<usize>().ok());
    length.and_then(|length| body.split_at_checked(length)).ok_or_else(|| {
        let message = format!("not a number of bytes that the body, which has {}, begins with", body.len());
        Error::invalid("Inference-Header-Content-Length", message)
    })
}

fn read_input(path: &str, input: &Json, rest: &mut &[u8]) -> Result<(String, pagoda::Tensor)> {
    let Json::Object(members) = input else {
        return Err(Error::invalid(path, format!("{input} is not an object with `name`, `datatype` and `shape`")));
    };
    let field = |name: &str| {
        let found = members.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value).ok_or_else(|| Error::invalid(format!("{path}.{name}"), "missing"))
    };
    let name = text(format_args!("{path}.name"), field("name")?)?;
    let element_path = format!("{path}.datatype");
    let element = datatype::named(&element_path, &text(&element_path, field("datatype")?)?)?;
    let shape: Vec<i64> = wholes(&format!("{path}.shape"), field("shape")?, "sizes")?;
    let size = match field("parameters") {
        Ok(Json::Object(parameters)) => parameters.iter().find(|(name, _)| name == "binary_data_size"),
        _ => None,
    };
    let tensor = match size {
        None => json_data::read(&format!("{path}.data"), element, &shape, field("data")?)?,
        Some((_, size)) => {
            let size_path = format!("{path}.parameters.binary_data_size");
            let size: u64 = whole(&size_path, size)?;
            let taken = usize::try_from(size).ok().and_then(|size| rest.split_at_checked(size));
            let (bytes, after) = taken.ok_or_else(|| {
                Error::invalid(&size_path, format!("{size} bytes are more than the {} that follow", rest.len()))
            })?;
            *rest = after;
            values::from_bytes(path, element, &shape, bytes)?
        }
    };
    Ok((name, tensor))
}

#[derive(Serialize)]
struct ResponseHeader<'a> {
    model_name: &'a str,
    model_version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    outputs: Vec<Value>,
}

/// The response to a request.
pub fn response(model: &str, version: &str, id: &str, outputs: Outputs, binary: &Binary) -> Result<Response> {
    let mut header = ResponseHeader { model_name: model, model_version: version, id, outputs: Vec::new() };
    let mut tensors = Vec::new();
    for (name, tensor) in outputs {
        let element = tensor.element_type();
        let datatype = datatype::name(element).ok_or_else(|| {
            let message = format!("{} has no name in this protocol: ask for other outputs", element.name());
            Error::new(pagoda::Status::Unsupported, message).about(format!("outputs.{name}"))
        })?;
        let mut output = json!({"name": name, "datatype": datatype, "shape": tensor.dims()});
        let own = binary.own.iter().find(|(other, _)| *other == name).map(|(_, own)| *own);
        if own.unwrap_or(binary.all) {
            let data = values::to_bytes(tensor)?;
            output["parameters"] = json!({"binary_data_size": data.len()});
            tensors.push(data);
        } else {
            output["data"] = json_data::write(&tensor)?.into();
        }
        header.outputs.push(output);
    }
    if tensors.is_empty() {
        return Ok(reply::json(StatusCode::OK, &header));
    }
    let mut body = serde_json::to_vec(&header).unwrap_or_default();
    let length = body.len();
    body.reserve_exact(tensors.iter().map(Bytes::len).sum());
    tensors.iter().for_each(|tensor| body.extend_from_slice(tensor));
    let mut response = reply::of(StatusCode::OK, "application/octet-stream", body);
    response.headers_mut().insert(HEADER_LENGTH, length.into());
    Ok(response)
}
