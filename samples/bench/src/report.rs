//! The rows of a benchmark, and how they get to standard output.

use pagoda::Result;
use pagoda_cli::bench::Backend;
use pagoda_cli::output;
use pagoda_cli::progress::Progress;

/// Prints each row as soon as it is known, so that a benchmark that is stopped leaves those that it had. Meanwhile a
/// spinner says what is measured.
pub struct Report {
    json: bool,
    backend: Backend,
    progress: Progress,
}

impl Report {
    /// Of a benchmark of which nothing is known yet.
    pub fn new(json: bool, backend: Backend, doing: impl Into<String>) -> Self {
        Self { json, backend, progress: Progress::spinner(doing) }
    }

    /// Sets what is measured now.
    pub fn doing(&self, what: impl Into<String>) {
        self.progress.doing(what);
    }

    /// Prints a row. Between rounds that are compared it would disturb them.
    pub fn row(&self, row: Row) -> Result<()> {
        let line = if self.json { row.json(self.backend) } else { row.text() };
        self.progress.aside(|| output::line(line))
    }

    /// Prints rows that become known together.
    pub fn rows(&self, rows: impl IntoIterator<Item = Row>) -> Result<()> {
        rows.into_iter().try_for_each(|row| self.row(row))
    }
}

/// One figure and its baseline.
pub struct Row {
    /// The benchmark.
    pub bench: &'static str,
    /// What was measured.
    pub case: String,
    /// The figure.
    pub value: f64,
    /// Of the figure and of its baseline.
    pub unit: &'static str,
    /// What the figure is compared with.
    pub baseline: f64,
    /// What the baseline is.
    pub baseline_name: &'static str,
    /// How many times as good as the baseline.
    pub ratio: f64,
}

impl Row {
    /// As a JSON object on one line.
    fn json(&self, backend: Backend) -> String {
        let backend = if backend == Backend::Cuda { "cuda" } else { "cpu" };
        format!(
            r#"{{"bench":"{}","case":"{}","value":{:.4},"unit":"{}","baseline":{:.4},"baseline_name":"{}","ratio":{:.3},"backend":"{backend}"}}"#,
            self.bench, self.case, self.value, self.unit, self.baseline, self.baseline_name, self.ratio
        )
    }

    /// As a line of a table.
    fn text(&self) -> String {
        format!(
            "{:<15} {:<44} {:>9.3} {:<8} {:<24} {:>9.3}   x{:.2}",
            self.bench, self.case, self.value, self.unit, self.baseline_name, self.baseline, self.ratio
        )
    }
}
