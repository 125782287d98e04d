//! Brings histories back from the store, layer by layer, on threads of the cache.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::error::{Error, Result};
use crate::store::{History, Owner};
use crate::sync::{Condvar, Mutex, Worker};

/// One history on its way in.
pub(super) struct Onload {
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    ready: Box<[bool]>,
    /// Layers that are not read yet.
    unread: u32,
    /// Layers whose threads are not done yet.
    left: u32,
    error: Option<Error>,
}

impl Onload {
    pub(super) fn new(layers: u32) -> Self {
        let ready = vec![false; layers as usize].into();
        Self {
            progress: Mutex::new(Progress { ready, unread: layers, left: layers, error: None }),
            changed: Condvar::new(),
        }
    }

    /// Whether a layer has arrived, or is on its way to a GPU.
    pub(super) fn ready(&self, layer: u32) -> Result<bool> {
        let progress = self.progress.lock();
        progress.error.clone().map_or(Ok(progress.ready[layer as usize]), Err)
    }

    /// Waits until every layer has arrived, or is on its way to a GPU where operators wait for it.
    pub(super) fn wait_on_its_way(&self) -> Result<()> {
        self.wait_until(|progress| progress.unread == 0)
    }

    /// Whether every layer has arrived, and the table knows.
    pub(super) fn is_complete(&self) -> Result<bool> {
        let progress = self.progress.lock();
        progress.error.clone().map_or(Ok(progress.left == 0), Err)
    }

    /// Waits until a layer has arrived, or is on its way to a GPU.
    pub(super) fn wait(&self, layer: u32) -> Result<()> {
        self.wait_until(|progress| progress.error.is_some() || progress.ready[layer as usize])
    }

    /// Waits until every layer has arrived, or is not going to.
    pub(super) fn wait_all(&self) -> Result<()> {
        self.wait_until(|progress| progress.left == 0)
    }

    fn wait_until(&self, done: impl Fn(&Progress) -> bool) -> Result<()> {
        let mut progress = self.progress.lock();
        self.changed.wait_while(&mut progress, |progress| !done(progress));
        progress.error.clone().map_or(Ok(()), Err)
    }

    /// Reads one layer through `read`, unless another layer has failed. Says whether it was the last one, and then how
    /// it all went.
    fn run(&self, layer: u32, read: impl FnOnce() -> Result<()>) -> Option<Result<()>> {
        let failed = self.progress.lock().error.is_some();
        let result = if failed { Ok(()) } else { read() };
        let mut progress = self.progress.lock();
        match result {
            Ok(()) => progress.ready[layer as usize] = true,
            Err(error) => progress.error = Some(error),
        }
        progress.unread -= 1;
        self.changed.notify_all();
        (progress.unread == 0).then(|| progress.error.clone().map_or(Ok(()), Err))
    }

    /// Records that what was read did not arrive.
    fn fail(&self, error: &Error) {
        self.progress.lock().error.get_or_insert_with(|| error.clone());
    }

    /// Counts a layer as done. Apart from `run`: when a wait ends, the table of owners is up to date.
    fn finish(&self) {
        self.progress.lock().left -= 1;
        self.changed.notify_all();
    }
}

/// A history and where its pages are.
pub(super) struct Incoming {
    pub(super) owner: Owner,
    pub(super) history: Box<dyn History>,
    pub(super) pages: Vec<u32>,
    pub(super) onload: Arc<Onload>,
}

/// Where tokens arrive.
pub(super) trait Destination: Send + Sync {
    /// Puts one layer of all pieces in its place, or on its way there.
    fn arrived(&self, incoming: &Incoming, layer: u32, pieces: &[&[u8]]) -> Result<()>;

    /// Waits until what is on its way is there, and the bytes are needed no more.
    fn settled(&self) -> Result<()>;

    /// Every layer is there, or the history could not be read.
    fn complete(&self, owner: Owner, result: Result<()>);
}

/// The threads that read.
pub(super) struct Readers {
    queue: Sender<Task>,
    pending: Arc<Pending>,
}

/// How many tasks are not done.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

impl Pending {
    fn add(&self, tasks: usize) {
        *self.count.lock() += tasks;
    }

    fn done(&self) {
        let mut count = self.count.lock();
        *count -= 1;
        if *count == 0 {
            self.none.notify_all();
        }
    }
}

struct Task {
    destination: Arc<dyn Destination>,
    incoming: Arc<Incoming>,
    layer: u32,
}

impl Readers {
    /// Starts them. They end when this is gone and nothing is left to read.
    pub(super) fn new(threads: u32) -> Result<Self> {
        let (queue, tasks) = channel();
        let (tasks, pending) = (Arc::new(Mutex::new(tasks)), Arc::new(Pending::default()));
        for _ in 0..threads {
            let (tasks, pending) = (Arc::clone(&tasks), Arc::clone(&pending));
            // A thread may drop the cache itself, when it has the last reference: nothing waits for its end.
            Worker::spawn("pagoda-onload", "read the store with", move || work(&tasks, &pending))?.detach();
        }
        Ok(Self { queue, pending })
    }

    /// Waits until nothing is being read.
    pub(super) fn wait(&self) {
        let mut count = self.pending.count.lock();
        self.pending.none.wait_while(&mut count, |count| *count > 0);
    }

    /// Reads histories: the first layer of each, then the second of each, and so on.
    pub(super) fn start(&self, destination: &Arc<dyn Destination>, incoming: Vec<Incoming>, layers: u32) {
        let incoming: Vec<_> = incoming.into_iter().map(Arc::new).collect();
        self.pending.add(incoming.len() * layers as usize);
        for layer in 0..layers {
            for incoming in &incoming {
                let task = Task { destination: Arc::clone(destination), incoming: Arc::clone(incoming), layer };
                self.queue.send(task).expect("the threads live as long as the queue");
            }
        }
    }
}

fn work(tasks: &Mutex<Receiver<Task>>, pending: &Pending) {
    loop {
        let task = tasks.lock().recv();
        let Ok(Task { destination, incoming, layer }) = task else { return };
        let read = || {
            let pieces = 0..incoming.history.pieces().len();
            let pieces = pieces.map(|piece| incoming.history.layer(piece, layer)).collect::<Result<Vec<_>>>()?;
            destination.arrived(&incoming, layer, &pieces)
        };
        let read = std::panic::AssertUnwindSafe(read);
        let read = || std::panic::catch_unwind(read).unwrap_or_else(|panic| Err(Error::from_panic(panic.as_ref())));
        let onload = Arc::clone(&incoming.onload);
        if let Some(result) = onload.run(layer, read) {
            // Also after an error: the layers before it may be on their way still.
            let settled = destination.settled().inspect_err(|error| onload.fail(error));
            destination.complete(incoming.owner, result.and(settled));
        }
        // Before the wait for it ends: a caller that then closes the cache closes its store with it.
        drop((destination, incoming));
        onload.finish();
        pending.done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use crate::store::Piece;

    /// A history of nothing.
    struct Empty;

    impl History for Empty {
        fn start(&self) -> u64 {
            0
        }

        fn end(&self) -> u64 {
            0
        }

        fn pieces(&self) -> &[Piece] {
            &[]
        }

        fn tag(&self, _piece: usize) -> Result<Vec<u8>> {
            unreachable!("it has no pieces")
        }

        fn layer(&self, _piece: usize, _layer: u32) -> Result<&[u8]> {
            unreachable!("it has no pieces")
        }
    }

    /// Where everything is on its way and nothing arrives.
    #[derive(Default)]
    struct Lost(Mutex<Option<Result<()>>>);

    impl Destination for Lost {
        fn arrived(&self, _incoming: &Incoming, _layer: u32, _pieces: &[&[u8]]) -> Result<()> {
            Ok(())
        }

        fn settled(&self) -> Result<()> {
            Err(Error::new(Status::Runtime, "the device is lost"))
        }

        fn complete(&self, _owner: Owner, result: Result<()>) {
            *self.0.lock() = Some(result);
        }
    }

    #[test]
    fn what_does_not_arrive_is_an_error_for_the_wait() {
        let (readers, lost, onload) = (Readers::new(2).unwrap(), Arc::new(Lost::default()), Arc::new(Onload::new(3)));
        let incoming =
            Incoming { owner: Owner(1), history: Box::new(Empty), pages: Vec::new(), onload: Arc::clone(&onload) };
        let destination: Arc<dyn Destination> = lost.clone();
        readers.start(&destination, vec![incoming], 3);
        assert_eq!(onload.wait_all().unwrap_err().status(), Status::Runtime);
        assert!(lost.0.lock().take().unwrap().is_err());
    }
}
