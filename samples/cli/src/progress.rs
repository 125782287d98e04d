//! Progress of long operations, on stderr if it is a terminal.

use std::io::IsTerminal;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::{Condvar, Mutex};

/// Operations shorter than this show no bar.
const PATIENCE: Duration = Duration::from_millis(700);
const TICK: Duration = Duration::from_millis(100);

/// A progress bar, or a spinner if the amount of work is unknown. Dropping it clears it.
pub struct Progress {
    bar: ProgressBar,
    ended: Arc<(Mutex<bool>, Condvar)>,
    painter: Option<JoinHandle<()>>,
}

impl Progress {
    /// For work of unknown length.
    pub fn spinner(doing: impl Into<String>) -> Self {
        Self::start(ProgressBar::new_spinner(), "{spinner} {msg}, {elapsed}", doing.into())
    }

    /// `total` bytes to read.
    pub fn bytes(doing: impl Into<String>, total: u64) -> Self {
        let template = "{spinner} {msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {eta} left";
        Self::start(ProgressBar::new(total), template, doing.into())
    }

    fn start(bar: ProgressBar, template: &str, doing: String) -> Self {
        bar.set_draw_target(ProgressDrawTarget::hidden());
        bar.set_style(ProgressStyle::with_template(template).expect("templates are constants that were tried"));
        bar.set_message(doing);
        let ended = Arc::new((Mutex::new(false), Condvar::new()));
        let painter = std::io::stderr().is_terminal().then(|| {
            let (bar, ended) = (bar.clone(), ended.clone());
            std::thread::spawn(move || paint(&bar, &ended))
        });
        Self { bar, ended, painter }
    }

    /// Sets the message.
    pub fn doing(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Sets the position.
    pub fn reached(&self, position: u64) {
        self.bar.set_position(position);
    }

    /// Hides the bar while `write` prints to the terminal.
    pub fn aside<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        *self.ended.0.lock() = true;
        self.ended.1.notify_all();
        if let Some(painter) = self.painter.take() {
            let _ = painter.join();
        }
        self.bar.finish_and_clear();
    }
}

fn paint(bar: &ProgressBar, (ended, bell): &(Mutex<bool>, Condvar)) {
    let mut guard = ended.lock();
    let mut wait = PATIENCE;
    while !*guard {
        let waited = bell.wait_for(&mut guard, wait);
        if !*guard && waited.timed_out() {
            if wait == PATIENCE {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            bar.tick();
            wait = TICK;
        }
    }
}
