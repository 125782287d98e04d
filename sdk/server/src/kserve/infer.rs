//! The model that answers a request.

use pagoda::Result;

use super::tensors::{InferRequest, Outputs};
use super::{generate, plain, rank};
use crate::failure::Failure;
use crate::models::{Kind, Served};
use crate::state::State;

/// Answers a request.
pub async fn infer(state: &State, served: &Served, request: InferRequest) -> Result<Outputs, Failure> {
    let mut seen: Vec<&str> = Vec::new();
    for (at, (name, _)) in request.inputs.iter().enumerate() {
        pagoda_requests::fields::once(&mut seen, name, &format!("inputs[{at}].name"))?;
    }
    match &served.kind {
        Kind::Plain(model) => Ok(plain::infer(model, request).await?),
        Kind::Rank(engine) => Ok(rank::infer(engine, request).await?),
        Kind::Generate(generator) => Ok(generate::infer(generator, request, &state.running).await?),
    }
}
