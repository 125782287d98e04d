//! Times of the last minute, and their percentiles.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

/// Percentiles are of the times since then.
const WINDOW: Duration = Duration::from_secs(60);
/// The maximum number of them.
const MOST: usize = 8192;

/// Times of the last minute.
#[derive(Default)]
pub struct Window {
    times: Mutex<VecDeque<(Instant, Duration)>>,
}

/// The percentiles of times, in milliseconds.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    count: usize,
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Window {
    /// Adds one.
    pub fn add(&self, took: Duration) {
        let mut times = self.times.lock();
        if times.len() == MOST {
            times.pop_front();
        }
        times.push_back((Instant::now(), took));
    }

    /// Those of the last minute.
    pub fn percentiles(&self) -> Percentiles {
        let mut times = self.times.lock();
        while times.front().is_some_and(|(at, _)| at.elapsed() > WINDOW) {
            times.pop_front();
        }
        let times_ms = times.iter().map(|(_, took)| took.as_secs_f64() * 1e3).collect();
        drop(times);
        of(times_ms)
    }
}

fn of(mut times: Vec<f64>) -> Percentiles {
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get(((times.len() as f64 * part).ceil() as usize).saturating_sub(1)).copied();
    let shown = |part: f64| at(part).map_or(0.0, |time| (time * 1e3).round() / 1e3);
    Percentiles { count: times.len(), p50: shown(0.5), p90: shown(0.9), p99: shown(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_times_that_were_added() {
        assert_eq!(of(Vec::new()), Percentiles::default());
        let times = (1..=200).rev().map(f64::from).collect();
        assert_eq!(of(times), Percentiles { count: 200, p50: 100.0, p90: 180.0, p99: 198.0 });
        assert_eq!(of(vec![2.5]), Percentiles { count: 1, p50: 2.5, p90: 2.5, p99: 2.5 });
        let window = Window::default();
        window.add(Duration::from_millis(3));
        assert_eq!(window.percentiles().p99, 3.0);
    }
}
