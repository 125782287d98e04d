//! `pagoda inspect`: describes a model folder.

mod generate;
mod page;
mod rank;

use std::path::PathBuf;

use pagoda::folder::{AnyFolder, FolderContents};
use pagoda::{Error, Result, Status};
use serde::Serialize;

use crate::output;
use crate::progress::Progress;

/// The folder, and the number of users.
#[derive(clap::Args)]
#[command(after_help = "\
Reads every file and fails if one is missing, cut or changed, or has weights that are not finite.

Examples:
  pagoda inspect model
  pagoda inspect model --users 1000000 --events 200
  pagoda inspect model --json | jq .memory")]
pub struct Arguments {
    /// The model folder, as `python -m pagoda.export` writes it: a ranking model or a language model. Or a decoder of another exporter:
    /// an ONNX graph with past tensors, config.json or genai_config.json, and tokenizer.json.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    /// The number of users for the memory estimate of a ranking model; the default is 1000.
    #[arg(long, value_name = "N")]
    users: Option<u64>,
    /// The events of a user for the memory estimate; the default is the limit of the model.
    #[arg(long, value_name = "N")]
    events: Option<u64>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// Checks the folder and prints the report.
pub fn run(arguments: &Arguments) -> Result<()> {
    let folder = {
        let _progress = Progress::spinner(format!("reading {}", arguments.folder.display()));
        AnyFolder::open(&arguments.folder)?
    };
    match &folder {
        AnyFolder::Rank(folder) => {
            let report = rank::Report::new(folder, arguments.users.unwrap_or(1000), arguments.events);
            print(arguments, &report, rank::Report::text)
        }
        AnyFolder::Generate(folder) => {
            for (option, given) in [("--users", arguments.users), ("--events", arguments.events)] {
                if given.is_some() {
                    let message = "it is for ranking models, and this is a language model: leave it out";
                    return Err(Error::invalid(option, message));
                }
            }
            print(arguments, &generate::Report::new(folder), generate::Report::text)
        }
        _ => {
            let message = format!("folders of the kind {:?} have no report", folder.kind.name());
            Err(Error::new(Status::Unsupported, message).about("folder"))
        }
    }
}

fn print<R: Serialize>(arguments: &Arguments, report: &R, text: impl Fn(&R) -> String) -> Result<()> {
    if arguments.json { output::json(report) } else { output::write(text(report).as_bytes()) }
}

#[derive(Serialize)]
struct File<'a> {
    name: &'a str,
    bytes: u64,
    sha256: &'a str,
}

impl<'a> File<'a> {
    fn all(folder: &'a FolderContents) -> Vec<Self> {
        folder.files.iter().map(|file| Self { name: &file.name, bytes: file.bytes, sha256: &file.sha256 }).collect()
    }
}
