//! A stream of requests, and of responses: one for each token of a language model, one for each request to another model.

use std::future::poll_fn;
use std::sync::Arc;

use axum::extract::{Request, State as Shared};
use axum::response::Response;
use bytes::Bytes;
use pagoda::engine::{Event, FinishReason};
use pagoda::json::Json;
use pagoda::{Generator, Tensor};
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::{JoinHandle, JoinSet};

use super::calls::version;
use super::convert;
use super::messages::{
    InferParameter, InferParameterChoice, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};
use crate::access::Caller;
use crate::failure::Failure;
use crate::gate::{Slot, caller_of};
use crate::grpc::{self, Messages};
use crate::kserve::infer::{find, infer};
use crate::kserve::tensors::{InferRequest, Outputs};
use crate::kserve::{generate, metadata};
use crate::models::{Kind, Served};
use crate::run::Running;
use crate::state::State;

/// Responses that wait for a client that reads slowly.
const WAITING: usize = 32;
/// Requests of one stream that are answered, or wait to be: then the next one is not read. A client that sends and never reads fills
/// no memory.
const TOGETHER: usize = 64;
/// Says of a response whether it is the last one of its request.
const FINAL_RESPONSE: &str = "triton_final_response";
/// Which answer a token belongs to, where a request asks for several.
const CHOICE: &str = "choice";

/// Answers requests as they come, each on its own. A failure of one is a response of its own, and the stream goes on.
pub async fn stream_infer(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let messages = Messages::of(request, &state.limits)?;
    let (sender, mut responses) = channel(WAITING);
    let reading = Reading(tokio::spawn(read(state, caller, messages, sender)));
    Ok(grpc::stream(move |context| {
        // Dropping the body, as happens when the client goes away, cancels all that runs.
        let _ = &reading;
        responses.poll_recv(context)
    }))
}

/// The task that reads requests. Dropping it ends it, and those that it began.
struct Reading(JoinHandle<()>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn read(state: Arc<State>, caller: Caller, mut messages: Messages, sender: Sender<Result<Bytes, Failure>>) {
    let mut answering = JoinSet::new();
    loop {
        let next = tokio::select! {
            next = messages.next(), if answering.len() < TOGETHER => next,
            // Those that have ended are forgotten.
            Some(_) = answering.join_next() => continue,
        };
        let message = match next {
            Ok(Some(bytes)) => grpc::decode::<ModelInferRequest>(bytes),
            Ok(None) => break,
            // Where the next message would begin is not known.
            Err(failure) => {
                let _ = sender.send(Err(failure)).await;
                return;
            }
        };
        let (state, sender) = (Arc::clone(&state), sender.clone());
        answering.spawn(async move {
            let id = message.as_ref().map_or_else(|_| String::new(), |message| message.id.clone());
            let answered = match message {
                Ok(message) => answer(&state, caller, message, &sender).await,
                Err(failure) => Err(failure),
            };
            if let Err(failure) = answered {
                let response = Some(ModelInferResponse { id, ..Default::default() });
                let failed = ModelStreamInferResponse { error_message: failure.message, infer_response: response };
                send(&sender, &failed).await;
            }
        });
    }
    while answering.join_next().await.is_some() {}
}

async fn answer(
    state: &Arc<State>,
    caller: Caller,
    message: ModelInferRequest,
    sender: &Sender<Result<Bytes, Failure>>,
) -> Result<(), Failure> {
    let mut slot = Slot::take(state, caller)?;
    let answered = answer_in_slot(state, caller, message, sender).await;
    if let Err(failure) = &answered {
        slot.responded(failure.status);
    }
    answered
}

async fn answer_in_slot(
    state: &Arc<State>,
    caller: Caller,
    message: ModelInferRequest,
    sender: &Sender<Result<Bytes, Failure>>,
) -> Result<(), Failure> {
    state.models.wait(&message.model_name).await;
    let served = find(state, &message.model_name, version(&message.model_version))?;
    let request = convert::request(message)?;
    if let Kind::Generate(generator) = &served.kind {
        request.check()?;
        return tokens(state, caller, &served, generator, request, sender).await;
    }
    let id = request.id.clone();
    let outputs = infer(state, &served, request, caller).await?;
    respond(&served, &id, outputs, &[(FINAL_RESPONSE, InferParameterChoice::Bool(true))], sender).await
}

/// A response for each token with text, and for the end of each answer.
async fn tokens(
    state: &Arc<State>,
    caller: Caller,
    served: &Served,
    generator: &Arc<Generator>,
    request: InferRequest,
    sender: &Sender<Result<Bytes, Failure>>,
) -> Result<(), Failure> {
    let asked = generate::read(&request)?;
    let empty_final = request
        .parameters
        .iter()
        .any(|(name, value)| name == generate::EMPTY_FINAL_RESPONSE && *value == Json::Flag(true));
    let n = asked.n.unwrap_or(1);
    let mut running = Running::start(generator, vec![asked], &state.running, state.tally(served, caller))?;
    // Not before the generator has checked it.
    let mut sent = vec![(0, false); n as usize];
    while let Some((_, event)) = poll_fn(|context| running.poll_next(context)).await {
        let mut parts = Vec::new();
        match event {
            Event::Token(token) => {
                let choice = token.choice as usize;
                let (length, ended) = &mut sent[choice];
                *length += token.text.len();
                *ended |= token.finish_reason.is_some();
                if !token.text.is_empty() || token.finish_reason.is_some() {
                    parts.push((choice, token.text, token.finish_reason));
                }
            }
            Event::End(outcome) => {
                for (choice, answer) in outcome?.choices.into_iter().enumerate() {
                    let (length, ended) = &mut sent[choice];
                    if !std::mem::replace(ended, true) {
                        let rest = answer.text.get(*length..).unwrap_or_default().to_owned();
                        parts.push((choice, rest, Some(answer.finish_reason)));
                    }
                }
            }
        }
        let last = parts.len();
        let all_ended = sent.iter().all(|(_, ended)| *ended);
        for (at, (choice, text, reason)) in parts.into_iter().enumerate() {
            let is_final = all_ended && !empty_final && at + 1 == last;
            let parameters = [
                (FINAL_RESPONSE, InferParameterChoice::Bool(is_final)),
                (CHOICE, InferParameterChoice::Int64(choice as i64)),
            ];
            respond(served, &request.id, request.choose(part(text, reason)?)?, &parameters, sender).await?;
        }
    }
    if empty_final {
        let parameters = [(FINAL_RESPONSE, InferParameterChoice::Bool(true))];
        respond(served, &request.id, Outputs::new(), &parameters, sender).await?;
    }
    Ok(())
}

/// New text of an answer, and why it ended, or nothing if it goes on.
fn part(text: String, reason: Option<FinishReason>) -> Result<Outputs, Failure> {
    let reason = reason.map_or("", FinishReason::name).to_owned();
    Ok(vec![
        (generate::OUTPUTS[0].to_owned(), Tensor::from_strings(&[1], vec![text])?),
        (generate::OUTPUTS[1].to_owned(), Tensor::from_strings(&[1], vec![reason])?),
    ])
}

async fn respond(
    served: &Served,
    id: &str,
    outputs: Outputs,
    parameters: &[(&str, InferParameterChoice)],
    sender: &Sender<Result<Bytes, Failure>>,
) -> Result<(), Failure> {
    let (mut response, raw) = convert::response(&served.name, &metadata::version(served), id, outputs)?;
    response.raw_output_contents = raw;
    let named = |(name, choice): &(&str, InferParameterChoice)| {
        ((*name).to_owned(), InferParameter { parameter_choice: Some(choice.clone()) })
    };
    response.parameters = parameters.iter().map(named).collect();
    send(sender, &ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }).await;
    Ok(())
}

async fn send(sender: &Sender<Result<Bytes, Failure>>, response: &ModelStreamInferResponse) {
    for part in grpc::encode(response, &[]).into_iter().flatten() {
        // The client may be gone; then this task ends soon.
        let _ = sender.send(Ok(part)).await;
    }
}
