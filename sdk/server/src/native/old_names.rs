//! `/ping`, `/engine_check`, `/completion` and `/chat`. The fields of requests are those of `pagoda generate`.

use std::sync::Arc;

use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use pagoda::engine::Prompt;
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Result};
use pagoda_requests::fields::{flag, object, text};
use serde::Serialize;
use serde_json::json;

use super::old_streams::{ChatText, OldStream};
use crate::failure::Failure;
use crate::gate::caller_of;
use crate::run::Running;
use crate::state::State;
use crate::unique::unique;
use crate::{body, events, heavy, reply};

/// That the server answers.
pub async fn ping() -> Response {
    reply::json(StatusCode::OK, &json!({"status": "Healthy"}))
}

/// That it takes requests.
pub async fn engine_check(Shared(state): Shared<Arc<State>>) -> Response {
    match state.is_ending() {
        false => reply::json(StatusCode::OK, &json!({"status": "Running"})),
        true => reply::json(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "Error"})),
    }
}

#[derive(Serialize)]
struct CompletionText {
    request_id: String,
    text: String,
}

/// Text after a prompt.
pub async fn completion(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let text = body::read_text(request, &state.limits).await?;
    let asked = heavy::work(text.len(), || Asked::read(&text))?;
    if matches!(asked.request.prompt, Prompt::Chat(_)) {
        return Err(Error::invalid("messages", "send them to /chat, or a `prompt`").into());
    }
    let request_id = unique();
    let (served, generator) = state.models.generator_or_first(asked.model.as_deref()).await?;
    let running = Running::start(&generator, vec![asked.request], &state.running, state.tally(&served, caller))?;
    if asked.stream {
        return Ok(events::response(running, OldStream::completion(request_id)));
    }
    let mut responses = running.responses().await?;
    let choices = responses.pop().unwrap_or_default().choices;
    let mut texts =
        choices.into_iter().map(|choice| CompletionText { request_id: request_id.clone(), text: choice.text });
    Ok(one_or_many(&mut texts))
}

/// An answer to the messages of a chat.
pub async fn chat(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let text = body::read_text(request, &state.limits).await?;
    let asked = heavy::work(text.len(), || Asked::read(&text))?;
    if !matches!(asked.request.prompt, Prompt::Chat(_)) {
        return Err(Error::invalid("prompt", "send it to /completion, or `messages`").into());
    }
    let (served, generator) = state.models.generator_or_first(asked.model.as_deref()).await?;
    let running = Running::start(&generator, vec![asked.request], &state.running, state.tally(&served, caller))?;
    if asked.stream {
        return Ok(events::response(running, OldStream::chat()));
    }
    let mut responses = running.responses().await?;
    let choices = responses.pop().unwrap_or_default().choices;
    Ok(one_or_many(&mut choices.into_iter().map(|choice| ChatText::new(choice.text))))
}

/// An object for one answer, a list for several.
fn one_or_many<T: Serialize>(answers: &mut dyn Iterator<Item = T>) -> Response {
    let answers: Vec<T> = answers.collect();
    match &answers[..] {
        [one] => reply::json(StatusCode::OK, one),
        many => reply::json(StatusCode::OK, &many),
    }
}

struct Asked {
    model: Option<String>,
    stream: bool,
    request: GenerateRequest,
}

impl Asked {
    fn read(body: &str) -> Result<Self> {
        let members = object(body, r#"{"prompt": "Once upon a time", "max_new_tokens": 32}"#)?;
        let (mut model, mut stream): (_, bool) = (None, false);
        let mut others: Vec<(String, Json)> = Vec::new();
        for (name, value) in members {
            match name.as_str() {
                "model" => model = Some(text(&name, &value)?),
                "stream" => stream = flag(&name, &value)?,
                _ => others.push((name, value)),
            }
        }
        let request = pagoda_requests::generate::read(&others, &GenerateRequest::default())?;
        Ok(Self { model, stream, request })
    }
}
