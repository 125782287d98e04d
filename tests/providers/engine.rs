//! The engine on either provider: scores as the oracle has them, from histories that grow, for users at the same time.

use pagoda::engine::EngineOptions;
use pagoda::{ModelOptions, Provider};

use crate::cases::{cases, close, open, options};

pub fn scores(provider: Provider) {
    for model in ["gather", "bag", "uncached"] {
        let options = EngineOptions {
            model: ModelOptions { provider, ..options().model },
            instances: 4,
            max_batch: 2,
            ..options()
        };
        let engine = &open(model, options);
        std::thread::scope(|scope| {
            for case in cases(model) {
                scope.spawn(move || {
                    let mut before = 0;
                    for step in case.steps() {
                        let response = engine.rank(&case.request(before, step)).unwrap();
                        close(&response.scores, &case.expected(step), 1e-5);
                        before = step;
                    }
                });
            }
        });
    }
}
