//! Standard output, which may be closed by whoever reads it.

use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use pagoda::{Error, Result, Status};
use serde::Serialize;

static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether a write failed since no one reads on.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Writes a line. `println!` would panic where the reader has gone.
pub fn line(text: impl AsRef<str>) -> Result<()> {
    write(format!("{}\n", text.as_ref()).as_bytes())
}

/// Writes one JSON object on a line of its own.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value);
    line(text.map_err(|error| Error::new(Status::Internal, format!("an answer can not be put into JSON: {error}")))?)
}

/// Writes and hands over at once: whoever waits for an answer at the other end of a pipe gets it now.
pub fn write(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| {
        CLOSED.store(error.kind() == ErrorKind::BrokenPipe, Ordering::Relaxed);
        Error::new(Status::Io, format!("standard output can not be written to: {error}"))
    })
}
