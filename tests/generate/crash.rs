//! SIGKILL at any moment: afterwards every turn that was acknowledged is cached, and answers are right.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use pagoda::engine::{EngineStore, GenerateRequest, Generator, GeneratorOptions};
use pagoda::{Durability, StoreOptions};
use pagoda_test_support::{Folder, Random};

use super::cases::{PAGE, greedy, open, options, oracle, prompt};

const SESSIONS: usize = 3;
/// Tokens that each turn adds: by the user, and by the model.
const SAID: usize = 9;
const ANSWERED: usize = 4;
/// The child's folder.
const CHILD: &str = "PAGODA_TEST_GENERATE_CRASH";

fn open_store(folder: &Path) -> Generator {
    let options_of_store = StoreOptions { durability: Durability::Process, ..StoreOptions::default() };
    let store = EngineStore { path: folder.join("store"), options: options_of_store };
    open(GeneratorOptions { store: Some(store), ..options(40) })
}

/// A conversation after so many turns, and what is said next.
fn conversation(session: usize, turns: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    for turn in 0..=turns {
        tokens.extend(prompt((100 * session + turn) as u64, SAID));
        if turn < turns {
            let answer = oracle(&tokens, ANSWERED);
            tokens.extend(answer);
        }
    }
    tokens
}

fn request(session: usize, tokens: &[u32]) -> GenerateRequest {
    GenerateRequest { session: Some(session.to_string()), ..greedy(tokens, ANSWERED as u32) }
}

#[test]
fn conversations_survive_kills() {
    let cycles = std::env::var("PAGODA_GENERATE_KILLS").map_or(8, |cycles| cycles.parse().unwrap());
    let mut random = Random(1);
    let (mut folder, mut turns) = (Folder::new(), [0_usize; SESSIONS]);
    let mut acknowledged = 0;
    for cycle in 0..cycles {
        // The child adds up to 11 turns, and the conversations have to stay within the context.
        if cycle % 8 == 0 || turns.iter().any(|&turns| turns > 20) {
            (folder, turns) = (Folder::new(), [0; SESSIONS]);
        }
        let begun = turns.map(|turns| turns.to_string()).join(" ");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::child", "--ignored", "--nocapture"])
            .env(CHILD, format!("{}\n{begun}", folder.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while lines.next().expect("the child opens the generator").unwrap() != "open" {}
        let told: Vec<_> = lines.by_ref().take(random.below(5)).collect();
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        child.kill().unwrap();
        for line in told.into_iter().chain(lines) {
            let line = line.unwrap();
            let Some(session) = line.strip_suffix('.').and_then(|session| session.parse::<usize>().ok()) else {
                continue;
            };
            turns[session] += 1;
            acknowledged += 1;
        }
        child.wait().unwrap();

        let generator = open_store(folder.path());
        for (session, turns) in turns.iter_mut().enumerate() {
            let tokens = conversation(session, *turns);
            let response = generator.generate(&request(session, &tokens)).unwrap();
            assert_eq!(response.choices[0].tokens, oracle(&tokens, ANSWERED), "cycle {cycle}, session {session}");
            // All but the last token of the last answer was computed, and what was computed is there.
            let expected = if *turns == 0 { 0 } else { tokens.len() - SAID - 1 };
            // A turn may be stored that was not acknowledged any more. Then this one ends inside of what is stored, and whole pages
            // of it are used.
            let inside = (tokens.len() - 1) / PAGE * PAGE;
            let cached = response.cached_tokens as usize;
            assert!(
                cached >= expected || cached == inside,
                "cycle {cycle}, session {session}: {cached} of {expected} tokens are cached"
            );
            *turns += 1;
        }
    }
    assert!(acknowledged > 0, "no turn was acknowledged before a kill");
}

/// Goes on with the conversations, and prints each turn that was acknowledged, until it is killed.
#[test]
#[ignore = "run by conversations_survive_kills"]
fn child() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (folder, turns) = told.split_once('\n').unwrap();
    let turns: Vec<usize> = turns.split(' ').map(|turns| turns.parse().unwrap()).collect();
    let mut tokens: Vec<_> = (0..SESSIONS).map(|session| conversation(session, turns[session])).collect();
    let generator = open_store(Path::new(folder));
    println!("\nopen");
    for turn in 1..12 {
        for session in 0..SESSIONS {
            let response = generator.generate(&request(session, &tokens[session])).unwrap();
            println!("{session}.");
            std::io::stdout().flush().unwrap();
            tokens[session].extend(&response.choices[0].tokens);
            tokens[session].extend(prompt((100 * session + turns[session] + turn) as u64, SAID));
        }
    }
    std::thread::sleep(Duration::from_secs(60));
}
