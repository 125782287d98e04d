//! `POST /v1/rank`: a line of `pagoda rank` is a body, and its answer the response.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use pagoda::json::Json;
use pagoda::{Engine, Error, RankRequest, RankResponse, Result, Status};
use pagoda_requests::fields::{object, text, whole};
use pagoda_requests::rank::{Answer, Features, Line};
use tokio::sync::oneshot;

use crate::failure::Failure;
use crate::run::CancelOnDrop;
use crate::state::State;
use crate::statistics::Statistics;
use crate::{body, heavy, reply};

/// The places of each task where the request does not say, as the command has it.
const TOP: u32 = 10;

/// Answers a request.
pub async fn rank(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let text = body::read_text(request, &state.limits).await?;
    let Asked { model, top, members } = heavy::work(text.len(), || Asked::read(&text))?;
    let (served, engine) = state.models.ranker(model.as_deref())?;
    let folder = engine.folder();
    let line = Line::read(&members, &Features::of(&folder))?;
    let since = Instant::now();
    let response = run_rank(&engine, line.request(), &served.statistics).await?;
    let tasks: Vec<String> = folder.tasks.iter().map(|task| task.name.clone()).collect();
    let answer = Answer {
        number: None,
        line: &line,
        tasks: &tasks,
        scores: &response.scores,
        cached_rows: response.cached_rows,
        computed_rows: response.computed_rows,
        took: since.elapsed(),
        top: top as usize,
    };
    Ok(reply::json(StatusCode::OK, &answer.json()))
}

/// Runs a request. Dropping the future cancels it.
pub async fn run_rank(engine: &Engine, request: RankRequest, statistics: &Arc<Statistics>) -> Result<RankResponse> {
    let timing = statistics.begin();
    let guard = CancelOnDrop::new();
    let request = RankRequest { cancel: Some(guard.cancel()), ..request };
    let (sender, answer) = oneshot::channel();
    engine.rank_async(&request, move |outcome| {
        let _ = sender.send(outcome);
    })?;
    let outcome = answer.await;
    guard.disarm();
    let response = outcome.unwrap_or_else(|_| {
        Err(Error::new(Status::Internal, "a bug in Pagoda, please report it: a request was dropped unanswered"))
    })?;
    timing.succeeded(None);
    Ok(response)
}

/// The fields of a body that a line does not have, and the others.
struct Asked {
    model: Option<String>,
    top: u32,
    members: Vec<(String, Json)>,
}

impl Asked {
    fn read(body: &str) -> Result<Self> {
        let members = object(body, r#"{"user": 7, "events": {…}, "candidates": {…}}"#)?;
        let (mut model, mut top, mut others) = (None, TOP, Vec::new());
        for (name, value) in members {
            match name.as_str() {
                "model" => model = Some(text(&name, &value)?),
                "top" => top = whole(&name, &value)?,
                _ => others.push((name, value)),
            }
        }
        Ok(Self { model, top, members: others })
    }
}
