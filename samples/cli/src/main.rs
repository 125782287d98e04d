//! The `pagoda` command.

mod bench;
mod memory;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Inference for models that remember.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure: each row is a figure, the baseline measured in the same run, and the ratio (how many times as good).
    Bench(bench::Arguments),
    /// Look at a host store, check it, make its index anew, give space back.
    Store(store::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Store(arguments) => store::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagoda: {error}");
            ExitCode::FAILURE
        }
    }
}
