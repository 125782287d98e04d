//! The engine on both providers gives the scores of the oracle, for growing histories of concurrent users.

use std::sync::mpsc;
use std::time::Duration;

use pagoda::engine::{EngineOptions, GraphShape, RankRequest};
use pagoda::{Engine, KvFormat, ModelFolder, ModelOptions, Provider, RankResponse};

use crate::cases::{cases, close, folder, open, options};

/// Models of the tests, and the tolerance of their scores.
const MODELS: [(&str, f64); 5] = [("gather", 1e-5), ("bag", 1e-5), ("uncached", 1e-5), ("fused", 1e-5), ("half", 5e-2)];

pub fn scores(provider: Provider) {
    for (model, _) in MODELS {
        let options = EngineOptions {
            model: ModelOptions { provider, ..options().model },
            instances: 4,
            max_batch: 2,
            ..options()
        };
        replay(&open(model, options), model);
    }
}

/// Formats of pages, and how far their scores may be from the oracle's.
const FORMATS: [(KvFormat, f64); 3] = [(KvFormat::Int8, 5e-3), (KvFormat::Fp8, 3e-2), (KvFormat::Int4, 8e-2)];

pub fn scores_of_quantised_pages(provider: Provider) {
    for (format, tolerance) in FORMATS {
        for model in ["gather", "bag", "fused", "half"] {
            let model_options = ModelOptions { provider, ..options().model };
            let engine = open(model, EngineOptions { model: model_options, kv_format: Some(format), ..options() });
            assert_eq!(engine.provider().provider, provider);
            replay_within(&engine, model, tolerance + tolerance_of(model));
        }
    }
}

fn tolerance_of(model: &str) -> f64 {
    MODELS.into_iter().find(|(name, _)| *name == model).expect("one of them").1
}

pub fn replay(engine: &Engine, model: &str) {
    replay_within(engine, model, tolerance_of(model));
}

/// Replays the growing history of each user, each on its own thread, and compares the scores with the oracle.
fn replay_within(engine: &Engine, model: &str, tolerance: f64) {
    std::thread::scope(|scope| {
        for case in cases(model) {
            scope.spawn(move || {
                let mut before = 0;
                for step in case.steps() {
                    let response = engine.rank(&case.request(before, step)).unwrap();
                    close(&response.scores, &case.expected(step), tolerance);
                    before = step;
                }
            });
        }
    });
}

fn on_gpu(graphs: &[GraphShape]) -> EngineOptions {
    let model = ModelOptions { provider: Provider::Cuda, ..options().model };
    EngineOptions { model, instances: 4, max_batch: 2, cuda_graphs: graphs.to_vec(), ..options() }
}

/// Batches that fit into a graph, batches that do not, and batches of a model that can not be captured match the
/// oracle.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn scores_by_graphs_of_larger_shapes() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let shapes = [(1, 10), (2, 16)].map(|(users, rows)| GraphShape { users, rows, candidates: 0, pages: 0 });
    for model in ["gather", "fused", "half", "bag"] {
        replay(&open(model, on_gpu(&shapes)), model);
    }
    for kind in ["graph", "other", "failed"] {
        assert_ne!(batches(kind), 0, "{kind}");
    }
}

/// The number of batches so far, by how they ran.
fn batches(kind: &str) -> u64 {
    let metrics = pagoda::metrics::text();
    let line = format!("pagoda_engine_graph_batches_total{{kind=\"{kind}\"}} ");
    metrics.lines().find_map(|text| text.strip_prefix(&line)).map_or(0, |count| count.parse().unwrap())
}

/// The same shape with and without a graph gives the same bits, also in a replay.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_graph_changes_no_bit() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    for model in ["gather", "fused", "half"] {
        check_bits(model, KvFormat::Native);
        check_bits(model, KvFormat::Int8);
    }
}

/// With a graph: a user alone, in a shape that fits and in one of a batch of three, which is padded. Without a graph:
/// alone, and as the first of three.
fn check_bits(model: &str, format: KvFormat) {
    let page = u64::from(ModelFolder::open(folder(model)).unwrap().kv.page_size);
    let one = EngineOptions { instances: 1, kv_format: Some(format), ..on_gpu(&[]) };
    let alone = open(model, one.clone());
    // The first request waits for the others.
    let together = open(model, EngineOptions { max_batch: 3, max_delay: Duration::from_secs(60), ..one.clone() });
    let bits = |response: &RankResponse| response.scores.iter().map(|score| score.to_bits()).collect::<Vec<_>>();
    let cases = cases(model);
    let others = cases.iter().rev().map(|case| RankRequest { user: case.user + 1000, ..case.whole(case.len()) });
    let others: Vec<_> = others.take(2).collect();
    for case in &cases {
        for step in case.steps() {
            let batch = [&[case.whole(step)], &*others].concat();
            for expected in [rank_as_one(&alone, &batch[..1]), rank_as_one(&together, &batch)] {
                let shape = shape_of(&expected, page);
                let graph = open(model, EngineOptions { cuda_graphs: vec![shape], ..one.clone() });
                let before = batches("graph");
                for _ in 0..3 {
                    let response = graph.rank(&batch[0]).unwrap();
                    assert_eq!(response.computed_rows, expected[0].computed_rows);
                    assert_eq!(bits(&response), bits(&expected[0]), "{model} after {step} events in {shape:?}");
                    graph.forget(&[case.user]).unwrap();
                }
                assert_eq!(batches("graph"), before + 3, "{model} after {step} events in {shape:?}");
            }
        }
    }
}

/// The responses to requests that run as one batch. The users are new, and forgotten afterwards.
fn rank_as_one(engine: &Engine, requests: &[RankRequest]) -> Vec<RankResponse> {
    let ask = |request: &RankRequest| {
        let (tell, told) = mpsc::channel();
        engine.rank_async(request, move |response| tell.send(response).unwrap()).unwrap();
        told
    };
    let told: Vec<_> = requests.iter().map(ask).collect();
    let responses: Vec<_> = told.iter().map(|told| told.recv().unwrap().unwrap()).collect();
    assert!(responses.iter().all(|response| response.batched_with == requests.len() - 1 && response.cached_rows == 0));
    engine.forget(&requests.iter().map(|request| request.user).collect::<Vec<_>>()).unwrap();
    responses
}

/// The shape of a batch of new users with these responses.
fn shape_of(responses: &[RankResponse], page: u64) -> GraphShape {
    let sum = |of: &dyn Fn(&RankResponse) -> u64| responses.iter().map(of).sum::<u64>() as u32;
    let candidates = sum(&|response| (response.scores.len() / response.tasks) as u64);
    GraphShape {
        users: responses.len() as u32,
        rows: candidates + sum(&|response| response.computed_rows),
        candidates,
        pages: sum(&|response| response.computed_rows.div_ceil(page)),
    }
}
