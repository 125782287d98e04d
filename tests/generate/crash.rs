//! SIGKILL at any moment: afterwards every turn that was acknowledged is cached, and answers are right.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use pagoda::engine::{EngineStore, GenerateRequest, Generator, GeneratorOptions, KvPolicy};
use pagoda::{Durability, StoreOptions};
use pagoda_test_support::{Folder, Random};

use super::cases::{PAGE, greedy, open, options, oracle, prompt};

const SESSIONS: usize = 3;
/// Tokens that each turn adds: by the user, and by the model.
const SAID: usize = 9;
const ANSWERED: usize = 4;
/// The child's folder.
const CHILD: &str = "PAGODA_TEST_GENERATE_CRASH";

fn open_store(folder: &Path, kv_policy: Option<KvPolicy>) -> Generator {
    let options_of_store = StoreOptions { durability: Durability::Process, ..StoreOptions::default() };
    let store = EngineStore { path: folder.join("store"), options: options_of_store };
    open(GeneratorOptions { store: Some(store), kv_policy, ..options(40) })
}

/// What conversations are without kills.
struct Expected {
    /// Answers turn by turn, if sequences have slots: what is left of a turn depends on those before it.
    with_slots: Option<Generator>,
    /// `[session]`: after each turn what was said and answered, and what is said next.
    conversations: Vec<Vec<Vec<u32>>>,
}

impl Expected {
    fn new(kv_policy: Option<KvPolicy>) -> Self {
        let with_slots = kv_policy.map(|policy| open(GeneratorOptions { kv_policy: Some(policy), ..options(40) }));
        let first = |session: usize| vec![prompt((100 * session) as u64, SAID)];
        Self { with_slots, conversations: (0..SESSIONS).map(first).collect() }
    }

    /// A conversation after so many turns, and what is said next.
    fn conversation(&mut self, session: usize, turns: usize) -> &[u32] {
        while self.conversations[session].len() <= turns {
            let turn = self.conversations[session].len();
            let mut tokens = self.conversations[session][turn - 1].clone();
            let answer = match &self.with_slots {
                Some(generator) => generator.generate(&request(session, &tokens)).unwrap().choices[0].tokens.clone(),
                None => oracle(&tokens, ANSWERED),
            };
            tokens.extend(answer);
            tokens.extend(prompt((100 * session + turn) as u64, SAID));
            self.conversations[session].push(tokens);
        }
        &self.conversations[session][turns]
    }

    fn answer(&mut self, session: usize, turns: usize) -> Vec<u32> {
        let before = self.conversation(session, turns).len();
        self.conversation(session, turns + 1)[before..][..ANSWERED].to_vec()
    }
}

fn request(session: usize, tokens: &[u32]) -> GenerateRequest {
    GenerateRequest { session: Some(session.to_string()), ..greedy(tokens, ANSWERED as u32) }
}

#[test]
fn conversations_survive_kills() {
    survive("");
}

/// More tokens than there are slots: they leave by their weights, in a step that a kill may hit.
#[test]
fn conversations_with_slots_survive_kills() {
    survive("h2o");
}

/// The policy of a name; none without one.
fn policy(name: &str) -> Option<KvPolicy> {
    (!name.is_empty()).then(|| KvPolicy { grace_period: 8, chunk_size: 4, ..KvPolicy::new(name, 64) })
}

fn survive(policy_name: &str) {
    let mut expected = Expected::new(policy(policy_name));
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
            .env(CHILD, format!("{}\n{begun}\n{policy_name}", folder.path().display()))
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

        let generator = open_store(folder.path(), policy(policy_name));
        for (session, turns) in turns.iter_mut().enumerate() {
            let tokens = expected.conversation(session, *turns).to_vec();
            let response = generator.generate(&request(session, &tokens)).unwrap();
            let answer = expected.answer(session, *turns);
            assert_eq!(response.choices[0].tokens, answer, "cycle {cycle}, session {session}");
            // All but the last token of the last answer was computed, and what was computed is there.
            let expected = if *turns == 0 { 0 } else { tokens.len() - SAID - 1 };
            // A turn may be stored that was not acknowledged any more. Then this one ends inside of what is stored, and whole pages
            // of it are used.
            let inside = (tokens.len() - 1) / PAGE * PAGE;
            let cached = response.cached_tokens as usize;
            assert!(
                cached >= expected || cached == inside && policy_name.is_empty(),
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
    let [folder, turns, policy_name] = *told.split('\n').collect::<Vec<_>>() else { panic!("{told}") };
    let turns: Vec<usize> = turns.split(' ').map(|turns| turns.parse().unwrap()).collect();
    let mut expected = Expected::new(policy(policy_name));
    let mut tokens: Vec<_> =
        (0..SESSIONS).map(|session| expected.conversation(session, turns[session]).to_vec()).collect();
    drop(expected);
    let generator = open_store(Path::new(folder), policy(policy_name));
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
