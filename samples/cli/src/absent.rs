//! A verb whose part was left out of this build (features `llm` and `serve`).

use std::process::ExitCode;

use pagoda::{Error, Result, Status};

/// Anything.
#[derive(clap::Args)]
pub struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _any: Vec<String>,
}

/// Says so, and how to get it.
pub fn run(_: &Arguments) -> Result<ExitCode> {
    let message =
        "this command was built without that part, as `make demo` builds it: `make build` builds one with everything";
    Err(Error::new(Status::Unsupported, message))
}
