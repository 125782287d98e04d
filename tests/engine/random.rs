//! Random histories, sent in every possible way, against an engine without a cache.

use std::collections::BTreeMap;

use pagoda::engine::{Columns, Engine, EngineOptions, EngineStore, Events, RankRequest};
use pagoda::{KvSize, Offload, Status};
use pagoda_test_support::{Folder, Random};

use crate::cases::{close, open, options};
use crate::swap::swap;

/// The true state of a user.
#[derive(Clone, Default)]
struct User {
    /// Item, genre, rating and time.
    events: Vec<[i64; 4]>,
    keys: [i64; 2],
    /// The first event that was not sent yet, or was changed since.
    untold: usize,
    /// Whether the keys have changed since they were sent.
    keys_untold: bool,
}

impl User {
    fn event(random: &mut Random) -> [i64; 4] {
        let key = |random: &mut Random, rows: usize| random.below(rows + 1) as i64 - 1;
        let (item, genre) = (key(random, 40), key(random, 8));
        [item, genre, key(random, 5), 1_700_000_000 + random.below(10_000_000) as i64]
    }

    fn change(&mut self, random: &mut Random) {
        match random.below(10) {
            0 if !self.events.is_empty() => {
                let at = random.below(self.events.len());
                self.events[at] = Self::event(random);
                self.untold = self.untold.min(at);
            }
            1 => {
                self.events.truncate(random.below(self.events.len() + 1));
                self.untold = self.untold.min(self.events.len());
            }
            2 => (self.keys, self.keys_untold) = ([random.below(7) as i64, random.below(9) as i64], true),
            _ => (0..random.below(4)).for_each(|_| self.events.push(Self::event(random))),
        }
        if self.events.len() > 40 {
            self.events.drain(..20);
            self.untold = 0;
        }
    }

    /// A request with the events from `start` up to, not including, `end`.
    fn request(&self, user: u64, start: Option<usize>, end: usize, random: &mut Random) -> RankRequest {
        let sent = &self.events[start.unwrap_or(0)..end];
        let column = |place: usize| sent.iter().map(|event| event[place]).collect::<Vec<_>>();
        let count = 1 + random.below(4);
        let candidates =
            |random: &mut Random, rows: usize| -> Vec<i64> { (0..count).map(|_| random.below(rows) as i64).collect() };
        RankRequest {
            user,
            start: start.map(|start| start as u64),
            events: Events {
                keys: Columns::new().with("item", column(0)).with("genre", column(1)).with("rating", column(2)),
                times: column(3),
            },
            user_keys: vec![("age".into(), self.keys[0]), ("town".into(), self.keys[1])],
            candidates: Columns::new().with("item", candidates(random, 40)).with("genre", candidates(random, 6)),
            time: Some(1_710_000_000),
            ..RankRequest::default()
        }
    }
}

/// One request for a user. A delayed one lacks the last events. It has all earlier events that were not sent yet, and
/// the keys.
fn ask(engine: &Engine, plain: &Plain, user: u64, known: &mut User, random: &mut Random) -> bool {
    let len = known.events.len();
    // A request that ends before an edit does not contain it: a later request does.
    let end = if random.once_in(4) { random.below(len + 1) } else { len };
    let latest = known.untold.min(end);
    let start = match random.below(3) {
        0 => None,
        // Events may be sent again.
        _ => Some(latest.saturating_sub(random.below(4) * random.below(3))),
    };
    let mut request = known.request(user, start, end, random);
    // Left out, they are unchanged.
    if start > Some(0) && !known.keys_untold && random.once_in(2) {
        request.user_keys.clear();
    }
    let whole = RankRequest { candidates: request.candidates.clone(), ..known.request(user, None, end, random) };
    let (response, gap) = match engine.rank(&request) {
        Err(error) if error.status() == Status::NotFound => (engine.rank(&whole), true),
        response => (response, false),
    };
    let response = response.unwrap();
    close(&response.scores, &plain[&*response.version].rank(&whole).unwrap().scores, 1e-5);
    // Events of a delayed request are known up to its end; the later ones were known before.
    known.untold = if known.untold < end { end } else { known.untold };
    known.keys_untold = false;
    gap
}

/// Engines without a cache, by version.
type Plain = BTreeMap<String, Engine>;

fn plain() -> Plain {
    let engines = ["gather", "second"].map(|model| {
        let engine = open(model, EngineOptions { kv_size: None, remember_bytes: 0, ..options() });
        (engine.folder().version.clone(), engine)
    });
    engines.into()
}

/// How an engine is used in one round.
struct Round {
    seed: u64,
    remember_bytes: u64,
    store: bool,
    /// Whether versions are swapped.
    swaps: bool,
    /// Whether users are forgotten, and the engine is closed and opened again.
    forgets: bool,
}

#[test]
fn the_scores_are_those_of_the_whole_history_for_any_request() {
    let plain = plain();
    let (much, little) = (1 << 20, 3000);
    // A version that is served again finds its own histories in the store, and only the event log has the new events
    // (engine.md).
    for (seed, remember_bytes, store, swaps, forgets) in [
        (1, much, false, false, true),
        (2, little, false, true, true),
        (3, much, true, false, true),
        (4, little, true, false, true),
        (5, much, true, true, false),
        (6, much, false, true, true),
        (7, 0, false, true, true),
    ] {
        run(&plain, &Round { seed, remember_bytes, store, swaps, forgets });
    }
}

fn run(plain: &Plain, round: &Round) {
    let folder = Folder::new();
    let store = round.store.then(|| EngineStore::new(folder.path()));
    let offload = if round.seed == 4 { Offload::AtCommit } else { Offload::OnEviction };
    let with = || EngineOptions {
        kv_size: Some(KvSize::Pages(24)),
        store: store.clone(),
        offload,
        remember_bytes: round.remember_bytes,
        ..options()
    };
    let mut engine = open("gather", with());
    let (mut users, mut random, mut gaps) = (vec![User::default(); 6], Random(round.seed), 0);
    for step in 1..=600 {
        let user = random.below(users.len());
        users[user].change(&mut random);
        gaps += usize::from(ask(&engine, plain, user as u64, &mut users[user], &mut random));
        if round.forgets && random.once_in(50) {
            engine.forget(&[user as u64]).unwrap();
        }
        if round.swaps && random.once_in(40) {
            swap(&engine, random.pick(&["gather", "second"]));
        }
        if round.forgets && round.store && step % 170 == 0 {
            drop(engine);
            engine = open("gather", with());
        }
    }
    let stats = engine.stats();
    assert!(stats.cached_rows > 0 && stats.computed_rows > 0, "{stats:?}");
    assert!(gaps < 300, "seed {}: {gaps} of 600 requests were sent again", round.seed);
}

#[test]
fn from_many_threads_while_versions_are_swapped() {
    let plain = plain();
    // Room for two histories, of six users.
    let engine = open("gather", EngineOptions { kv_size: Some(KvSize::Pages(24)), instances: 2, ..options() });
    std::thread::scope(|scope| {
        let threads = [1, 2, 3].map(|thread| {
            let (engine, plain) = (&engine, &plain);
            scope.spawn(move || {
                let (mut users, mut random) = (vec![User::default(); 2], Random(thread));
                for _ in 0..300 {
                    let user = random.below(users.len());
                    users[user].change(&mut random);
                    ask(engine, plain, 10 * thread + user as u64, &mut users[user], &mut random);
                }
            })
        });
        let mut versions = ["second", "gather"].into_iter().cycle();
        while threads.iter().any(|thread| !thread.is_finished()) {
            swap(&engine, versions.next().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    });
    assert!(engine.stats().cached_rows > 0);
}
