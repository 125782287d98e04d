//! What a person at a terminal sees beside the answers. Where there is no terminal, only answers go to stdout.

use std::io::IsTerminal;

use pagoda::Result;

use crate::interrupts::end;
use crate::output;

/// Which of the streams are terminals.
#[derive(Clone, Copy)]
pub struct Terminal {
    input: bool,
    output: bool,
}

impl Terminal {
    /// Those of this process.
    pub fn new() -> Self {
        Self { input: std::io::stdin().is_terminal(), output: std::io::stdout().is_terminal() }
    }

    /// Whether a person types and reads.
    pub fn is_interactive(self) -> bool {
        self.input && self.output
    }

    /// Asks for a line. `more`: for another one of the same message.
    pub fn prompt(self, more: bool) -> Result<()> {
        match self.is_interactive() {
            true => output::write(if more { b"| " } else { b"> " }),
            false => Ok(()),
        }
    }

    /// Ctrl-C while nothing is generated: the line that was begun is dropped by the terminal. A script ends.
    pub fn interrupted_at_prompt(self) {
        if !self.is_interactive() {
            end();
        }
        let _ = output::line(format!("\n{}", output::dim("Ctrl-D or /quit ends.")));
        let _ = self.prompt(false);
    }

    /// Ctrl-D leaves the cursor behind the prompt.
    pub fn end_of_input(self) -> Result<()> {
        if self.is_interactive() { output::line("") } else { Ok(()) }
    }

    /// Tells a person something.
    pub fn note(self, text: &str) -> Result<()> {
        if !self.is_interactive() || text.is_empty() {
            return if self.is_interactive() { output::line("") } else { Ok(()) };
        }
        output::line(match text.strip_suffix('\n') {
            Some(text) => format!("{}\n", output::dim(text)),
            None => output::dim(text),
        })
    }

    /// The figures of an answer: on stderr, unless a terminal shows them dimly.
    pub fn figures(self, text: &str) -> Result<()> {
        if self.output {
            return output::line(format!("{}\n", output::dim(text)));
        }
        eprintln!("{text}");
        Ok(())
    }

    /// An empty line after what stderr said.
    pub fn gap(self) {
        if self.is_interactive() {
            let _ = output::line("");
        }
    }
}
