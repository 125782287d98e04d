//! The thread that computes masks while the model runs.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use super::state::GrammarState;
use crate::error::Result;
use crate::sync::Worker;

/// Computes what comes next in answers with a grammar.
pub struct MaskWorker {
    /// Dropped first, in the order of the fields, which ends the thread.
    queue: Sender<Arc<GrammarState>>,
    _thread: Worker,
}

impl MaskWorker {
    pub fn start() -> Result<Self> {
        let (queue, constraints) = channel::<Arc<GrammarState>>();
        let work = move || {
            for constraint in constraints {
                // An error stays with the constraint, for the step that needs the mask.
                let _ = constraint.next();
            }
        };
        let thread = Worker::spawn("pagoda-grammar", "compute the masks of grammars with", work)?;
        Ok(Self { queue, _thread: thread })
    }

    /// Has what comes next computed. [`GrammarState::next`] waits for it.
    pub fn begin(&self, constraint: &Arc<GrammarState>) {
        // Without the thread the step that needs the mask computes it.
        let _ = self.queue.send(Arc::clone(constraint));
    }
}
