//! The users of tests/data/engine, and the scores of the oracle.

use std::path::PathBuf;

use pagoda::engine::{Columns, Engine, EngineOptions, Events, RankRequest, RankResponse};
use pagoda::{KvSize, ModelOptions, Provider};
use serde_json::Value;

/// A user with a history, and the scores after some of its events.
pub struct Case {
    pub user: u64,
    json: Value,
}

/// The path of a model folder of the tests.
pub fn folder(name: &str) -> PathBuf {
    // On a machine other than the build machine: below the current folder.
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let root = if built.is_dir() { built } else { PathBuf::from(".") };
    root.join("tests/data/engine").join(name)
}

/// The users of a model.
pub fn cases(name: &str) -> Vec<Case> {
    let text = std::fs::read_to_string(folder(&format!("{name}.json"))).unwrap();
    let Value::Array(users) = serde_json::from_str(&text).unwrap() else { panic!("a list of users") };
    (100..).zip(users).map(|(user, json)| Case { user, json }).collect()
}

/// Options for tests: the CPU, one thread, a few pages.
pub fn options() -> EngineOptions {
    let model =
        ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, sleep_when_idle: true, ..ModelOptions::default() };
    EngineOptions { model, kv_size: Some(KvSize::Pages(256)), ..EngineOptions::default() }
}

pub fn open(name: &str, options: EngineOptions) -> Engine {
    Engine::open(folder(name), options).unwrap()
}

impl Case {
    /// The number of events.
    pub fn len(&self) -> usize {
        self.json["times"].as_array().unwrap().len()
    }

    /// The numbers of events for which the scores are known.
    pub fn steps(&self) -> Vec<usize> {
        self.json["steps"].as_array().unwrap().iter().map(|step| number(&step["events"]) as usize).collect()
    }

    /// The scores after this number of events.
    pub fn expected(&self, events: usize) -> Vec<f32> {
        let steps = self.json["steps"].as_array().unwrap();
        let step =
            steps.iter().find(|step| number(&step["events"]) as usize == events).expect("scores are known there");
        step["scores"].as_array().unwrap().iter().map(|score| score.as_f64().unwrap() as f32).collect()
    }

    /// A request with the events from `from` up to, not including, `to`. It has a `start` unless that is 0.
    pub fn request(&self, from: usize, to: usize) -> RankRequest {
        let columns = |object: &Value, from: usize, to: usize| {
            let columns = object.as_object().unwrap().iter();
            columns.fold(Columns::new(), |made, (name, keys)| {
                let keys: Vec<i64> = keys.as_array().unwrap()[from..to].iter().map(number).collect();
                made.with(name, keys)
            })
        };
        let candidates =
            self.json["candidates"].as_object().unwrap().values().next().unwrap().as_array().unwrap().len();
        let times = self.json["times"].as_array().unwrap()[from..to].iter().map(number).collect();
        let keys = self.json["keys"].as_object().unwrap().iter().map(|(name, key)| (name.clone(), number(key)));
        RankRequest {
            user: self.user,
            start: (from > 0).then_some(from as u64),
            events: Events { keys: columns(&self.json["events"], from, to), times },
            user_keys: keys.collect(),
            candidates: columns(&self.json["candidates"], 0, candidates),
            time: Some(number(&self.json["now"])),
            ..RankRequest::default()
        }
    }

    /// A request with the whole history of this number of events.
    pub fn whole(&self, events: usize) -> RankRequest {
        self.request(0, events)
    }

    /// Checks the scores after this number of events.
    pub fn check(&self, response: &RankResponse, events: usize) {
        close(&response.scores, &self.expected(events), 1e-5);
    }
}

/// The same columns with one key changed.
pub fn edited(columns: &Columns, feature: &str, event: usize, key: i64) -> Columns {
    columns.iter().fold(Columns::new(), |made, (name, keys)| {
        let mut keys = keys.to_vec();
        if name == feature {
            assert_ne!(std::mem::replace(&mut keys[event], key), key, "that would change nothing");
        }
        made.with(name, keys)
    })
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap()
}

/// Checks that two lists of scores differ by no more than `tolerance`, relative to their length.
pub fn close(scores: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(scores.len(), expected.len());
    let length = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>().sqrt();
    let apart = length(&mut scores.iter().zip(expected).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let all = length(&mut expected.iter().map(|&score| f64::from(score)));
    assert!(apart <= tolerance * all, "{scores:?} are not {expected:?}");
}
