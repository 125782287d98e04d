//! The KV cache: the cost of a batch beside the model, and of a token beside its pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda::kv::{KvRequest, Owner, Owners, Tiers};
use pagoda::store::{DiskStore, Store};
use pagoda::{ElementType, KvCache, KvOptions, KvSize, Result, StoreOptions};
use pagoda_test_support::Folder;

use super::{Report, Row, median};
use crate::memory;

const USERS: u64 = 8;
const TOKENS: u32 = 4096;
const PAGE: u32 = 32;
const ROUNDS: usize = 200;
/// The time between batches, for the case that uses it.
const PACE: Duration = Duration::from_millis(200);

/// Everything with a goal.
pub fn measure(report: &Report) -> Result<()> {
    let case = |name: &str| format!("{name}, B={USERS} of {TOKENS} tokens, page {PAGE}");
    let against_goal = |name: &str, took: f64, goal: f64| Row {
        bench: "kv",
        case: case(name),
        value: took * 1e6,
        unit: "us",
        baseline: goal,
        baseline_name: "goal",
        ratio: goal / (took * 1e6),
    };
    report.row(against_goal("prepare", new_users()?, 50.0))?;
    report.row(against_goal("prepare cached", cached_users()?, 50.0))?;
    report.row(against_goal("prepare evicting", evicting(None)?, 200.0))?;
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default())?);
    report.row(against_goal("prepare evicting, stored", evicting(Some(&store))?, 200.0))?;
    let paced = format!("prepare evicting, stored ahead, every {} ms", PACE.as_millis());
    report.row(against_goal(&paced, stored_ahead(&store)?, 200.0))?;
    report.row(copying_out(&store, case("prepare evicting, to store"))?)?;
    report.row(memory_per_token()?)
}

fn options(users: u32, layers: u32) -> KvOptions {
    KvOptions {
        layers,
        heads: 4,
        head_size: 64,
        page_size: PAGE,
        element_type: ElementType::Bf16,
        size: KvSize::Pages(users * TOKENS / PAGE),
        ..KvOptions::default()
    }
}

/// Looks up, prepares and commits a batch of these users with this many new tokens each.
fn batch(cache: &KvCache, first: u64, tokens: u32) -> Result<Duration> {
    let users: Vec<u64> = (first..first + USERS).collect();
    let start = Instant::now();
    let cached = cache.lookup(Owner::slice(&users));
    let requests: Vec<_> = users
        .iter()
        .zip(&cached)
        .map(|(&user, cached)| KvRequest {
            owner: Owner(user),
            start: cached.start + u64::from(cached.length),
            tokens,
            candidates: 128,
            items: &[],
            ..KvRequest::default()
        })
        .collect();
    let _ = cache.prepare(&requests)?.commit()?;
    Ok(start.elapsed())
}

/// Users without a cached history.
fn new_users() -> Result<f64> {
    let cache = KvCache::open(&options(USERS as u32, 8), None)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        times.push(batch(&cache, 0, TOKENS)?);
        cache.evict(Owners::All, Tiers::ALL)?;
    }
    Ok(median(times))
}

/// Users with all but the last page cached.
fn cached_users() -> Result<f64> {
    let cache = KvCache::open(&options(USERS as u32, 8), None)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        batch(&cache, 0, TOKENS - PAGE)?;
        times.push(batch(&cache, 0, PAGE)?);
        cache.evict(Owners::All, Tiers::ALL)?;
    }
    Ok(median(times))
}

/// New users, in a pool that is full of others, which are all evicted. With a store, those are stored already. One
/// layer, because the bookkeeping is measured.
fn evicting(store: Option<&Arc<dyn Store>>) -> Result<f64> {
    let (layers, rounds) = if store.is_some() { (1, 20) } else { (8, ROUNDS) };
    let cache = KvCache::open(&options(USERS as u32, layers), store.cloned())?;
    let mut times = Vec::new();
    batch(&cache, 0, TOKENS)?;
    for round in 1..=rounds as u64 {
        if store.is_some() {
            cache.offload(Owners::All)?;
        }
        times.push(batch(&cache, round * USERS, TOKENS)?);
    }
    Ok(median(times))
}

/// The same in a larger pool that stores users ahead of their eviction, without a call of `offload`.
fn stored_ahead(store: &Arc<dyn Store>) -> Result<f64> {
    let options = KvOptions { model_version: "ahead".into(), ahead_percent: 25, ..options(8 * USERS as u32, 1) };
    let cache = KvCache::open(&options, Some(store.clone()))?;
    let mut times = Vec::new();
    for round in 0..28 {
        times.push(batch(&cache, round * USERS, TOKENS)?);
        std::thread::sleep(PACE);
    }
    // The first ones found free pages.
    Ok(median(times.split_off(8)))
}

/// The same if the evicted histories have to be copied out first, compared with the copy alone.
fn copying_out(store: &Arc<dyn Store>, case: String) -> Result<Row> {
    let cache =
        KvCache::open(&KvOptions { model_version: "out".into(), ..options(USERS as u32, 1) }, Some(store.clone()))?;
    let bytes = cache.pool(0)?.memory()?.1;
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let (mut times, mut copies) = (Vec::new(), Vec::new());
    batch(&cache, 0, TOKENS)?;
    for round in 1..=20 {
        cache.flush()?;
        times.push(batch(&cache, round * USERS, TOKENS)?);
        let start = Instant::now();
        to.copy_from_slice(&from);
        copies.push(start.elapsed());
        std::hint::black_box(&to);
    }
    let (value, baseline) = (median(times) * 1e6, median(copies) * 1e6);
    Ok(Row { bench: "kv", case, value, unit: "us", baseline, baseline_name: "memcpy", ratio: baseline / value })
}

/// The memory of the cache for each token beside the pages.
fn memory_per_token() -> Result<Row> {
    let users = 1024;
    let cache = KvCache::open(&options(users, 1), None)?;
    let fill =
        || (0..u64::from(users)).step_by(USERS as usize).try_for_each(|first| batch(&cache, first, TOKENS).map(drop));
    let (filled, bytes) = memory::taken_by(fill);
    filled?;
    let value = bytes as f64 / f64::from(users * TOKENS);
    Ok(Row {
        bench: "kv",
        case: format!("memory beside the pages, {users} users of {TOKENS} tokens"),
        value,
        unit: "B/token",
        baseline: 1.0,
        baseline_name: "goal",
        ratio: 1.0 / value,
    })
}
