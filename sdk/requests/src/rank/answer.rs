//! The answer to a request, as JSON.

use std::time::Duration;

use pagoda::Error;
use serde::{Serialize, Serializer};

use super::columns::Columns;
use super::request::Line;

/// An answer and its request.
pub struct Answer<'a> {
    /// The number of the line, from 1, if it is one of many.
    pub number: Option<u64>,
    /// The request.
    pub line: &'a Line,
    /// The names of the tasks.
    pub tasks: &'a [String],
    /// Candidate by candidate, a score for each task.
    pub scores: &'a [f32],
    /// Rows of the history that were cached.
    pub cached_rows: u64,
    /// Rows that were computed.
    pub computed_rows: u64,
    /// From sending the request to the arrival of the scores.
    pub took: Duration,
    /// How many of the best to show; 0 = all.
    pub top: usize,
}

/// A line that failed, as JSON.
#[derive(Serialize)]
pub struct Failed {
    line: u64,
    error: String,
    status: &'static str,
}

impl Failed {
    /// The error of a line.
    pub fn new(line: u64, error: &Error) -> Self {
        Self { line, error: error.to_string(), status: error.status().name() }
    }
}

impl Answer<'_> {
    /// One object.
    pub fn json(&self) -> impl Serialize {
        Object {
            line: self.number,
            user: self.line.user,
            events: self.line.event_count(),
            candidates: self.candidates(),
            cached_rows: self.cached_rows,
            computed_rows: self.computed_rows,
            ms: (self.took.as_secs_f64() * 1e6).round() / 1e3,
            top: Map((0..self.tasks.len()).map(|task| (self.tasks[task].clone(), self.places(task))).collect()),
        }
    }

    /// The number of candidates.
    pub fn candidates(&self) -> usize {
        self.line.candidates.first().map_or(0, |(_, keys)| keys.len())
    }

    /// The best candidates of a task, best first; equal ones in the order of the request.
    pub fn best(&self, task: usize) -> Vec<usize> {
        let score = |candidate: usize| self.scores[candidate * self.tasks.len() + task];
        let mut order: Vec<usize> = (0..self.candidates()).collect();
        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        order.truncate(if self.top == 0 { usize::MAX } else { self.top });
        order
    }

    fn places(&self, task: usize) -> Vec<Place> {
        let place = |candidate: usize| Place {
            index: candidate,
            keys: Map(keys(&self.line.candidates, candidate)),
            score: self.scores[candidate * self.tasks.len() + task],
        };
        self.best(task).into_iter().map(place).collect()
    }
}

#[derive(Serialize)]
struct Object {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    user: u64,
    events: usize,
    candidates: usize,
    cached_rows: u64,
    computed_rows: u64,
    ms: f64,
    top: Map<Vec<Place>>,
}

#[derive(Serialize)]
struct Place {
    /// The index of the candidate in the request, from 0.
    index: usize,
    keys: Map<i64>,
    score: f32,
}

/// An object whose members keep their order.
struct Map<T>(Vec<(String, T)>);

impl<T: Serialize> Serialize for Map<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// The keys of a candidate, feature by feature.
pub fn keys(columns: &Columns, candidate: usize) -> Vec<(String, i64)> {
    columns.iter().map(|(name, keys)| (name.clone(), keys[candidate])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        let candidates = vec![("movie".to_owned(), vec![10, 11, 1200]), ("genre".to_owned(), vec![1, 2, 3])];
        Line { user: 7, candidates, ..Line::default() }
    }

    fn answer<'a>(line: &'a Line, tasks: &'a [String], top: usize) -> Answer<'a> {
        let scores = &[0.25, 0.5, 0.75, 0.5, 0.25, 0.125];
        let took = Duration::from_micros(1234);
        Answer { number: Some(3), line, tasks, scores, cached_rows: 2000, computed_rows: 4, took, top }
    }

    #[test]
    fn json_has_the_keys_and_the_place_in_the_request() {
        let (line, tasks) = (line(), ["like".to_owned(), "click".to_owned()]);
        let text = serde_json::to_string(&answer(&line, &tasks, 1).json()).unwrap();
        let expected = concat!(
            r#"{"line":3,"user":7,"events":0,"candidates":3,"cached_rows":2000,"computed_rows":4,"ms":1.234,"top":"#,
            r#"{"like":[{"index":1,"keys":{"movie":11,"genre":2},"score":0.75}],"#,
            r#""click":[{"index":0,"keys":{"movie":10,"genre":1},"score":0.5}]}}"#
        );
        assert_eq!(text, expected);
        let all = serde_json::to_value(answer(&line, &tasks, 0).json()).unwrap();
        assert_eq!(all["top"]["like"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn a_failure_names_line_and_status() {
        let failed = Failed::new(4, &Error::invalid("user", "missing"));
        let text = serde_json::to_string(&failed).unwrap();
        assert_eq!(text, r#"{"line":4,"error":"user: missing","status":"INVALID_ARGUMENT"}"#);
    }
}
