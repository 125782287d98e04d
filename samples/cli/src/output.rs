//! Standard output, which its reader may close early, and the exit code.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use pagoda::{Error, Result, Status};
use serde::Serialize;

static CLOSED: AtomicBool = AtomicBool::new(false);

/// The exit code of a command. An error is a line on stderr. If the reader closed our output early, as `head` does, it
/// is a success.
pub fn exit(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        if CLOSED.load(Ordering::Relaxed) {
            return ExitCode::SUCCESS;
        }
        eprintln!("pagoda: {error}");
        ExitCode::FAILURE
    })
}

/// Writes a line. `println!` would panic if the reader has closed the pipe.
pub fn line(text: impl AsRef<str>) -> Result<()> {
    write(format!("{}\n", text.as_ref()).as_bytes())
}

/// Writes one JSON object on a line of its own.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value);
    line(text.map_err(|error| Error::new(Status::Internal, format!("an answer can not be put into JSON: {error}")))?)
}

/// Writes and flushes: the reader at the other end of a pipe gets an answer at once.
pub fn write(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| {
        CLOSED.store(error.kind() == ErrorKind::BrokenPipe, Ordering::Relaxed);
        Error::new(Status::Io, format!("standard output can not be written to: {error}"))
    })
}
