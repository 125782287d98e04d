//! The statistics of models, as Triton's extension has them.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value};

use super::infer::find;
use super::metadata;
use crate::failure::Failure;
use crate::models::{Kind, Served};
use crate::state::State;
use crate::statistics::Measured;

/// Of the models that were asked for.
#[derive(Serialize)]
pub struct AllStatistics {
    /// One for each.
    pub model_stats: Vec<ModelStats>,
}

/// Of one model, since it was opened.
#[derive(Serialize)]
pub struct ModelStats {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// When the last request ended, in milliseconds since 1970.
    pub last_inference: u64,
    /// Requests that were answered.
    pub inference_count: u64,
    /// Runs of the model.
    pub execution_count: u64,
    /// Where the time went.
    pub inference_stats: InferenceStats,
    /// Not measured.
    response_stats: Map<String, Value>,
    /// Not measured.
    batch_stats: [(); 0],
    /// Not measured.
    memory_usage: [(); 0],
}

/// Where the time of requests went. What the engines do not measure took no time here; it counts all the same, as clients look there for
/// how many requests there were.
#[derive(Serialize)]
pub struct InferenceStats {
    /// Requests that were answered.
    pub success: Measured,
    /// Those that were not.
    pub fail: Measured,
    /// In the queue.
    pub queue: Measured,
    /// Not measured: it is a part of `compute_infer`.
    pub compute_input: Measured,
    /// From the queue to the last of the answer.
    pub compute_infer: Measured,
    /// Not measured: it is a part of `compute_infer`.
    pub compute_output: Measured,
    /// Whole answers are not cached.
    pub cache_hit: Measured,
    /// Whole answers are not cached.
    pub cache_miss: Measured,
}

/// Of the model of a name; without one, of all.
pub fn of(state: &State, name: Option<&str>, version: Option<&str>) -> Result<AllStatistics, Failure> {
    let models = match name {
        Some(name) => vec![find(state, name, version)?],
        None => state.models.all(),
    };
    Ok(AllStatistics { model_stats: models.iter().map(of_model).collect() })
}

fn of_model(served: &Arc<Served>) -> ModelStats {
    let counts = served.statistics.counts();
    let nothing = Measured::default();
    let unmeasured = Measured { count: counts.success.count, ns: 0 };
    ModelStats {
        name: served.name.clone(),
        version: metadata::version(served),
        last_inference: counts.last_ms,
        inference_count: counts.success.count,
        execution_count: match &served.kind {
            Kind::Generate(generator) => generator.stats().steps,
            Kind::Rank(engine) => engine.stats().batches,
            Kind::Plain(_) => counts.success.count,
        },
        inference_stats: InferenceStats {
            success: counts.success,
            fail: counts.fail,
            queue: Measured { count: counts.success.count, ..counts.queue },
            compute_input: unmeasured,
            compute_infer: counts.compute,
            compute_output: unmeasured,
            cache_hit: nothing,
            cache_miss: nothing,
        },
        response_stats: Map::new(),
        batch_stats: [],
        memory_usage: [],
    }
}
