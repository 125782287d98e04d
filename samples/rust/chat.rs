//! Talks with a language model: `chat FOLDER [SEED]`. Each line of the input is a message; the answer is printed as it is
//! generated. The same seed gives the same answers.
//!
//! The generator keeps the keys and values of the session, so a turn costs what is new, however long the talk is.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::{Write, stdin, stdout};
use std::process::ExitCode;

use pagoda::engine::{Chat, ContextEnd, GenerateRequest, Generator, GeneratorOptions};
use serde_json::json;

fn chat(folder: &OsStr, seed: u64) -> Result<(), Box<dyn Error>> {
    let generator = Generator::open(folder, GeneratorOptions::default())?;
    let mut messages = Vec::new();
    for line in stdin().lines() {
        messages.push(json!({"role": "user", "content": line?}));
        let mut stream = generator.stream(&GenerateRequest {
            max_new_tokens: Some(200),
            temperature: Some(0.2),
            top_p: Some(0.9),
            repetition_penalty: Some(1.1),
            seed: Some(seed),
            session: Some("chat".into()),
            context_end: ContextEnd::Stop,
            ..GenerateRequest::new(Chat::new(messages.clone()))
        })?;
        for token in &mut stream {
            print!("{}", token?.text);
            stdout().flush()?;
        }
        let response = stream.response()?;
        let (answer, prompt) = (&response.choices[0], response.prompt_tokens.len());
        let (tokens, cached, reason) = (answer.tokens.len(), response.cached_tokens, answer.finish_reason.name());
        println!("\n[{tokens} tokens; {cached} of the prompt's {prompt} were cached; {reason}]");
        messages.push(json!({"role": "assistant", "content": answer.text}));
    }
    Ok(())
}

/// The folder, and the seed.
fn read(arguments: &[OsString]) -> Option<(&OsStr, u64)> {
    match arguments {
        [folder] => Some((folder, 0)),
        [folder, seed] => Some((folder, seed.to_str()?.parse().ok()?)),
        _ => None,
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let Some((folder, seed)) = read(&arguments) else {
        eprintln!("usage: chat FOLDER [SEED]");
        return ExitCode::from(2);
    };
    if let Err(error) = chat(folder, seed) {
        eprintln!("chat: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
