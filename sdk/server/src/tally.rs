//! What is counted while a request to a language model runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::metrics::histogram::Histogram;

use crate::access::{Caller, Rates};
use crate::statistics::Statistics;
use crate::traces::ModelSpan;
use crate::window::Window;

/// Counts the tokens of a request, and times the first.
pub struct Tally {
    /// When the request began.
    pub since: Instant,
    /// The times to first tokens, of this model and of the last minute.
    pub histogram: Histogram,
    /// The same, of all models.
    pub window: Arc<Window>,
    /// The requests of the model.
    pub statistics: Arc<Statistics>,
    /// Whose tokens they are.
    pub rates: Arc<Rates>,
    /// See [`Tally::rates`].
    pub caller: Caller,
    /// What the model does, if it is traced.
    pub span: Option<ModelSpan>,
}

impl Tally {
    /// The first token of a prompt has come.
    pub fn first_token(&self) {
        let took: Duration = self.since.elapsed();
        self.histogram.observe(took.as_secs_f64());
        self.window.add(took);
    }

    /// A token of an answer has come.
    pub fn token(&mut self) {
        self.rates.tokens(self.caller, 1);
        if let Some(span) = &mut self.span {
            span.token();
        }
    }

    /// The tokens of a prompt are known.
    pub fn prompt(&mut self, tokens: usize) {
        self.rates.tokens(self.caller, tokens);
        if let Some(span) = &mut self.span {
            span.input += tokens;
        }
    }
}
