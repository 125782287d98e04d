//! Language models: a text or tokens in, texts out. The parameters of a request are the fields of `pagoda generate`.

use std::sync::Arc;

use pagoda::engine::Prompt;
use pagoda::json::Json;
use pagoda::{ElementType, Error, GenerateRequest, Generator, Result, Tensor};
use pagoda_requests::generate::set_field;

use super::tensors::{InferRequest, Outputs};
use crate::run::{Running, RunningRequests};
use crate::tally::Tally;

/// The text of the prompt; or its tokens.
pub const INPUTS: [&str; 2] = ["text_input", "tokens_input"];
/// The texts of the answers, and why each ended.
pub const OUTPUTS: [&str; 2] = ["text_output", "finish_reason"];

/// Parameters that say how the response is written.
const PROTOCOL: [&str; 2] = ["binary_data_output", EMPTY_FINAL_RESPONSE];
/// Whether a stream has a response after the last token, without outputs.
pub const EMPTY_FINAL_RESPONSE: &str = "triton_enable_empty_final_response";

/// Answers a prompt.
pub async fn infer(
    generator: &Arc<Generator>,
    request: InferRequest,
    all: &Arc<RunningRequests>,
    tally: Tally,
) -> Result<Outputs> {
    let asked = read(&request)?;
    let response = Running::start(generator, vec![asked], all, tally)?.responses().await?.pop().unwrap_or_default();
    let count = response.choices.len() as i64;
    let (texts, reasons): (Vec<_>, Vec<_>) =
        response.choices.into_iter().map(|choice| (choice.text, choice.finish_reason.name().to_owned())).unzip();
    let outputs = vec![
        (OUTPUTS[0].to_owned(), Tensor::from_strings(&[count], texts)?),
        (OUTPUTS[1].to_owned(), Tensor::from_strings(&[count], reasons)?),
    ];
    request.choose(outputs)
}

/// The request of a generator.
pub fn read(request: &InferRequest) -> Result<GenerateRequest> {
    if let Some((name, _)) = request.inputs.iter().find(|(name, _)| !INPUTS.contains(&name.as_str())) {
        return Err(Error::invalid("inputs", format!("there is no {name:?}: send `text_input` or `tokens_input`")));
    }
    let mut asked = GenerateRequest { prompt: prompt(request)?, ..GenerateRequest::default() };
    for (name, value) in &request.parameters {
        // Not those that belong to the protocol.
        if *value == Json::Null || PROTOCOL.contains(&name.as_str()) {
            continue;
        }
        let field = if name == "max_tokens" { "max_new_tokens" } else { name };
        if !set_field(&mut asked, field, value)? {
            return Err(Error::invalid(format!("parameters.{name}"), "no such field"));
        }
    }
    Ok(asked)
}

fn prompt(request: &InferRequest) -> Result<Prompt> {
    match (request.input(INPUTS[0]), request.input(INPUTS[1])) {
        (Some(text), None) => match text.as_strings().ok() {
            Some([text]) => Ok(text.as_str().into()),
            _ => Err(Error::invalid(INPUTS[0], "expected one text: BYTES of the shape [1]")),
        },
        (None, Some(tokens)) => {
            let wrong = || Error::invalid(INPUTS[1], "expected tokens: INT64 or INT32, 0 or more");
            let numbers: Vec<i64> = match tokens.element_type() {
                ElementType::I64 => tokens.as_slice::<i64>()?.to_vec(),
                ElementType::I32 => tokens.as_slice::<i32>()?.iter().map(|&token| token.into()).collect(),
                _ => return Err(wrong()),
            };
            let tokens: Result<Vec<u32>, _> = numbers.into_iter().map(u32::try_from).collect();
            Ok(tokens.map_err(|_| wrong())?.into())
        }
        _ => Err(Error::invalid("inputs", "expected either `text_input` or `tokens_input`")),
    }
}
