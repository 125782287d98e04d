//! Plain models: their own tensors.

use std::sync::Arc;

use pagoda::runtime::Request;
use pagoda::{Error, Model, Result, Status};
use tokio::sync::oneshot;

use super::tensors::{InferRequest, Outputs};
use crate::run::CancelOnDrop;

/// Runs a model. Dropping the future cancels the run.
pub async fn infer(model: &Arc<Model>, request: InferRequest) -> Result<Outputs> {
    let names: Vec<String> = match request.outputs.is_empty() {
        true => model.outputs().iter().map(|output| output.name().to_owned()).collect(),
        false => request.outputs,
    };
    let guard = CancelOnDrop::new();
    let mut run = Request::new().cancel(guard.cancel());
    for (name, tensor) in request.inputs {
        run = run.input(name, tensor);
    }
    for name in &names {
        run = run.output(name.as_str());
    }
    let (sender, answer) = oneshot::channel();
    model.run_async(run, move |outcome| {
        let _ = sender.send(outcome);
    })?;
    let outcome = answer.await;
    guard.disarm();
    let dropped = || Error::new(Status::Internal, "a bug in Pagoda, please report it: a run was dropped unanswered");
    let tensors = outcome.map_err(|_| dropped())??;
    Ok(names.into_iter().zip(tensors.into_iter().flatten()).collect())
}
