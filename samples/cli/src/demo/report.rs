//! The figures of a replay.

use pagoda::KvFormat;
use pagoda::engine::Engine;
use serde::Serialize;

use super::auc::auc;
use super::data::Data;
use super::replay::{Answered, Replay, Samples, TASKS, Visit};
use super::top::Top;
use crate::words;

/// The maximum difference of an AUC to that of the training framework.
pub const TOLERANCE: f64 = 0.001;

/// All figures, as `--json` prints them.
#[derive(Serialize)]
pub struct Report {
    pub model_version: String,
    pub torch: String,
    pub train_ratings: u64,
    pub train_users: u64,
    pub requests: usize,
    pub users: usize,
    pub candidates: usize,
    /// How the engine with the cache keeps keys and values, and the bytes of a row of a history.
    pub kv_format: &'static str,
    pub kv_bytes_per_row: u64,
    /// The same of native pages, which the other engine has.
    pub native_bytes_per_row: Option<u64>,
    pub top: Top,
    pub cached: Side,
    pub plain: Side,
    /// The share of the requests after a user's first that found all of the earlier history in the cache.
    pub found_percent: f64,
    /// The share of history rows that were cached.
    pub cached_rows_percent: f64,
    /// The hit rate of the cache of the movie table.
    pub movie_hit_percent: Option<f64>,
    pub tasks: Vec<Task>,
    /// The largest difference of a score with the cache and without.
    pub largest_score_difference: f32,
    pub chart: String,
}

/// The figures of one engine.
#[derive(Serialize)]
pub struct Side {
    pub median_ms: f64,
    pub p99_ms: f64,
    pub total_s: f64,
    pub computed_rows: u64,
    pub cached_rows: u64,
}

/// One row of the AUC table.
#[derive(Serialize)]
pub struct Task {
    pub name: &'static str,
    pub positive: usize,
    pub negative: usize,
    pub popularity_auc: f64,
    pub torch_auc: f64,
    pub cached_auc: f64,
    pub plain_auc: f64,
    pub agrees: bool,
}

impl Report {
    /// Sums up a replay.
    pub fn new(data: &Data, engine: &Engine, replay: &Replay, top: Top, chart: String) -> Self {
        let visits = &replay.requests;
        let (cached, plain) = (Side::new(visits, |visit| &visit.cached), Side::new(visits, |visit| &visit.plain));
        let told = visits.iter().filter_map(|visit| Some((visit.told? as u64, visit.cached.cached_rows)));
        let (again, found) =
            told.fold((0, 0), |(again, found), (told, rows)| (again + 1, found + u64::from(rows >= told)));
        // Only of movies: candidates have no rating, which would count as a miss.
        let movies = engine.table_stats("movies").ok();
        let task =
            |(index, name): (usize, &'static str)| Task::new(data, name, &replay.cached[index], &replay.plain[index]);
        Self {
            model_version: engine.folder().version.clone(),
            torch: data.trained.training.torch.clone(),
            train_ratings: data.trained.training.ratings,
            train_users: data.trained.training.users,
            requests: visits.len(),
            users: data.users.len(),
            candidates: replay.cached[1].len(),
            kv_format: engine.folder().kv.format_name(),
            kv_bytes_per_row: engine.folder().kv.bytes_per_token,
            native_bytes_per_row: engine.folder().kv.bytes_per_token_in(KvFormat::Native),
            top,
            found_percent: percent(found, again),
            cached_rows_percent: percent(cached.cached_rows, cached.cached_rows + cached.computed_rows),
            movie_hit_percent: movies.map(|stats| percent(stats.hits, stats.keys)),
            cached,
            plain,
            tasks: TASKS.into_iter().enumerate().map(task).collect(),
            largest_score_difference: replay.apart,
            chart,
        }
    }

    /// Whether the engine ranks as well as the training framework says.
    pub fn agrees(&self) -> bool {
        self.tasks.iter().all(|task| task.agrees)
    }

    /// What was measured, in a line for the chart.
    pub fn about(&self) -> String {
        let (requests, cores) = (words::count(self.requests as u64), std::thread::available_parallelism());
        let cores = words::counted(cores.map_or(1, |cores| cores.get() as u64), "CPU core");
        let candidates = self.candidates as f64 / self.requests.max(1) as f64;
        format!(
            "MovieLens-100K: {requests} requests of {} users in order of time, about {candidates:.0} candidates each, {cores}",
            self.users
        )
    }
}

impl Side {
    fn new(visits: &[Visit], of: impl Fn(&Visit) -> &Answered) -> Self {
        let mut times: Vec<f64> = visits.iter().map(|visit| of(visit).latency.as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(0.0) * 1e3;
        Self {
            median_ms: at(0.5),
            p99_ms: at(0.99),
            total_s: times.iter().sum(),
            computed_rows: visits.iter().map(|visit| of(visit).computed_rows).sum(),
            cached_rows: visits.iter().map(|visit| of(visit).cached_rows).sum(),
        }
    }
}

impl Task {
    fn new(data: &Data, name: &'static str, cached: &Samples, plain: &Samples) -> Self {
        let positive = cached.iter().filter(|sample| sample.0).count();
        let trained = data.trained.tasks.get(name);
        let negative = cached.len() - positive;
        let mut task = Self {
            name,
            positive,
            negative,
            popularity_auc: trained.map_or(f64::NAN, |task| task.popularity_auc),
            torch_auc: trained.map_or(f64::NAN, |task| task.auc),
            cached_auc: auc(cached),
            plain_auc: auc(plain),
            agrees: false,
        };
        // Figures of different samples could agree only by chance. NaN agrees with nothing.
        let same = trained.is_some_and(|task| (task.positive, task.negative) == (positive, negative));
        task.agrees = same && task.difference() < TOLERANCE;
        task
    }

    /// The larger of the two differences to the training framework.
    pub fn difference(&self) -> f64 {
        let differences = [self.cached_auc, self.plain_auc].map(|auc| (auc - self.torch_auc).abs());
        if differences.iter().any(|difference| difference.is_nan()) {
            f64::NAN
        } else {
            differences[0].max(differences[1])
        }
    }
}

fn percent(part: u64, all: u64) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_agrees_only_with_the_same_samples_and_nearly_the_same_auc() {
        let data = |auc: f64, positive| {
            let result = serde_json::from_value(serde_json::json!({
                "tasks": {"will rate": {"auc": auc, "popularity_auc": 0.5, "positive": positive, "negative": 2}},
                "training": {"ratings": 1, "users": 1, "torch": "2"}
            }));
            Data { users: Vec::new(), titles: Default::default(), trained: result.unwrap() }
        };
        // Three of four pairs are in order.
        let samples = vec![(true, 0.9), (false, 0.5), (true, 0.4), (false, 0.1)];
        let agrees = |data: &Data, samples: &Samples| Task::new(data, "will rate", samples, samples).agrees;
        assert!(agrees(&data(0.7505, 2), &samples));
        assert!(!agrees(&data(0.752, 2), &samples));
        assert!(!agrees(&data(0.7505, 3), &samples));
        assert!(!agrees(&data(0.7505, 2), &Vec::new()));
        assert!(!Task::new(&data(0.75, 2), "another", &samples, &samples).agrees);
    }
}
