//! A model that requests share, and the thread that closes it after a swap.

use std::ops::Deref;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::super::batching::catch_panic;
use super::open_model::OpenModel;
use crate::error::Result;
use crate::sync::{Mutex, Worker};

/// An open model. After [`ModelCloser::retire`] its last reference hands it to the closing thread instead of closing
/// it.
pub(super) struct ServedModel {
    /// `None` only while it is dropped.
    open: Option<OpenModel>,
    closer: OnceLock<Sender<OpenModel>>,
}

impl ServedModel {
    pub(super) fn new(model: OpenModel) -> Self {
        Self { open: Some(model), closer: OnceLock::new() }
    }

    pub(super) fn get_mut(&mut self) -> &mut OpenModel {
        self.open.as_mut().expect("it is there until it is dropped")
    }
}

impl Deref for ServedModel {
    type Target = OpenModel;

    fn deref(&self) -> &OpenModel {
        self.open.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for ServedModel {
    fn drop(&mut self) {
        if let (Some(closer), Some(model)) = (self.closer.take(), self.open.take()) {
            // Without the thread the model is closed here.
            drop(closer.send(model));
        }
    }
}

/// Closes models on a thread of its own, because closing a cache may take a while. The thread starts with the first
/// swap.
#[derive(Default)]
pub(super) struct ModelCloser {
    thread: Mutex<Option<(Sender<OpenModel>, Worker)>>,
}

impl ModelCloser {
    /// Closes a model after its last request has ended.
    pub(super) fn retire(&self, old: Arc<ServedModel>) {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            match start() {
                Ok(started) => *thread = Some(started),
                // The last request closes it.
                Err(error) => log::warn!("{error}"),
            }
        }
        if let Some((closer, _)) = &*thread {
            // A model is retired once.
            let _ = old.closer.set(closer.clone());
        }
    }

    /// Waits until all retired models are closed.
    pub(super) fn join(&self) {
        // The channel ends when the last retired model has been handed over.
        let thread = self.thread.lock().take();
        if let Some((closer, worker)) = thread {
            drop(closer);
            drop(worker);
        }
    }

    /// Lets the thread close the models that are left, and end by itself.
    pub(super) fn detach(&self) {
        let thread = self.thread.lock().take();
        if let Some((_, worker)) = thread {
            worker.detach();
        }
    }
}

fn start() -> Result<(Sender<OpenModel>, Worker)> {
    let (closer, closing) = channel::<OpenModel>();
    let worker = Worker::spawn("pagoda-retire", "close old models on", move || {
        for model in closing {
            // The panic hook has reported a panic. The next model is closed all the same.
            let _ = catch_panic(|| {
                drop(model);
                Ok(())
            });
        }
    })?;
    Ok((closer, worker))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{options, serving};
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "opens a model")]
    fn a_retired_model_is_closed_after_its_last_reference() {
        let (closer, served) = (ModelCloser::default(), serving(&options(), None));
        let (session, in_use) = (Arc::downgrade(&served.model), Arc::clone(&served));
        closer.retire(served);
        assert_eq!(session.strong_count(), 1, "a request still uses it");
        drop(in_use);
        closer.join();
        assert_eq!(session.strong_count(), 0);
        // A model that is retired later gets a new thread.
        closer.retire(serving(&options(), None));
        closer.join();
    }
}
