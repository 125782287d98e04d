//! `pagoda convert`: rewrites a decoder of another exporter as a model folder.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use pagoda::folder::{ConvertTo, GenerateFolder};
use pagoda::{Cancel, Result, Status, folder};

use crate::interrupts::Interrupts;
use crate::output;
use crate::progress::Progress;
use crate::words::counted;

/// The folders, and the form.
#[derive(clap::Args)]
#[command(after_help = "\
Takes ONNX decoders with past_key_values, as optimum, transformers.js and the builder of onnxruntime-genai write them.
Their attention becomes PagedAttention, for batches of sequences of any lengths, shared prefixes, policies and quantised pages. What
is not recognised is named, node by node, and OUT is not written.

Weights that lie outside the graph are not copied: OUT has hard links to the same files, or copies on another file system.

Examples:
  pagoda convert smollm2-onnx smollm2-paged
  pagoda convert smollm2-onnx smollm2-paged && pagoda generate smollm2-paged --prompt 'Once upon a time'")]
pub struct Arguments {
    /// The decoder: a folder with a graph, config.json or genai_config.json, and tokenizer.json.
    #[arg(value_name = "IN", value_hint = clap::ValueHint::DirPath)]
    from: PathBuf,
    /// The model folder that is made; it must not exist, or be empty.
    #[arg(value_name = "OUT", value_hint = clap::ValueHint::DirPath)]
    to: PathBuf,
    /// What the graph is rewritten to.
    #[arg(long = "to", value_name = "FORM", value_enum, default_value_t = Form::Paged)]
    form: Form,
}

/// The forms that there is a rewriting to.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Form {
    /// PagedAttention over pages, which Pagoda runs.
    Paged,
    /// Standard operators that read pages by Gather, for other runtimes.
    Functional,
}

/// Converts the folder, and says what it was taken for.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let cancel = Arc::new(Cancel::new());
    // Nothing may be left behind.
    let trigger = Arc::clone(&cancel);
    let interrupts = Interrupts::receive_with_termination()?;
    interrupts.set(move || trigger.trigger());
    let converted = {
        let _progress = Progress::spinner(format!("converting {}", arguments.from.display()));
        let form = match arguments.form {
            Form::Paged => ConvertTo::Paged,
            Form::Functional => ConvertTo::Functional,
        };
        folder::convert(&arguments.from, &arguments.to, form, &cancel)
    };
    match converted {
        Err(error) if error.status() == Status::Cancelled => Ok(ExitCode::from(interrupts.code())),
        converted => output::line(summary(arguments, &converted?)).map(|()| ExitCode::SUCCESS),
    }
}

fn summary(arguments: &Arguments, folder: &GenerateFolder) -> String {
    let windows = folder.attention.windows.iter().filter(|&&window| window > 0).count() as u64;
    let windows = if windows > 0 { format!(", {windows} with a window") } else { String::new() };
    let layers = counted(folder.attention.layers.into(), "layer");
    let form = folder.form.name();
    format!("{}: {} in the form {form}, {layers}{windows}", arguments.to.display(), folder.architecture)
}
