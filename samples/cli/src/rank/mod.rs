//! `pagoda rank`: one request a line in, one answer a line out.

mod answer;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use pagoda::engine::EngineStore;
use pagoda::{Engine, EngineOptions, Error, KvFormat, KvSize, ModelOptions, Offload, RankResponse, Result, Status};
use pagoda_requests::rank::{Answer, Failed, Features, Line};
use pagoda_requests::words::parse_bytes;

use crate::output;
use crate::progress::Progress;
use crate::source::{self, Next, Source};
use crate::words::KV_FORMATS;

/// The requests, and how to answer them.
#[derive(clap::Args)]
#[command(after_help = "\
A request is a JSON object on one line. For a model with the features `movie` and `rating`:
  {\"user\": 7, \"events\": {\"movie\": [50, 181], \"rating\": [5, 4]}, \"candidates\": [172, 210, 98]}
`pagoda inspect` names the features of a model; sdk/docs/cli.md has all fields. With \"start\": 2 the events begin at event
2 of the history, counted from 0; without it they are the whole history. A line may have up to 64 MiB.

Examples:
  pagoda rank model --requests requests.jsonl --top 3
  pagoda rank model --store /var/lib/ranker/histories --json < requests.jsonl > answers.jsonl

Exit codes: 0 all were answered, 1 something failed (a bad line fails alone, the others are answered), 2 invalid usage.")]
pub struct Arguments {
    /// The model folder.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    /// The file with the requests; `-` is standard input.
    #[arg(long, default_value = "-", value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    requests: PathBuf,
    /// How many of the best candidates to show for each task; 0 = all.
    #[arg(long, default_value_t = 10, value_name = "K")]
    top: usize,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Keep the keys and values of histories in this folder, and use those that are there.
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    store: Option<PathBuf>,
    /// Memory for the keys and values of histories, such as 512MiB; 0 = compute each history in full.
    #[arg(long, default_value = "1GiB", value_name = "BYTES", value_parser = parse_bytes)]
    cache: u64,
    /// How keys and values are kept; by default as the model was exported. int8 takes about two sevenths of the memory of f32.
    #[arg(long, value_name = "FORMAT", value_parser = KV_FORMATS)]
    kv_format: Option<String>,
    /// The number of requests in flight; with more than one they share batches.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    at_once: u32,
    /// Compute threads; 0 = one for each core.
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: u32,
}

/// Answers every request. The exit code says whether all succeeded.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut source = Source::open(&arguments.requests)?;
    let engine = {
        let _progress = Progress::spinner(format!("opening {}", arguments.folder.display()));
        Engine::open(&arguments.folder, options(arguments))?
    };
    let mut ranking = Ranking::new(arguments, &engine);
    let progress = source.progress("ranking");
    let mut line = Vec::new();
    loop {
        match source.next(&mut line)? {
            Next::End => break,
            Next::TooLong => ranking.refuse(source.number, source::too_long("send events in parts, with `start`")),
            Next::Line if line.trim_ascii().is_empty() => {}
            Next::Line => ranking.submit(source.number, &line),
        }
        while ranking.waiting.len() >= arguments.at_once as usize {
            ranking.answer_next(progress.as_ref())?;
        }
        if let Some(progress) = &progress {
            progress.reached(source.read);
        }
    }
    while !ranking.waiting.is_empty() {
        ranking.answer_next(progress.as_ref())?;
    }
    Ok(if ranking.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn options(arguments: &Arguments) -> EngineOptions {
    EngineOptions {
        model: ModelOptions { intra_op_threads: arguments.threads, ..ModelOptions::default() },
        kv_size: (arguments.cache > 0).then_some(KvSize::Bytes(arguments.cache)),
        kv_format: arguments.kv_format.as_deref().and_then(KvFormat::named),
        store: arguments.store.clone().map(EngineStore::new),
        // Committed histories survive the end of this process.
        offload: Offload::AtCommit,
        ..EngineOptions::default()
    }
}

/// A request in flight, or its error.
struct Waiting {
    number: u64,
    request: Result<Handed>,
}

/// A request that was sent to the engine.
struct Handed {
    line: Line,
    since: Instant,
    /// The answer, and the time of its arrival.
    answer: Receiver<(Result<RankResponse>, Instant)>,
}

struct Ranking<'a> {
    arguments: &'a Arguments,
    engine: &'a Engine,
    features: Features,
    tasks: Vec<String>,
    /// In the order of their lines.
    waiting: VecDeque<Waiting>,
    failed: bool,
}

impl<'a> Ranking<'a> {
    fn new(arguments: &'a Arguments, engine: &'a Engine) -> Self {
        let folder = engine.folder();
        let tasks = folder.tasks.iter().map(|task| task.name.clone()).collect();
        Self { arguments, engine, features: Features::of(&folder), tasks, waiting: VecDeque::new(), failed: false }
    }

    fn submit(&mut self, number: u64, text: &[u8]) {
        let request = self.begin(text);
        self.waiting.push_back(Waiting { number, request });
    }

    fn refuse(&mut self, number: u64, error: Error) {
        self.waiting.push_back(Waiting { number, request: Err(error) });
    }

    fn begin(&self, text: &[u8]) -> Result<Handed> {
        let text = std::str::from_utf8(text);
        let text = text.map_err(|error| Error::invalid("request", format!("not UTF-8: {error}")))?;
        let line = Line::parse(text.trim(), &self.features)?;
        let request = line.request();
        let (sender, answer) = sync_channel(1);
        let since = Instant::now();
        if self.arguments.at_once == 1 {
            // On this thread.
            let result = self.engine.rank(&request);
            let _ = sender.send((result, Instant::now()));
        } else {
            self.engine.rank_async(&request, move |result| {
                let _ = sender.send((result, Instant::now()));
            })?;
        }
        Ok(Handed { line, since, answer })
    }

    /// Waits for the oldest request and prints its answer.
    fn answer_next(&mut self, progress: Option<&Progress>) -> Result<()> {
        let Some(waiting) = self.waiting.pop_front() else { return Ok(()) };
        let number = waiting.number;
        let answered = waiting.request.and_then(|Handed { line, since, answer }| {
            let (result, end) = answer.recv().map_err(|_| {
                Error::new(Status::Internal, "a bug in Pagoda, please report it: a request was dropped unanswered")
            })?;
            Ok((line, result?, end - since))
        });
        let print = || match &answered {
            Ok((line, response, took)) => self.print(number, line, response, *took),
            Err(error) if self.arguments.json => output::json(&Failed::new(number, error)),
            Err(error) => {
                eprintln!("pagoda: line {number}: {error}");
                Ok(())
            }
        };
        let printed = match progress {
            Some(progress) => progress.aside(print),
            None => print(),
        };
        self.failed |= answered.is_err();
        printed
    }

    fn print(&self, number: u64, line: &Line, response: &RankResponse, took: Duration) -> Result<()> {
        let answer = Answer {
            number: Some(number),
            line,
            tasks: &self.tasks,
            scores: &response.scores,
            cached_rows: response.cached_rows,
            computed_rows: response.computed_rows,
            took,
            top: self.arguments.top,
        };
        if self.arguments.json {
            output::json(&answer.json())
        } else {
            output::write(answer::table(&answer, number).as_bytes())
        }
    }
}
