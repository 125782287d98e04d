//! The engine on either provider: scores as the oracle has them, from histories that grow, for users at the same time.

use pagoda::engine::{EngineOptions, GraphShape};
use pagoda::{Engine, ModelFolder, ModelOptions, Provider, RankResponse};

use crate::cases::{cases, close, folder, open, options};

/// Models of the tests, and how far from the oracle's their scores may be.
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

/// Everyone's history as it grows, each on a thread of its own: scores as the oracle has them.
pub fn replay(engine: &Engine, model: &str) {
    let (_, tolerance) = MODELS.into_iter().find(|(name, _)| *name == model).expect("one of them");
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
    EngineOptions { model, instances: 4, max_batch: 2, graphs: graphs.to_vec(), ..options() }
}

/// Batches that fit into a graph, and such that do not, give what the oracle gives.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn scores_by_graphs_of_larger_shapes() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let shapes = [(1, 10), (2, 16)].map(|(users, rows)| GraphShape { users, rows, candidates: 0, pages: 0 });
    for model in ["gather", "fused", "half"] {
        replay(&open(model, on_gpu(&shapes)), model);
    }
    let metrics = pagoda::metrics::text();
    for kind in ["graph", "other"] {
        let line = format!("pagoda_engine_graph_batches_total{{kind=\"{kind}\"}} ");
        let count = metrics.lines().find_map(|text| text.strip_prefix(&line)).unwrap_or("0");
        assert_ne!(count, "0", "{kind}: {metrics}");
    }
}

/// The same shape with a graph and without one: the same to the bit, also where the graph is replayed.
#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn a_graph_changes_no_bit() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    ["gather", "fused", "half"].into_iter().for_each(check_bits);
}

fn check_bits(model: &str) {
    let page = u64::from(ModelFolder::open(folder(model)).unwrap().kv.page_size);
    let plain = open(model, on_gpu(&[]));
    let bits = |response: &RankResponse| response.scores.iter().map(|score| score.to_bits()).collect::<Vec<_>>();
    for case in cases(model) {
        for step in case.steps() {
            plain.forget(&[case.user]).unwrap();
            let expected = plain.rank(&case.whole(step)).unwrap();
            let candidates = (expected.scores.len() / expected.tasks) as u32;
            let rows = expected.computed_rows as u32 + candidates;
            let pages = expected.computed_rows.div_ceil(page) as u32;
            let graph = open(model, on_gpu(&[GraphShape { users: 1, rows, candidates, pages }]));
            for _ in 0..3 {
                let response = graph.rank(&case.whole(step)).unwrap();
                assert_eq!(response.computed_rows, expected.computed_rows);
                assert_eq!(bits(&response), bits(&expected), "after {step} events");
                graph.forget(&[case.user]).unwrap();
            }
        }
    }
}
