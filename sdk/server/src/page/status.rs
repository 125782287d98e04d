//! `/v1/status`: what the page shows.

use std::sync::Arc;

use axum::extract::State as Shared;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use pagoda::Provider;
use pagoda::kv::{KvStats, TierStats};
use pagoda_requests::rank::Features;
use serde::Serialize;
use serde_json::{Value, json};

use super::history::Second;
use crate::models::{Kind, Served};
use crate::reply;
use crate::state::State;
use crate::window::Percentiles;

#[derive(Serialize)]
struct Status {
    version: &'static str,
    ready: bool,
    uptime_s: u64,
    /// Requests that compute now.
    in_flight: usize,
    latency_ms: Percentiles,
    /// Of language models.
    first_token_ms: Percentiles,
    models: Vec<Value>,
    seconds: Vec<Second>,
    /// The number of the next second, for the next question.
    next: u64,
}

/// The state of the server. `?since=N` leaves out the seconds before that one.
pub async fn status(Shared(state): Shared<Arc<State>>, uri: Uri) -> Response {
    let since = uri.query().and_then(|query| query.strip_prefix("since=")).and_then(|number| number.parse().ok());
    let (seconds, next) = state.history.seconds(since.unwrap_or(0));
    let status = Status {
        version: env!("CARGO_PKG_VERSION"),
        ready: !state.is_ending(),
        uptime_s: state.since.elapsed().as_secs(),
        in_flight: state.limits.requests as usize - state.slots.available_permits(),
        latency_ms: state.history.percentiles(),
        first_token_ms: state.first_tokens.percentiles(),
        models: state.models.all().iter().map(|served| model(served)).collect(),
        seconds,
        next,
    };
    reply::json(StatusCode::OK, &status)
}

fn model(served: &Served) -> Value {
    let mut version = served.version();
    version.truncate(12);
    let mut about = json!({"name": served.name, "kind": served.kind.name(), "version": version});
    let provider = match &served.kind {
        Kind::Generate(generator) => {
            let stats = generator.stats();
            about["max_context"] = generator.folder().limits.max_context.into();
            about["has_template"] = generator.folder().text.chat_template.is_some().into();
            about["waiting"] = stats.waiting.into();
            about["running"] = stats.running.into();
            about["answered"] = stats.answered.into();
            about["failed"] = stats.failed.into();
            about["tokens"] = stats.generated_tokens.into();
            about["kv"] = kv(&generator.kv_stats(), &generator.tiers(), stats.cached_tokens, stats.computed_tokens);
            generator.provider().provider
        }
        Kind::Rank(engine) => {
            let stats = engine.stats();
            let known = Features::of(&engine.folder());
            about["features"] = json!({
                "user": known.user, "event": known.event, "candidate": known.candidate, "timed": known.timed,
            });
            about["waiting"] = stats.waiting.into();
            about["running"] = 0.into();
            about["answered"] = stats.answered.into();
            about["failed"] = stats.failed.into();
            if let Some(pool) = engine.kv_stats() {
                about["kv"] = kv(&pool, &engine.tiers(), stats.cached_rows, stats.computed_rows);
            }
            engine.provider().provider
        }
        Kind::Plain(model) => model.provider(),
    };
    about["provider"] = if provider == Provider::Cuda { "GPU" } else { "CPU" }.into();
    about
}

/// The pool and the tiers under it, and where the tokens or rows of requests came from.
fn kv(pool: &KvStats, tiers: &[TierStats], cached: u64, computed: u64) -> Value {
    let tier = |tier: &TierStats| json!({"name": tier.name, "used": tier.used_bytes, "bytes": tier.most_bytes});
    json!({
        "pages": pool.pages,
        "free": pool.free_pages,
        "shared": pool.shared_pages,
        "cached": cached,
        "computed": computed,
        "from_store": pool.tokens_from_store,
        "tiers": tiers.iter().map(tier).collect::<Vec<_>>(),
    })
}
