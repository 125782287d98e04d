//! What a line of the user is: a message, or a command.

use std::path::PathBuf;

use pagoda::{Error, Result};
use pagoda_requests::words::did_you_mean;

/// What /help says.
pub const HELP: &str = "\
/reset       begin a new conversation
/save FILE   write the conversation to a file, as JSON
/load FILE   go on with the conversation of such a file
/help        this list
/quit        end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; a message that begins with / is written with //.
";

const COMMANDS: [&str; 5] = ["/reset", "/save", "/load", "/help", "/quit"];

/// A line of the user.
#[derive(Debug, PartialEq)]
pub enum Command {
    /// A message for the model.
    Say(String),
    /// Begin a new conversation.
    Reset,
    /// Write the conversation.
    Save(PathBuf),
    /// Read a conversation.
    Load(PathBuf),
    /// List the commands.
    Help,
    /// End.
    Quit,
}

impl Command {
    /// Reads a line.
    pub fn parse(line: &str) -> Result<Self> {
        let text = line.trim();
        if !text.starts_with('/') {
            return Ok(Self::Say(line.to_owned()));
        }
        if let Some(rest) = text.strip_prefix("//") {
            return Ok(Self::Say(format!("/{rest}")));
        }
        let (word, argument) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let argument = argument.trim();
        let command = match word {
            "/save" | "/load" if argument.is_empty() => {
                return Err(Error::invalid(word, format!("it needs a file: {word} talk.json")));
            }
            "/save" => return Ok(Self::Save(path(argument))),
            "/load" => return Ok(Self::Load(path(argument))),
            "/reset" => Self::Reset,
            "/help" => Self::Help,
            "/quit" | "/exit" => Self::Quit,
            _ => {
                let message = format!(
                    "no such command{}; a message that begins with / is written with //",
                    did_you_mean(word, &COMMANDS)
                );
                return Err(Error::invalid(word, message));
            }
        };
        if !argument.is_empty() {
            return Err(Error::invalid(word, format!("it takes nothing more, and {argument:?} follows")));
        }
        Ok(command)
    }
}

/// A path with `~/` as shells have it.
fn path(text: &str) -> PathBuf {
    match (text.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, command) in [
            ("Hello", Command::Say("Hello".into())),
            ("  two  ", Command::Say("  two  ".into())),
            ("//etc is a folder", Command::Say("/etc is a folder".into())),
            ("/reset", Command::Reset),
            (" /help ", Command::Help),
            ("/exit", Command::Quit),
            ("/save my talk.json", Command::Save("my talk.json".into())),
            ("/load a.json", Command::Load("a.json".into())),
        ] {
            assert_eq!(Command::parse(line).unwrap(), command, "{line}");
        }
        for (line, message) in [
            ("/save", "/save: it needs a file"),
            ("/rest", "/rest: no such command; did you mean `/reset`?"),
            ("/etc/passwd", "/etc/passwd: no such command; there is `/reset`"),
            ("/quit now", "/quit: it takes nothing more, and \"now\" follows"),
        ] {
            let error = Command::parse(line).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
