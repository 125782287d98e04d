//! A build without the server.

use pagoda::{Error, Status};

/// Says so, and how to get one.
pub fn error() -> Error {
    let message = "this build of the command has no server: `cargo build --release -p pagoda-cli` builds one with it";
    Error::new(Status::Unsupported, message)
}
