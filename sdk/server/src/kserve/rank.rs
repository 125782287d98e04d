//! Rankers: a request in tensors. Their names are the fields of `/v1/rank`, with the feature after a point.

use std::sync::Arc;

use pagoda::engine::{Columns, Events};
use pagoda::{ElementType, Engine, Error, RankRequest, Result, Tensor};
use pagoda_requests::rank::Features;

use super::tensors::{InferRequest, Outputs};
use crate::native;
use crate::statistics::Statistics;

/// The scores of each candidate, `[candidates, tasks]`.
pub const SCORES: &str = "scores";
/// How many rows of the history were cached, and how many were computed.
pub const ROWS: [&str; 2] = ["cached_rows", "computed_rows"];

/// The input that says whose history it is, and what the names of those of candidates begin with.
pub const USER: &str = "user";
pub const CANDIDATES: &str = "candidates.";

/// The inputs of a ranker: the name, and whether it has one element rather than one for each event or candidate.
pub fn inputs(known: &Features) -> Vec<(String, bool)> {
    let mut inputs = vec![("user".to_owned(), true)];
    inputs.extend(known.user.iter().map(|name| (format!("user_keys.{name}"), true)));
    inputs.extend(known.event.iter().map(|name| (format!("events.{name}"), false)));
    inputs.push(("events.time".to_owned(), false));
    inputs.push(("start".to_owned(), true));
    inputs.extend(known.candidate.iter().map(|name| (format!("candidates.{name}"), false)));
    inputs.push(("time".to_owned(), true));
    inputs
}

/// Ranks.
pub async fn infer(engine: &Engine, request: InferRequest, statistics: &Arc<Statistics>) -> Result<Outputs> {
    let folder = engine.folder();
    let known = Features::of(&folder);
    let names: Vec<String> = inputs(&known).into_iter().map(|(name, _)| name).collect();
    if let Some((name, _)) = request.inputs.iter().find(|(name, _)| !names.contains(name)) {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let near = pagoda_requests::words::did_you_mean(name, &names);
        return Err(Error::invalid("inputs", format!("there is no {name:?}{near}")));
    }
    let asked = read(&request, &known)?;
    let response = native::run_rank(engine, asked, statistics).await?;
    let (candidates, tasks) = (request_rows(&request, &known), folder.tasks.len());
    let one = |number: u64| Tensor::from_slice(&[1], &[number as i64]);
    let outputs = vec![
        (SCORES.to_owned(), Tensor::from_slice(&[candidates as i64, tasks as i64], &response.scores)?),
        (ROWS[0].to_owned(), one(response.cached_rows)?),
        (ROWS[1].to_owned(), one(response.computed_rows)?),
    ];
    request.choose(outputs)
}

fn request_rows(request: &InferRequest, known: &Features) -> usize {
    let first = known.candidate.first().and_then(|name| request.input(&format!("candidates.{name}")));
    first.map_or(0, |tensor| tensor.len())
}

fn read(request: &InferRequest, known: &Features) -> Result<RankRequest> {
    let many = |name: &str| request.input(name).map(|tensor| numbers(name, tensor)).transpose();
    let one = |name: &str| match many(name)?.as_deref() {
        None => Ok(None),
        Some([number]) => Ok(Some(*number)),
        Some(other) => Err(Error::invalid(name, format!("{} elements; expected 1", other.len()))),
    };
    let columns = |kind: &str, names: &[String]| -> Result<Columns> {
        let mut columns = Columns::new();
        for name in names {
            columns = columns.with(name.as_str(), many(&format!("{kind}.{name}"))?.unwrap_or_default());
        }
        Ok(columns)
    };
    let user = one("user")?.ok_or_else(|| Error::invalid("user", "missing: whose history is it?"))?;
    let mut user_keys = Vec::new();
    for name in &known.user {
        if let Some(key) = one(&format!("user_keys.{name}"))? {
            user_keys.push((name.clone(), key));
        }
    }
    Ok(RankRequest {
        // 64 bits, as the client has them.
        user: user as u64,
        start: one("start")?.map(|start| start as u64),
        events: Events { keys: columns("events", &known.event)?, times: many("events.time")?.unwrap_or_default() },
        user_keys,
        candidates: columns("candidates", &known.candidate)?,
        time: one("time")?,
        ..RankRequest::default()
    })
}

fn numbers(name: &str, tensor: &Tensor) -> Result<Vec<i64>> {
    match tensor.element_type() {
        ElementType::I64 => Ok(tensor.as_slice::<i64>()?.to_vec()),
        ElementType::U64 => Ok(tensor.as_slice::<u64>()?.iter().map(|&number| number as i64).collect()),
        ElementType::I32 => Ok(tensor.as_slice::<i32>()?.iter().map(|&number| number.into()).collect()),
        _ => Err(Error::invalid(name, "its type is none of INT64, UINT64 and INT32")),
    }
}
