//! What HTTP adds to a streamed token, and 16 streams at once; the memory of the server.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::Prompt;
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvSize, Result};
use pagoda_test_support::Random;

use super::super::memory::resident;
use super::super::{Row, median};
use super::client::Client;
use super::process::{NAME, Server};
use super::{added, options};

const NEW: u32 = 64;
const STREAMS: usize = 16;
const ROUNDS: usize = 5;
/// One stream after the other of each side, in a round.
const SINGLES: usize = 4;
/// The goals: microseconds added to a token, the part of the generator's own rate, MiB beyond its memory.
const ADDED: f64 = 100.0;
const RATE: f64 = 0.95;
const MEMORY: f64 = 150.0;
const MIB: f64 = 1024.0 * 1024.0;

/// One stream and 16, by HTTP and by calls, in turns.
pub fn measure(folder: &Path, threads: u32) -> Result<Vec<Row>> {
    let server = Server::start(folder, threads)?;
    let before = resident("self")?;
    let options =
        GeneratorOptions { model: options(threads), kv_size: KvSize::Bytes(1 << 30), ..GeneratorOptions::default() };
    let generator = Generator::open(folder, options)?;
    let mut random = Random(5);
    let (mut http, mut calls) = (Vec::new(), Vec::new());
    let (mut http_rates, mut call_rates) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        for _ in 0..SINGLES {
            http.push(one_by_http(&server, &prompt(&mut random))?);
            calls.push(one_by_calls(&generator, &prompt(&mut random))?);
        }
        http_rates.push(many_by_http(&server, &mut random)?);
        call_rates.push(many_by_calls(&generator, &mut random)?);
    }
    // The first round wakes threads and touches weights.
    let [http, calls] = [http, calls].map(|mut times| median(times.split_off(SINGLES)));
    let [http_rate, call_rate] = [http_rates, call_rates].map(|mut times| median(times.split_off(1)));
    let (rate, own) = (1.0 / http_rate, 1.0 / call_rate);
    let memory = (resident(&server.id().to_string())? as f64 - (resident("self")? - before) as f64) / MIB;
    let streams = Row {
        bench: "serve",
        case: format!("{STREAMS} streams at once, goal {RATE}"),
        value: rate,
        unit: "tokens/s",
        baseline: own,
        baseline_name: "the generator",
        ratio: rate / own,
    };
    Ok(vec![
        added("added to a streamed token".into(), (http - calls) * 1e6, "us", ADDED),
        streams,
        added("memory beyond the generator's".into(), memory, "MiB", MEMORY),
    ])
}

/// Tokens that no other request has.
fn prompt(random: &mut Random) -> Vec<u32> {
    (0..16).map(|_| 1000 + random.below(40_000) as u32).collect()
}

fn request(prompt: &[u32]) -> GenerateRequest {
    GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(NEW),
        ..GenerateRequest::new(Prompt::Tokens(prompt.to_vec()))
    }
}

fn send(client: &mut Client, prompt: &[u32]) -> Result<()> {
    let body = format!(
        r#"{{"model":"{NAME}","prompt":{prompt:?},"max_tokens":{NEW},"do_sample":false,"ignore_eos":true,"stream":true}}"#
    );
    client.send("/v1/completions", &body)
}

/// The time of a token after the first.
fn one_by_calls(generator: &Generator, prompt: &[u32]) -> Result<Duration> {
    let mut stream = generator.stream(&request(prompt))?;
    stream.next().transpose()?;
    let begun = Instant::now();
    for token in stream {
        token?;
    }
    Ok(begun.elapsed() / (NEW - 1))
}

fn one_by_http(server: &Server, prompt: &[u32]) -> Result<Duration> {
    let mut client = Client::new(server)?;
    send(&mut client, prompt)?;
    client.begin_stream()?;
    client.part()?;
    let begun = Instant::now();
    while client.part()?.is_some() {}
    Ok(begun.elapsed() / (NEW - 1))
}

/// The time of a token of all streams together.
fn many_by_calls(generator: &Generator, random: &mut Random) -> Result<Duration> {
    let begun = Instant::now();
    let streams: Vec<_> = (0..STREAMS).map(|_| generator.stream(&request(&prompt(random)))).collect::<Result<_>>()?;
    for stream in streams {
        for token in stream {
            token?;
        }
    }
    Ok(begun.elapsed() / (NEW * STREAMS as u32))
}

/// Each stream has a reader of its own, as clients have.
fn many_by_http(server: &Server, random: &mut Random) -> Result<Duration> {
    let clients = (0..STREAMS).map(|_| Client::new(server)).collect::<Result<Vec<_>>>()?;
    let prompts: Vec<_> = clients.iter().map(|_| prompt(random)).collect();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let read = |(mut client, prompt): (Client, Vec<u32>)| {
            scope.spawn(move || -> Result<()> {
                send(&mut client, &prompt)?;
                client.begin_stream()?;
                while client.part()?.is_some() {}
                Ok(())
            })
        };
        let threads: Vec<_> = clients.into_iter().zip(prompts).map(read).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    Ok(begun.elapsed() / (NEW * STREAMS as u32))
}
