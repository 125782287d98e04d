//! SIGKILL at any moment: afterwards everything acknowledged is there, and every byte is right.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pagoda::kv::{KvRequest, Owner};
use pagoda::store::DiskStore;
use pagoda::{Durability, ElementType, KvCache, KvOptions, KvSize, Offload, StoreOptions};
use pagoda_test_support::{Folder, Random};

use crate::pattern::{Shape, device_id};

const SHAPE: Shape = Shape { layers: 2, page_size: 8, row: 128 };
const USERS: u64 = 8;
/// The child's folder, seed and durability.
const CHILD: &str = "PAGODA_TEST_CRASH";

#[test]
fn killed_at_any_moment() {
    let cycles = std::env::var("PAGODA_CRASH_CYCLES").map_or(24, |cycles| cycles.parse().unwrap());
    let mut random = Random(1);
    let (mut acknowledged, mut folder) = ([0_u64; USERS as usize], Folder::new());
    let mut total = 0;
    for cycle in 0..cycles {
        if cycle % 50 == 0 {
            // A store that grew without limit would make the cycles longer and longer.
            (acknowledged, folder) = ([0; USERS as usize], Folder::new());
        }
        let durability = if cycle % 4 == 0 { "power" } else { "process" };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::child", "--ignored", "--nocapture"])
            .env(CHILD, format!("{} {cycle} {durability}", folder.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The test harness prints its own lines first.
        while lines.next().expect("the child opens the store").unwrap() != "open" {}
        // After some commits, however long they take, and then after a random time.
        let told: Vec<_> = lines.by_ref().take(random.below(8)).collect();
        std::thread::sleep(Duration::from_micros(random.below(10_000) as u64));
        child.kill().unwrap();
        for line in told.into_iter().chain(lines) {
            let line = line.unwrap();
            // A line that was cut off does not count.
            let Some((user, end)) = line.strip_suffix('.').and_then(|line| line.split_once(' ')) else { continue };
            let (user, end) = (user.parse::<usize>().unwrap(), end.parse::<u64>().unwrap());
            acknowledged[user] = acknowledged[user].max(end);
            total += 1;
        }
        child.wait().unwrap();

        let cache = open(folder.path(), Durability::Process);
        for user in 0..USERS {
            let cached = cache.lookup(Owner::slice(&[user]))[0];
            let end = cached.start + u64::from(cached.length);
            assert!(end >= acknowledged[user as usize], "cycle {cycle}, user {user}: {end} < {acknowledged:?}");
            let request = KvRequest { owner: Owner(user), start: end, candidates: 1, ..KvRequest::default() };
            SHAPE.check(&cache.prepare(&[request]).unwrap(), item);
        }
        assert_eq!(cache.stats().failed_onloads, 0);
    }
    assert!(total > cycles, "{total} commits in {cycles} cycles: the children were killed before they did anything");
    println!("{cycles} kills, {total} acknowledged commits, none lost");
}

#[test]
#[ignore = "the process that is killed by the test above"]
fn child() {
    let Ok(arguments) = std::env::var(CHILD) else { return };
    let mut arguments = arguments.rsplitn(3, ' ');
    let durability = if arguments.next() == Some("power") { Durability::Power } else { Durability::Process };
    let mut random = Random(arguments.next().unwrap().parse().unwrap());
    let cache = open(arguments.next().unwrap().as_ref(), durability);
    let mut out = std::io::stdout().lock();
    // On a line of its own, after any output of the harness.
    writeln!(out, "\nopen").unwrap();
    loop {
        let user = random.below(USERS as usize) as u64;
        let cached = cache.lookup(Owner::slice(&[user]))[0];
        let start = cached.start + u64::from(cached.length);
        let request = KvRequest {
            owner: Owner(user),
            start,
            tokens: 1 + random.below(30) as u32,
            candidates: 1,
            items: &[],
            ..KvRequest::default()
        };
        let lease = cache.prepare(&[request]).unwrap();
        SHAPE.check(&lease, item);
        SHAPE.append(&lease, item);
        let written = lease.commit().unwrap();
        // Not every commit waits: then writes of several users are in flight at once.
        if random.once_in(2) {
            written.wait().unwrap();
            let end = start + u64::from(request.tokens);
            out.write_all(format!("{user} {end}.\n").as_bytes()).unwrap();
            out.flush().unwrap();
        }
    }
}

fn item(user: u64, position: u64) -> u64 {
    user << 32 | position
}

fn open(path: &std::path::Path, durability: Durability) -> KvCache {
    // Small segments and early compaction, so that both happen.
    let store = StoreOptions { durability, segment_bytes: 1 << 18, garbage_bytes: 1 << 17, ..StoreOptions::default() };
    let options = KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 8,
        head_size: 4,
        page_size: SHAPE.page_size,
        element_type: ElementType::F32,
        size: KvSize::Pages(256),
        max_history: 400,
        offload: Offload::AtCommit,
        ..KvOptions::default()
    };
    KvCache::open(&options, Some(Arc::new(DiskStore::open(path, &store).unwrap()))).unwrap()
}
