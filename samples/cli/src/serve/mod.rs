//! `pagoda serve`: models over HTTP.

use std::path::PathBuf;
use std::process::ExitCode;

use pagoda::Result;
use pagoda_requests::words::parse_bytes;

#[cfg(not(feature = "serve"))]
mod absent;
#[cfg(feature = "serve")]
mod present;

/// What to serve, and where.
#[derive(clap::Args)]
#[command(after_help = "\
A MODEL is a model folder or an ONNX file, or NAME=PATH. The options of models hold for the models of the command line; a
configuration file has its own for each. sdk/docs/serve.md has its fields, and the protocols.

Examples:
  pagoda serve model
  pagoda serve chat=models/smollm2 models/ranker --listen 127.0.0.1:9000 --store /var/lib/pagoda
  pagoda serve --config serve.toml

Then, with OpenAI's Python package:
  OpenAI(base_url=\"http://127.0.0.1:8000/v1\", api_key=\"none\").chat.completions.create(model=\"model\", messages=[…])

SIGTERM and Ctrl-C end the server: requests that run may end within the drain timeout; a second one ends it at once.")]
#[cfg_attr(not(feature = "serve"), allow(dead_code))]
pub struct Arguments {
    /// The models.
    #[arg(value_name = "MODEL", required_unless_present = "config", value_hint = clap::ValueHint::AnyPath)]
    models: Vec<String>,
    /// A file in TOML with models, limits and more.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// The address and the port; port 0 = one that is free. By default 127.0.0.1:8000.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// A file with API keys, one on each line: requests need one of them.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    keys_file: Option<PathBuf>,
    /// A variable of the environment with API keys, which commas part.
    #[arg(long, value_name = "NAME", conflicts_with = "keys_file")]
    keys_variable: Option<String>,
    /// How the log is written, to stderr.
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    log: Option<String>,
    /// Where the models run; auto: on a GPU if there is one that can be used.
    #[arg(long, default_value = "auto", value_name = "WHERE", value_parser = ["auto", "cpu", "cuda"], help_heading = "Options of models")]
    provider: String,
    /// Which GPU.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Options of models")]
    device: u32,
    /// Compute threads; 0 = one for each core.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Options of models")]
    threads: u32,
    /// Memory of each model for keys and values, such as 512MiB: GPU memory if it runs there.
    #[arg(long, default_value = "1GiB", value_name = "BYTES", value_parser = parse_bytes, help_heading = "Options of models")]
    cache: u64,
    /// Host memory for keys and values that leave --cache; 0 = none.
    #[arg(long, default_value = "0", value_name = "BYTES", value_parser = parse_bytes, help_heading = "Options of models")]
    host_cache: u64,
    /// Keep keys and values in this folder, each model in a folder of its name: sessions and histories survive a restart.
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath, help_heading = "Options of models")]
    store: Option<PathBuf>,
}

/// Serves until a signal ends it.
#[cfg(feature = "serve")]
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    present::run(arguments)
}

/// Says that this build can not.
#[cfg(not(feature = "serve"))]
pub fn run(_: &Arguments) -> Result<ExitCode> {
    Err(absent::error())
}
