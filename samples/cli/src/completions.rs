//! `pagoda completions`: completion scripts for shells.

use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;
use pagoda::Result;

use crate::output;

/// Which shell.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagoda completions bash > ~/.local/share/bash-completion/completions/pagoda
  pagoda completions zsh  > ~/.zfunc/_pagoda        (with fpath+=~/.zfunc in ~/.zshrc, before compinit)
  pagoda completions fish > ~/.config/fish/completions/pagoda.fish")]
pub struct Arguments {
    /// The shell.
    #[arg(value_enum)]
    shell: Known,
}

/// The shells that were tested.
#[derive(Clone, Copy, ValueEnum)]
enum Known {
    Bash,
    Zsh,
    Fish,
}

/// Prints the shell's script.
pub fn run(arguments: &Arguments) -> Result<()> {
    let shell = match arguments.shell {
        Known::Bash => Shell::Bash,
        Known::Zsh => Shell::Zsh,
        Known::Fish => Shell::Fish,
    };
    let (mut script, mut command) = (Vec::new(), super::Arguments::command());
    clap_complete::generate(shell, &mut command, "pagoda", &mut script);
    if shell == Shell::Fish {
        script.extend(words_for_fish(&command).into_bytes());
    }
    output::write(&script)
}

/// The values of positional arguments, such as the names of benchmarks: clap leaves them out of the script for fish.
fn words_for_fish(command: &clap::Command) -> String {
    let mut lines = String::new();
    for inner in command.get_subcommands() {
        let words = inner.get_positionals().flat_map(clap::Arg::get_possible_values);
        for word in words.filter(|word| !word.is_hide_set()) {
            let help = word.get_help().map(ToString::to_string).unwrap_or_default();
            let help = help.replace('\\', r"\\").replace('\'', r"\'");
            let (inner, word) = (inner.get_name(), word.get_name());
            lines += &format!(
                "complete -c pagoda -n \"__fish_pagoda_using_subcommand {inner}\" -f -a \"{word}\" -d '{help}'\n"
            );
        }
    }
    lines
}
