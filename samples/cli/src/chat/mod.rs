//! `pagoda chat`: a conversation with a language model.

mod commands;
mod conversation;
mod terminal;

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use pagoda::engine::{Chat, ContextEnd, FinishReason, Prompt};
use pagoda::{Cancel, GenerateRequest, GenerateResponse, Generator, Provider, Result, Status};

use crate::generate::answer::{Figures, cut};
use crate::generate::model::{ModelArguments, in_flags};
use crate::generate::sampling::SamplingArguments;
use crate::interrupts::Interrupts;
use crate::output;
use crate::words::{count, counted};
use commands::Command;
use conversation::{Conversation, message};
use terminal::Terminal;

/// The tokens of an answer if neither the command line nor the model sets a limit: a small model may never end by itself.
const MAX_NEW_TOKENS: u32 = 1024;

/// The model, and the conversation.
#[derive(clap::Args)]
#[command(after_help = "\
A line is a message; one that ends with \\ goes on in the next line. Ctrl-C stops an answer, Ctrl-D ends. Commands:
  /reset       begin a new conversation
  /save FILE   write the conversation to a file: a JSON list of messages with `role` and `content`
  /load FILE   go on with the conversation of such a file
  /help        list the commands
  /quit        end
A message that begins with / is written with //. Only answers go to stdout if that is not a terminal; figures go to stderr.

With --store a conversation goes on after a restart: its keys and values are in the store, its messages in
STORE.chats/SESSION.json, beside the store's folder.

Examples:
  pagoda chat model
  pagoda chat model --system 'Answer in one sentence.' --temperature 0.7
  pagoda chat model --store chats --session anna

Exit codes: 0 success, 1 the model could not be opened or, without a terminal, a line failed; 2 invalid usage.")]
pub struct Arguments {
    /// The model folder.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    /// What the model is told before the conversation. One that goes on keeps its own, until /reset.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The conversation in --store to go on with, or to begin; without it, the one named `chat`.
    #[arg(long, value_name = "NAME", requires = "store")]
    session: Option<String>,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    model: ModelArguments,
}

/// Talks until the input ends. The exit code says whether all messages were answered.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let interrupts = Interrupts::receive()?;
    let session = arguments.session.clone().unwrap_or_else(|| "chat".to_owned());
    let conversation = Conversation::open(arguments.system.clone(), arguments.model.store.as_deref(), &session)?;
    let generator = arguments.model.open(&arguments.folder, |_| {})?;
    let mut request = arguments.sampling.request();
    let of_model = generator.folder().generation.max_new_tokens;
    request.max_new_tokens = request.max_new_tokens.or(of_model).or(Some(MAX_NEW_TOKENS));
    request.context_end = ContextEnd::Stop;
    request.session = Some(session);
    // A model without a template is an error now, not after the first message.
    generator.tokens(&Chat::new(vec![message("user", "Hello")]).into())?;
    let talk = Talk { generator, request, conversation, interrupts, terminal: Terminal::new(), failed: false };
    talk.run()
}

struct Talk {
    generator: Generator,
    /// What all messages are sent with.
    request: GenerateRequest,
    conversation: Conversation,
    interrupts: Interrupts,
    terminal: Terminal,
    /// Whether a line of a script failed.
    failed: bool,
}

impl Talk {
    fn run(mut self) -> Result<ExitCode> {
        self.greet()?;
        while let Some(line) = self.read()? {
            let text = match Command::parse(&line) {
                Ok(Command::Say(text)) if text.trim().is_empty() => continue,
                Ok(Command::Say(text)) => text,
                Ok(Command::Quit) => break,
                Ok(command) => {
                    if let Err(error) = self.obey(command) {
                        self.complain(&error.to_string());
                    }
                    continue;
                }
                Err(error) => {
                    self.complain(&error.to_string());
                    continue;
                }
            };
            self.answer(text)?;
        }
        Ok(if self.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    fn greet(&self) -> Result<()> {
        let folder = self.generator.folder();
        let provider = self.generator.provider();
        let place = match (provider.provider, provider.device_id) {
            (Provider::Cuda, Some(device)) => format!("GPU {device}"),
            _ => "the CPU".to_owned(),
        };
        let context = count(folder.limits.max_context.into());
        let name = folder.path().file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.terminal.note(&format!("{name} on {place}, a context of {context} tokens. /help lists the commands."))?;
        if self.conversation.has_turns() {
            let file = self.conversation.file().map(|file| file.display().to_string()).unwrap_or_default();
            self.terminal.note(&format!("Going on with {} of {file}.", self.messages()))?;
            if self.conversation.is_system_ignored() {
                self.terminal.note("It keeps its own system message; /reset begins anew with that of --system.")?;
            }
        }
        self.terminal.note("")
    }

    /// The next message or command. `None` at the end of the input.
    fn read(&self) -> Result<Option<String>> {
        let terminal = self.terminal;
        self.interrupts.set(move || terminal.interrupted_at_prompt());
        let mut text = String::new();
        loop {
            self.terminal.prompt(!text.is_empty())?;
            let mut bytes = Vec::new();
            let read = std::io::stdin()
                .lock()
                .read_until(b'\n', &mut bytes)
                .map_err(|error| pagoda::Error::new(Status::Io, format!("standard input can not be read: {error}")))?;
            let line = String::from_utf8_lossy(&bytes);
            let line = line.trim_end_matches(['\n', '\r']);
            match line.strip_suffix('\\') {
                Some(part) if read > 0 => {
                    text += part;
                    text.push('\n');
                }
                _ if read == 0 && text.is_empty() => {
                    self.terminal.end_of_input()?;
                    return Ok(None);
                }
                _ => return Ok(Some(text + line)),
            }
        }
    }

    fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Reset => {
                self.generator.forget(&self.session())?;
                self.conversation.reset()?;
                self.terminal.note("A new conversation.\n")
            }
            Command::Save(file) => {
                self.conversation.save(&file)?;
                self.terminal.note(&format!("{} saved in {}.\n", self.messages(), file.display()))
            }
            Command::Load(file) => {
                self.conversation.load(&file)?;
                self.terminal.note(&format!("{} loaded from {}.\n", self.messages(), file.display()))
            }
            Command::Help => self.terminal.note(commands::HELP),
            Command::Quit | Command::Say(_) => Ok(()),
        }
    }

    fn session(&self) -> [&str; 1] {
        [self.request.session.as_deref().unwrap_or_default()]
    }

    fn messages(&self) -> String {
        counted(self.conversation.messages().len() as u64, "message")
    }

    /// Sends a message and prints the answer. Only output that can not be written to is an error.
    fn answer(&mut self, text: String) -> Result<()> {
        let mut messages = self.conversation.messages().to_vec();
        messages.push(message("user", &text));
        let cancel = Arc::new(Cancel::new());
        self.interrupts.set({
            let cancel = Arc::clone(&cancel);
            move || cancel.trigger()
        });
        let request =
            GenerateRequest { prompt: Prompt::Chat(Chat::new(messages)), cancel: Some(cancel), ..self.request.clone() };
        let mut printed = String::new();
        let outcome = self.stream(&request, &mut printed)?;
        if !printed.is_empty() && !printed.ends_with('\n') {
            output::line("")?;
        }
        let response = match outcome {
            Ok(response) => response,
            Err(error) => {
                let advice = if error.argument() == Some("prompt") { "; /reset begins a new conversation" } else { "" };
                self.complain(&format!("{error}{advice}"));
                return Ok(());
            }
        };
        let Some(choice) = response.choices.first() else { return Ok(()) };
        if choice.text.is_empty() && choice.finish_reason == FinishReason::Cancelled {
            // Two messages of the user without an answer between them are not what templates expect.
            return self.terminal.note("Stopped before the answer began; the message is not kept.\n");
        }
        if let Err(error) = self.conversation.add(&text, &choice.text) {
            self.complain(&error.to_string());
        }
        self.terminal.figures(&format!("{}{}", Figures::of(&response), cut(choice)))
    }

    /// Prints an answer as it comes. The outer error is that of printing.
    fn stream(&self, request: &GenerateRequest, printed: &mut String) -> Result<Result<GenerateResponse>> {
        let mut stream = match self.generator.stream(request) {
            Ok(stream) => stream,
            Err(error) => return Ok(Err(in_flags(error))),
        };
        for token in stream.by_ref() {
            match token {
                Ok(token) => {
                    printed.push_str(&token.text);
                    output::text(&token.text)?;
                }
                Err(error) => return Ok(Err(in_flags(error))),
            }
        }
        Ok(stream.response().map_err(in_flags))
    }

    /// Says what failed. The conversation goes on. A person saw it; a script has the exit code.
    fn complain(&mut self, error: &str) {
        self.failed |= !self.terminal.is_interactive();
        eprintln!("pagoda: {error}");
        self.terminal.gap();
    }
}
