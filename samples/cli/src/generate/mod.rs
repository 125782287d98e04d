//! `pagoda generate`: prompts in, text out.

pub mod answer;
mod beams;
mod grammar;
pub mod model;
pub mod sampling;
mod submit;

use std::collections::VecDeque;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use pagoda::engine::{Chat, Event, Prompt, Token};
use pagoda::json::Json;
use pagoda::{Cancel, Error, GenerateRequest, GenerateResponse, Generator, Result, Status};
use pagoda_requests::fields::plain;
use pagoda_requests::generate::{context_end, read_messages};

use crate::interrupts::{INTERRUPTED, Interrupts, end};
use crate::output;
use crate::progress::Progress;
use crate::source::Source;
use crate::words::counted;
use answer::{Answer, Failed, Figures, TokenObject, cut};
use beams::BeamArguments;
use grammar::GrammarArguments;
use model::{BatchArguments, ModelArguments, in_flags};
use sampling::SamplingArguments;
use submit::{Begun, Message, Room, Submit};

/// The prompts, and how to answer them.
#[derive(clap::Args)]
#[command(after_help = "\
A request of --requests is a JSON object on one line:
  {\"id\": \"a\", \"prompt\": \"Once upon a time\", \"max_new_tokens\": 32, \"temperature\": 0.7, \"seed\": 1}
  {\"id\": \"b\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"session\": \"anna\"}
The options of answers hold for the lines that do not say otherwise. sdk/docs/generate.md has all fields. Requests run
together and are answered in order. A line may have up to 64 MiB.

Examples:
  pagoda generate model --prompt 'The capital of France is' --max-new-tokens 16 --stream
  pagoda generate model --messages '[{\"role\": \"user\", \"content\": \"Hello\"}]' --json
  pagoda generate model --prompt 'Ada Lovelace:' --json-schema person.json
  pagoda generate model --requests requests.jsonl --json > answers.jsonl

Exit codes: 0 all were answered, 1 something failed (a bad line fails alone, the others are answered), 2 invalid usage,
130 interrupted: Ctrl-C ends all answers, which are printed as far as they came.")]
pub struct Arguments {
    /// The model folder.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    #[command(flatten)]
    input: Input,
    /// The tools that the model may call, for --messages: a JSON list.
    #[arg(long, value_name = "JSON")]
    tools: Option<String>,
    /// Print text as it comes; with --json, an object for each token too.
    #[arg(long)]
    stream: bool,
    /// One JSON object a line, for each request.
    #[arg(long)]
    json: bool,
    /// Print answers as they end, not in the order of their requests.
    #[arg(long)]
    unordered: bool,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// The number of answers to each prompt.
    #[arg(long, short = 'n', value_name = "N")]
    n: Option<u32>,
    /// With --json: log probabilities of the tokens, and of so many likeliest tokens in their places.
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    #[arg(long, value_name = "N", requires = "json")]
    prompt_logprobs: Option<u32>,
    /// Begin the text of answers with the prompt.
    #[arg(long)]
    echo: bool,
    /// The conversation that the prompt belongs to: its keys and values are kept, with --store for the next command too.
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// Requests of higher priority run first.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// What happens if prompt and answer do not fit into the context of the model: the request is refused, or the answer
    /// stops there.
    #[arg(long, default_value = "refuse", value_name = "WHAT", value_parser = ["refuse", "stop"])]
    context_end: String,
    #[command(flatten)]
    grammar: GrammarArguments,
    #[command(flatten)]
    beams: BeamArguments,
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    batches: BatchArguments,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// The text to continue.
    #[arg(long, short = 'p', value_name = "TEXT")]
    prompt: Option<String>,
    /// The file with the text to continue; `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    prompt_file: Option<PathBuf>,
    /// The messages of a chat: a JSON list of objects with `role` and `content`.
    #[arg(long, value_name = "JSON")]
    messages: Option<String>,
    /// The file with requests, one JSON object a line; `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    requests: Option<PathBuf>,
}

/// Answers every request. The exit code says whether all succeeded.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let interrupts = Interrupts::receive()?;
    let defaults = defaults(arguments)?;
    let prompt = arguments.input.prompt(arguments.tools.as_deref())?;
    let source = arguments.input.requests.as_deref().map(Source::open).transpose()?;
    // Enough for full batches while an early request takes long; few enough for any number of lines.
    let room = arguments.batches.max_batch.saturating_mul(4);
    let generator = arguments.model.open(&arguments.folder, |options| {
        arguments.batches.set(options);
        options.queue = room.saturating_mul(submit::MOST_ANSWERS);
    })?;
    let generator = Arc::new(generator);
    let (sender, messages) = channel();
    let cancel = Arc::new(Cancel::new());
    let mut again = false;
    interrupts.set({
        let (cancel, sender) = (Arc::clone(&cancel), sender.clone());
        move || {
            if std::mem::replace(&mut again, true) {
                end();
            }
            cancel.trigger();
            let _ = sender.send(Message::Interrupted);
        }
    });
    let progress = match &source {
        _ if arguments.stream => None,
        Some(source) => source.progress("generating"),
        None => Some(Progress::spinner("generating")),
    };
    let room = Arc::new(Room::new(room));
    let submit = Submit {
        generator: Arc::downgrade(&generator),
        defaults: GenerateRequest { cancel: Some(cancel), ..defaults },
        // Without tokens, callbacks would be called for nothing.
        tokens: arguments.stream,
        messages: sender,
        room: Arc::clone(&room),
    };
    let alone = source.is_none();
    match source {
        Some(source) => submit.start(source)?,
        None => submit.one(prompt.unwrap_or_default()),
    }
    Generating {
        arguments,
        generator: &generator,
        alone,
        progress,
        room,
        waiting: VecDeque::new(),
        first: 0,
        failed: false,
        interrupted: false,
    }
    .run(&messages)
}

fn defaults(arguments: &Arguments) -> Result<GenerateRequest> {
    Ok(GenerateRequest {
        logprobs: arguments.logprobs,
        prompt_logprobs: arguments.prompt_logprobs,
        n: arguments.n,
        echo: arguments.echo,
        session: arguments.session.clone(),
        priority: arguments.priority.unwrap_or(0),
        context_end: context_end(&arguments.context_end).unwrap_or_default(),
        grammar: arguments.grammar.grammar()?,
        beams: arguments.beams.options(),
        ..arguments.sampling.request()
    })
}

impl Input {
    /// The prompt, unless there is a file with requests.
    fn prompt(&self, tools: Option<&str>) -> Result<Option<Prompt>> {
        if tools.is_some() && self.messages.is_none() {
            return Err(Error::invalid("--tools", "given without --messages, which it belongs to"));
        }
        if let Some(text) = &self.prompt {
            return Ok(Some(text.as_str().into()));
        }
        if let Some(path) = &self.prompt_file {
            return read_text(path).map(|text| Some(text.into()));
        }
        let Some(messages) = &self.messages else { return Ok(None) };
        let parse = |flag: &str, text: &str| -> Result<Json> {
            serde_json::from_str(text).map_err(|error| Error::invalid(flag, format!("not JSON: {error}")))
        };
        let mut chat = Chat::new(read_messages("--messages", &parse("--messages", messages)?)?);
        if let Some(tools) = tools {
            chat.tools = Some(plain("--tools", &parse("--tools", tools)?)?);
        }
        Ok(Some(chat.into()))
    }
}

fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    read.map_err(|error| {
        let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be read: {error}", path.display())).about("--prompt-file")
    })
}

/// A request in flight.
struct Waiting {
    begun: Begun,
    /// The streamed text of the first answer that could not be printed yet.
    text: String,
    /// Whether the first answer was streamed, or at least its beginning.
    has_heading: bool,
    /// Whether what was printed of it ends with a newline.
    at_line_start: bool,
    /// How it ended, until that is printed.
    outcome: Option<Result<GenerateResponse>>,
    is_printed: bool,
}

struct Generating<'a> {
    arguments: &'a Arguments,
    generator: &'a Generator,
    /// Whether there is one request, of the command line.
    alone: bool,
    progress: Option<Progress>,
    room: Arc<Room>,
    /// In the order of their requests.
    waiting: VecDeque<Waiting>,
    /// The number of the first of them.
    first: u64,
    failed: bool,
    interrupted: bool,
}

impl Generating<'_> {
    fn run(mut self, messages: &Receiver<Message>) -> Result<ExitCode> {
        let mut all_begun = false;
        while !(all_begun && self.waiting.is_empty()) {
            let message = messages.recv().map_err(|_| {
                Error::new(Status::Internal, "a bug in Pagoda, please report it: a request was dropped unanswered")
            })?;
            match message {
                Message::Begun(begun) => self.begin(begun),
                Message::Event(number, Event::Token(token)) => self.token(number, &token)?,
                Message::Event(number, Event::End(outcome)) => self.end(number, outcome)?,
                Message::AllBegun(read) => {
                    read?;
                    all_begun = true;
                }
                // The thread that reads requests may wait for its input for ever.
                Message::Interrupted => (all_begun, self.interrupted) = (true, true),
            }
        }
        Ok(match (self.interrupted, self.failed) {
            (true, _) => ExitCode::from(INTERRUPTED),
            (false, true) => ExitCode::FAILURE,
            (false, false) => ExitCode::SUCCESS,
        })
    }

    fn begin(&mut self, begun: Begun) {
        if let Some(progress) = &self.progress {
            progress.reached(begun.read);
        }
        self.waiting.push_back(Waiting {
            begun,
            text: String::new(),
            has_heading: false,
            at_line_start: true,
            outcome: None,
            is_printed: false,
        });
    }

    fn token(&mut self, number: u64, token: &Token) -> Result<()> {
        let at = (number - self.first) as usize;
        let waiting = &mut self.waiting[at];
        if self.arguments.json {
            return output::json(&TokenObject::new(&waiting.begun.id, token, self.generator.tokenizer()));
        }
        // The others follow when the first one has ended.
        if token.choice == 0 && !self.arguments.unordered {
            waiting.text.push_str(&token.text);
        }
        if at == 0 { self.print_streamed() } else { Ok(()) }
    }

    /// Prints what has come of the first answer of the first request.
    fn print_streamed(&mut self) -> Result<()> {
        let Some(waiting) = self.waiting.front_mut() else { return Ok(()) };
        let text = std::mem::take(&mut waiting.text);
        if text.is_empty() {
            return Ok(());
        }
        if !std::mem::replace(&mut waiting.has_heading, true) {
            let heading = self.heading(0, 0);
            if !heading.is_empty() {
                output::line(heading + ":")?;
            }
        }
        self.write(0, &text)
    }

    fn end(&mut self, number: u64, outcome: Result<GenerateResponse>) -> Result<()> {
        let at = (number - self.first) as usize;
        self.waiting[at].outcome = Some(outcome.map_err(in_flags));
        if self.arguments.unordered {
            self.print(at)?;
        }
        while self.waiting.front().is_some_and(|first| first.outcome.is_some() || first.is_printed) {
            self.print(0)?;
            self.waiting.pop_front();
            self.first += 1;
            self.room.leave();
            self.print_streamed()?;
        }
        Ok(())
    }

    /// Prints a request that has ended, once.
    fn print(&mut self, at: usize) -> Result<()> {
        let waiting = &mut self.waiting[at];
        waiting.is_printed = true;
        let Some(outcome) = waiting.outcome.take() else { return Ok(()) };
        let progress = self.progress.take();
        let print = || match outcome {
            Ok(response) if self.arguments.json => {
                output::json(&Answer::new(&self.waiting[at].begun.id, &response, self.generator.tokenizer()))
            }
            Ok(response) => self.print_text(at, &response),
            Err(error) => self.print_error(at, &error),
        };
        let printed = match &progress {
            Some(progress) => progress.aside(print),
            None => print(),
        };
        self.progress = progress;
        printed
    }

    fn print_error(&mut self, at: usize, error: &Error) -> Result<()> {
        self.failed = true;
        if self.arguments.json {
            let begun = &self.waiting[at].begun;
            return output::json(&Failed::new(&begun.id, begun.line, error));
        }
        self.end_line(at)?;
        if self.alone {
            eprintln!("pagoda: {error}");
        } else {
            eprintln!("pagoda: line {}: {error}", self.waiting[at].begun.line);
        }
        Ok(())
    }

    /// The text of each answer.
    fn print_text(&mut self, at: usize, response: &GenerateResponse) -> Result<()> {
        let figures = Figures::of(response).to_string();
        for (number, choice) in response.choices.iter().enumerate() {
            if number == 0 && self.waiting[at].has_heading {
                self.end_line(at)?;
                continue;
            }
            let heading = self.heading(at, number);
            if !heading.is_empty() {
                let tokens = counted(choice.tokens.len() as u64, "token");
                let about = match (response.choices.len(), number) {
                    (1, _) => format!("{figures}{}", cut(choice)),
                    (_, 0) => format!("{tokens}{}; together {figures}", cut(choice)),
                    _ => tokens + cut(choice),
                };
                output::line(format!("{heading}: {about}"))?;
            }
            self.write(at, &choice.text)?;
            self.end_line(at)?;
        }
        if !self.alone {
            return output::line("");
        }
        if std::io::stderr().is_terminal() {
            let cut = response.choices.first().map(cut).unwrap_or_default();
            eprintln!("{}", output::dim(&format!("{figures}{cut}")));
        }
        Ok(())
    }

    /// What names an answer where there are several.
    fn heading(&self, at: usize, choice: usize) -> String {
        let Begun { line, id, answers, .. } = &self.waiting[at].begun;
        let mut parts = Vec::new();
        if !self.alone {
            parts.push(format!("line {line}"));
            if id.as_u64() != Some(*line) {
                parts.push(id.to_string());
            }
        }
        if *answers > 1 {
            parts.push(format!("answer {} of {answers}", choice + 1));
        }
        parts.join(", ")
    }

    /// Ends the line of a text that does not end it.
    fn end_line(&mut self, at: usize) -> Result<()> {
        if std::mem::replace(&mut self.waiting[at].at_line_start, true) { Ok(()) } else { output::line("") }
    }

    fn write(&mut self, at: usize, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.waiting[at].at_line_start = text.ends_with('\n');
        output::text(text)
    }
}
