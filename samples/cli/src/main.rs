//! The `pagoda` command.

#[cfg(not(all(feature = "llm", feature = "serve")))]
mod absent;
#[cfg(feature = "llm")]
mod chat;
mod completions;
#[cfg(feature = "llm")]
mod convert;
mod demo;
#[cfg(feature = "llm")]
mod generate;
mod inspect;
#[cfg(feature = "llm")]
mod interrupts;
mod rank;
#[cfg(feature = "serve")]
mod serve;
mod source;
mod store;
mod words;

use std::process::ExitCode;

#[cfg(not(feature = "serve"))]
use absent as serve;
#[cfg(not(feature = "llm"))]
use absent::{self as chat, self as convert, self as generate};
use clap::{Parser, Subcommand};
use pagoda_cli::{bench, output, progress};

/// Inference for models that remember.
///
/// Inspects and converts model folders, ranks candidates and generates text with them, serves them, maintains stores, and runs benchmarks.
#[derive(Parser)]
#[command(name = "pagoda", version, about, after_help = EXIT_CODES, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  failure; a line on stderr says what failed and what to do
  2  invalid command line

`pagoda help <command>` has an example for each. Progress is shown on stderr if that is a terminal.";

#[derive(Subcommand)]
// There is only one.
#[allow(clippy::large_enum_variant)]
enum Command {
    /// Rank candidates for users: one request a line in, one answer a line out.
    Rank(rank::Arguments),
    /// Generate text: a prompt, the messages of a chat, or many requests, one a line.
    Generate(generate::Arguments),
    /// Talk with a language model: answers come as they are generated, the conversation is remembered.
    Chat(chat::Arguments),
    /// Serve models over HTTP, by OpenAI's protocol.
    Serve(serve::Arguments),
    /// Rewrite an ONNX decoder of another exporter for pages, as a model folder.
    Convert(convert::Arguments),
    /// Describe a model folder: what the model is and takes, limits, estimated memory, whether its files are intact.
    Inspect(inspect::Arguments),
    /// Replay MovieLens-100K: recommendations, what the cache saves, and the same AUC as the training framework.
    Demo(demo::Arguments),
    /// Run a benchmark: each row is a figure, the baseline of the same run, and the ratio (how many times as good).
    Bench(bench::Arguments),
    /// Show, check, rebuild the index of, or compact a host store.
    Store(store::Arguments),
    /// Print the completion script of a shell.
    Completions(completions::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Rank(arguments) => rank::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Chat(arguments) => chat::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Bench(_) => Err(bench::exec()),
        Command::Store(arguments) => store::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Completions(arguments) => completions::run(&arguments).map(|()| ExitCode::SUCCESS),
    };
    output::exit(result)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_made() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        fn visit(command: &clap::Command, path: &str) {
            for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
                let path = format!("{path} {}", inner.get_name());
                let help = inner.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains(&path), "`{path} --help` has no example");
                visit(inner, &path);
            }
        }
        visit(&Arguments::command(), "pagoda");
    }
}
