//! Embedding tables: an acknowledged update survives any loss of power, in full.

use std::collections::BTreeMap;
use std::path::Path;

use pagoda::embedding::{EmbeddingTable, Embeddings, Miss, PsJson, Reach};
use pagoda::{Error, Result};
use pagoda_test_support::power::{crash, killed};
use pagoda_test_support::{Folder, Random, times};

use crate::recorder::{Event, Recording};

/// A table in a folder: its source in `t`, its table file below `work`, which is what is recorded.
pub struct Place {
    pub folder: Folder,
    pub dim: usize,
    pub keys: i64,
}

impl Place {
    pub fn new(dim: usize, keys: i64) -> Self {
        let folder = Folder::new();
        let source = folder.path().join("t");
        std::fs::create_dir_all(&source).unwrap();
        std::fs::create_dir_all(folder.path().join("work")).unwrap();
        std::fs::write(source.join("key"), (0..keys).flat_map(i64::to_le_bytes).collect::<Vec<_>>()).unwrap();
        let rows = (0..keys).flat_map(|key| row(dim, key, 0)).flat_map(f32::to_le_bytes);
        std::fs::write(source.join("emb_vector"), rows.collect::<Vec<_>>()).unwrap();
        Self { folder, dim, keys }
    }

    pub fn record(&self) -> Recording {
        Recording::start(&self.work())
    }

    pub fn work(&self) -> std::path::PathBuf {
        self.folder.path().join("work")
    }

    pub fn open(&self) -> Result<(Embeddings, EmbeddingTable)> {
        self.open_with("")
    }

    /// With more members of `persistent_db`.
    pub fn open_with(&self, more: &str) -> Result<(Embeddings, EmbeddingTable)> {
        let json = format!(
            r#"{{"models": [{{"model": "m", "sparse_files": ["t"], "embedding_table_names": ["t"],
                "embedding_vecsize_per_table": [{}], "gpucache": false}}], "volatile_db": {{"type": "disabled"}},
                "persistent_db": {{"type": "disk", "path": "work/tables/disk"{more}}}}}"#,
            self.dim
        );
        let embeddings = Embeddings::open(&PsJson::from_json(&json, Some(self.folder.path()))?.options)?;
        let table = embeddings.table("t")?;
        Ok((embeddings, table))
    }

    /// The version of every key; `None` for deleted ones. Every number is checked.
    pub fn versions(&self, table: &EmbeddingTable) -> Result<BTreeMap<i64, Option<u64>>> {
        let keys: Vec<i64> = (0..self.keys).collect();
        let (mut numbers, mut found) = (vec![f32::NAN; keys.len() * self.dim], vec![false; keys.len()]);
        table.lookup(&keys, &mut numbers, &mut found, Miss::Wait)?;
        let mut versions = BTreeMap::new();
        for (&key, (numbers, found)) in keys.iter().zip(numbers.chunks_exact(self.dim).zip(found)) {
            let version = found.then_some(numbers[1] as u64);
            if let Some(version) = version {
                assert_eq!(numbers, row(self.dim, key, version), "the row of key {key}");
            }
            versions.insert(key, version);
        }
        Ok(versions)
    }
}

pub fn row(dim: usize, key: i64, version: u64) -> Vec<f32> {
    (0..dim).map(|place| if place == 1 { version as f32 } else { key as f32 + place as f32 }).collect()
}

/// One change: some keys get this version, or are deleted with it.
#[derive(Clone)]
pub struct Change {
    pub version: u64,
    pub keys: Vec<i64>,
    pub deleted: bool,
}

impl Change {
    pub fn random(place: &Place, version: u64, most: usize, random: &mut Random) -> Self {
        let mut keys: Vec<i64> = (0..place.keys).collect();
        random.shuffle(&mut keys);
        keys.truncate(1 + random.below(most));
        Self { version, keys, deleted: random.once_in(5) }
    }

    pub fn apply(&self, place: &Place, table: &EmbeddingTable) -> Result<()> {
        if self.deleted {
            return table.delete(self.version, &self.keys, Reach::AtOnce);
        }
        let rows: Vec<f32> = self.keys.iter().flat_map(|&key| row(place.dim, key, self.version)).collect();
        table.upsert(self.version, &self.keys, &rows, Reach::AtOnce)
    }
}

/// The versions of all keys after each change; the first is before any.
fn states(place: &Place, changes: &[Change]) -> Vec<BTreeMap<i64, Option<u64>>> {
    let mut state: BTreeMap<_, _> = (0..place.keys).map(|key| (key, Some(0))).collect();
    let mut states = vec![state.clone()];
    for change in changes {
        state.extend(change.keys.iter().map(|&key| (key, (!change.deleted).then_some(change.version))));
        states.push(state.clone());
    }
    states
}

#[test]
fn power_lost_at_any_moment_of_small_updates() {
    campaign(&Place::new(4, 40), 1, 60, 8, times(4, 1));
}

#[test]
fn power_lost_while_large_rows_change_and_the_log_is_compacted() {
    // Rows of 120 KB, so that a few updates are enough.
    let events = campaign(&Place::new(30_000, 12), 2, 60, 6, times(12, 4));
    let compacted = |event: &Event| matches!(event, Event::Rename(_, to) if to.ends_with(".updates"));
    assert!(events.iter().filter(|event| compacted(event)).count() > 1);
}

fn campaign(place: &Place, seed: u64, count: u64, most: usize, every: usize) -> Vec<Event> {
    let mut random = Random(seed);
    let changes: Vec<Change> = (1..=count).map(|version| Change::random(place, version, most, &mut random)).collect();
    let events = play(place, &changes);
    let states = states(place, &changes);
    let (mut acknowledged, mut moments) = (0, 0);
    for at in 0..=events.len() {
        if let Some(Event::Told(version)) = at.checked_sub(1).map(|last| &events[last]) {
            acknowledged = *version as usize;
        }
        if !random.once_in(every) {
            continue;
        }
        for left in [crash(&events[..at], &mut random), crash(&events[..at], &mut random), killed(&events[..at])] {
            let allowed = &states[acknowledged..states.len().min(acknowledged + 2)];
            moments += 1;
            let other = Place { folder: Folder::new(), ..*place };
            copy(&place.folder.path().join("t"), &other.folder.path().join("t"));
            left.write(&other.work());
            check(&other, allowed, random.once_in(6)).unwrap_or_else(|error| {
                panic!("seed {seed}, after event {at} of {}, {acknowledged} acknowledged: {error}", events.len())
            });
        }
    }
    println!("{moments} losses of power within {} events", events.len());
    events
}

/// Applies the changes, and reopens the table now and then.
fn play(place: &Place, changes: &[Change]) -> Vec<Event> {
    let recording = place.record();
    let mut opened = place.open().unwrap();
    for change in changes {
        if change.version % 9 == 8 {
            drop(opened);
            opened = place.open().unwrap();
        }
        change.apply(place, &opened.1).unwrap();
        recording.acknowledge(change.version);
    }
    drop(opened);
    recording.events()
}

fn check(place: &Place, allowed: &[BTreeMap<i64, Option<u64>>], change: bool) -> Result<()> {
    let (embeddings, table) = place.open()?;
    let found = place.versions(&table)?;
    if !allowed.contains(&found) {
        let wrong = found.iter().filter(|&(key, version)| allowed.iter().all(|state| state[key] != *version));
        let message = format!("the versions of some keys are wrong: {:?}", wrong.collect::<Vec<_>>());
        return Err(Error::invalid("table", message));
    }
    if change {
        // It works, and a new update is there after a reopen.
        let last = Change { version: 1_000_000, keys: vec![0], deleted: false };
        last.apply(place, &table)?;
        drop((embeddings, table));
        let (_embeddings, table) = place.open()?;
        assert_eq!(place.versions(&table)?[&0], Some(1_000_000));
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for item in std::fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        std::fs::copy(item.path(), to.join(item.file_name())).unwrap();
    }
}
