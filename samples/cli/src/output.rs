//! Standard output, which its reader may close early, and the exit code.

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};
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

/// Writes a text that a model has generated. A terminal does not get its control characters, which it would obey.
pub fn text(text: &str) -> Result<()> {
    let harmless = if std::io::stdout().is_terminal() { harmless(text) } else { text.into() };
    write(harmless.as_bytes())
}

/// The text without control characters other than newlines and tabs.
fn harmless(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(is_harmful) { text.replace(is_harmful, "\u{fffd}").into() } else { text.into() }
}

/// What a terminal shows dimly, unless the user wants no colours (<https://no-color.org>).
pub fn dim(text: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_none_or(|value| value == "dumb");
    if plain { text.to_owned() } else { format!("\x1b[2m{text}\x1b[0m") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_get_no_control_characters() {
        assert_eq!(harmless("a\tb\n"), "a\tb\n");
        assert_eq!(harmless("\x1b[31mred\x07\u{9b}"), "\u{fffd}[31mred\u{fffd}\u{fffd}");
    }
}
