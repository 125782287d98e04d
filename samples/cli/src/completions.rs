//! `pagoda completions`: what makes a shell complete the command's words.

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
    /// The shell that is to read it.
    #[arg(value_enum)]
    shell: Known,
}

/// Those that were tried.
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
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut super::Arguments::command(), "pagoda", &mut script);
    output::write(&script)
}
