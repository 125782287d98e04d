//! EmbeddingBag on both providers returns the rows of the tiers: by the threshold, after updates, and while rows are
//! evicted. The same for a table on a GPU without ONNX Runtime (`--include-ignored directly`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use cudarc::driver::DevicePtr;
use pagoda::embedding::{EmbeddingTable, Embeddings, Miss, Reach};
use pagoda::{Model, ModelOptions, Provider, Tensor};
use pagoda_custom_ops::side_channel::tables::{DeviceBag, DeviceRows, TableRows};
use pagoda_kernels::Combiner;
use pagoda_kernels::cuda::{Gpu, Slots};
use pagoda_test_support::{Attribute, BOOL, Dim, F32, Folder, Graph, I64, Random};

use crate::files::{self, DEFAULT, DIM, config, row, rows};
use crate::operators::options;

const COMBINERS: [&str; 4] = ["none", "sum", "mean", "sqrtn"];

/// The tables of a graph, with table `t`.
struct Opened {
    embeddings: Arc<Embeddings>,
    table: EmbeddingTable,
    /// Theirs.
    _folder: Folder,
}

fn open(keys: &[i64], model: &str) -> Opened {
    let folder = Folder::new();
    let (embeddings, table) = files::open(&config(&folder, keys, model, ""));
    Opened { embeddings: Arc::new(embeddings), table, _folder: folder }
}

impl Opened {
    fn bag(&self, combiner: &'static str, on: On) -> Bag {
        let provider = match on {
            On::Session(provider) => provider,
            On::Device => {
                let rows = self.table.on_device(*GPU).unwrap();
                return Bag::Table(rows.expect("it is cached"), Combiner::named(combiner));
            }
        };
        let mut graph = Graph::new().input("keys", I64, &[Dim::Any("K")]);
        let mut inputs = vec!["keys"];
        if combiner != "none" {
            graph = graph.input("offsets", I64, &[Dim::Any("R+1")]);
            inputs.push("offsets");
        }
        let attributes = [Attribute::Text("table", "t"), Attribute::Text("combiner", combiner)];
        let graph = graph
            .output("vectors", F32, &[Dim::Any("R"), Dim::Any("dim")])
            .output("hit", BOOL, &[Dim::Any("K")])
            .node("ai.pagoda.EmbeddingBag", &inputs, &["vectors", "hit"], &attributes);
        let tables = Some(Arc::clone(&self.embeddings).into());
        let model = Model::open_memory(&graph.to_bytes(), &ModelOptions { tables, ..options(provider) }).unwrap();
        assert_eq!(model.provider(), provider);
        Bag::Session(Box::new(model))
    }
}

/// Where keys are looked up.
#[derive(Clone, Copy, PartialEq)]
pub enum On {
    /// In a graph.
    Session(Provider),
    /// In a table on a GPU.
    Device,
}

impl From<Provider> for On {
    fn from(provider: Provider) -> Self {
        Self::Session(provider)
    }
}

static GPU: LazyLock<&'static Gpu> = LazyLock::new(|| Box::leak(Box::new(Gpu::open(0).unwrap())));

enum Bag {
    /// A graph of one node.
    Session(Box<Model>),
    Table(Arc<dyn DeviceRows>, Option<Combiner>),
}

impl Bag {
    fn run(&self, keys: &[i64], offsets: Option<&[i64]>) -> (Vec<f32>, Vec<bool>) {
        let model = match self {
            Self::Session(model) => model,
            Self::Table(rows, combiner) => return on_device(&**rows, keys, offsets.zip(*combiner)),
        };
        let ints = |values: &[i64]| Tensor::from_slice(&[values.len() as i64], values).unwrap();
        let (keys, offsets) = (ints(keys), offsets.map(ints));
        let mut inputs = vec![("keys", &keys)];
        inputs.extend(offsets.as_ref().map(|offsets| ("offsets", offsets)));
        let made = model.run(&inputs, &["vectors", "hit"]).unwrap();
        let (marks, len) = made[1].memory().unwrap();
        // SAFETY: the memory of the tensor.
        let marks = if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(marks.cast::<u8>(), len) } };
        (made[0].as_slice().unwrap().to_vec(), marks.iter().map(|mark| *mark == 1).collect())
    }

    /// The rows of keys, each found or the default vector.
    fn look(&self, keys: &[i64]) -> Vec<f32> {
        let (vectors, hit) = self.run(keys, None);
        for (place, row) in vectors.chunks_exact(DIM).enumerate() {
            assert_eq!(row != DEFAULT, hit[place], "key {}", keys[place]);
        }
        vectors
    }
}

/// A lookup on a stream of its own.
fn on_device(rows: &dyn DeviceRows, keys: &[i64], pooling: Option<(&[i64], Combiner)>) -> (Vec<f32>, Vec<bool>) {
    let stream = GPU.context().new_stream().unwrap();
    // The driver takes no empty ones.
    let ints = |values: &[i64]| stream.clone_htod(&[values, &[0]].concat()).unwrap();
    let (keys_there, offsets) = (ints(keys), pooling.map(|(offsets, _)| ints(offsets)));
    let slots = pooling.map_or(keys.len(), |(offsets, _)| offsets.len() - 1);
    let vectors = stream.clone_htod(&vec![f32::NAN; slots * DIM + 1]).unwrap();
    let hit = stream.clone_htod(&vec![7_u8; keys.len() + 1]).unwrap();
    stream.synchronize().unwrap();
    let call = DeviceBag {
        keys: keys_there.device_ptr(&stream).0,
        count: keys.len(),
        slots: pooling.map(|(_, combiner)| Slots {
            offsets: offsets.as_ref().unwrap().device_ptr(&stream).0,
            count: slots,
            combiner,
        }),
        vectors: vectors.device_ptr(&stream).0,
        hit: Some(hit.device_ptr(&stream).0),
    };
    // SAFETY: every tensor is as long as the call says, and the stream is waited for.
    unsafe { rows.bag(&call, stream.cu_stream()) }.unwrap();
    let (vectors, hit) = (stream.clone_dtoh(&vectors).unwrap(), stream.clone_dtoh(&hit).unwrap());
    stream.synchronize().unwrap();
    assert!(vectors[slots * DIM].is_nan() && hit[keys.len()] == 7, "something was written behind the outputs");
    (vectors[..slots * DIM].to_vec(), hit[..keys.len()].iter().map(|mark| *mark == 1).collect())
}

/// The same by the interface of the table, on the host.
fn on_host(table: &EmbeddingTable, keys: &[i64], pooling: Option<(&[i64], Combiner)>) -> (Vec<f32>, Vec<bool>) {
    let mut found = vec![false; keys.len()];
    let mut vectors = vec![f32::NAN; pooling.map_or(keys.len(), |(offsets, _)| offsets.len() - 1) * DIM];
    match pooling {
        None => table.lookup(keys, &mut vectors, &mut found, Miss::Wait).unwrap(),
        Some((offsets, combiner)) => table.pool(keys, offsets, combiner, &mut vectors, &mut found, Miss::Wait).unwrap(),
    };
    (vectors, found)
}

/// On a GPU alone.
mod directly {
    use super::On;

    macro_rules! directly {
        ($($name:ident: $test:path;)*) => {
            $(#[test]
            #[ignore = "needs a GPU"]
            fn $name() {
                let _shared = crate::GPU.read().unwrap_or_else(std::sync::PoisonError::into_inner);
                $test(On::Device);
            })*
        };
    }

    directly! {
        vectors_of_keys: super::vectors;
        missing_rows_by_the_threshold: super::threshold;
        changed_rows: super::changes;
        one_cache_for_all: super::sharing;
        rows_that_leave_while_others_are_looked_up: super::racing;
    }
}

/// Random keys and slots: bit-identical to the CPU, for each row type, and without a cache.
pub fn vectors(on: impl Into<On>) {
    let on = on.into();
    let mut random = Random(21);
    let keys: Vec<i64> = (0..500).map(|key| key * 3).collect();
    for model in [
        r#", "cache_rows": 2000, "hit_rate_threshold": 1.0"#,
        r#", "cache_rows": 100, "hit_rate_threshold": 1.0, "init_ec": false"#,
        r#", "cache_rows": 2000, "hit_rate_threshold": 1.0, "row_type_per_table": ["f16"]"#,
        r#", "cache_rows": 2000, "hit_rate_threshold": 1.0, "row_type_per_table": ["i8"]"#,
        r#", "gpucache": false"#,
    ] {
        let opened = open(&keys, model);
        for combiner in COMBINERS {
            if on == On::Device && model.contains("gpucache") {
                assert!(opened.table.on_device(*GPU).unwrap().is_none());
                continue;
            }
            let bag = opened.bag(combiner, on);
            for count in [0, 1, 17, 800] {
                let asked: Vec<i64> = (0..count).map(|_| random.below(1600) as i64).collect();
                let mut offsets = vec![0];
                while offsets[offsets.len() - 1] < count {
                    let some = if random.once_in(4) { 0 } else { random.below(9) as i64 };
                    offsets.push((offsets[offsets.len() - 1] + some).min(count));
                }
                let offsets = (combiner != "none").then_some(&offsets[..]);
                let (vectors, hit) = bag.run(&asked, offsets);
                let (expected, found) = on_host(&opened.table, &asked, offsets.zip(Combiner::named(combiner)));
                let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
                assert!(bits(&vectors) == bits(&expected), "{combiner} of {count} keys with {model}");
                assert_eq!(hit, found, "{combiner} of {count} keys with {model}");
                let there = asked.iter().map(|key| keys.binary_search(key).is_ok());
                assert!(hit.into_iter().eq(there), "{combiner} of {count} keys with {model}");
            }
        }
    }
}

/// Below the threshold a lookup waits for missing rows; at and above it does not. In both cases they are cached
/// afterwards.
pub fn threshold(on: impl Into<On>) {
    let on = on.into();
    // 7 of 10 different keys are cached.
    for (threshold, waits) in [("0.71", true), ("0.7", false), ("0.69", false), ("1.0", true), ("0.0", false)] {
        let cache = format!(r#", "cache_rows": 1000, "init_ec": false, "hit_rate_threshold": {threshold}"#);
        let opened = open(&(0..100).collect::<Vec<_>>(), &cache);
        let bag = opened.bag("none", on);
        let cached: Vec<i64> = (0..7).collect();
        let first = bag.look(&cached);
        assert_eq!(first, if threshold == "0.0" { DEFAULT.repeat(7) } else { rows(&cached, 0) });
        opened.embeddings.wait();
        // Repeated keys count once.
        let mut keys: Vec<i64> = (0..10).collect();
        keys.extend([9, 9, 9, 9, 8, 0]);
        let vectors = bag.look(&keys);
        for (place, &key) in keys.iter().enumerate() {
            let expected = if waits || key < 7 { row(key, 0) } else { DEFAULT };
            assert_eq!(vectors[place * DIM..][..DIM], expected, "key {key}, threshold {threshold}");
        }
        opened.embeddings.wait();
        assert_eq!(bag.look(&keys), rows(&keys, 0), "threshold {threshold}");
        // On a GPU a lookup that does not wait is counted when its misses are read.
        opened.embeddings.wait();
        let stats = opened.table.stats();
        let defaults = if waits { 0 } else { 3 } + if threshold == "0.0" { 7 } else { 0 };
        assert_eq!((stats.lookups, stats.defaults), (3, defaults), "threshold {threshold}");
        // A key that no tier has is never found.
        for _ in 0..2 {
            assert_eq!(bag.look(&[1000, 3]), [DEFAULT, row(3, 0)].concat(), "threshold {threshold}");
            opened.embeddings.wait();
        }
    }
}

/// Updates and deletions are visible at once or after a refresh, by version.
pub fn changes(on: impl Into<On>) {
    let on = on.into();
    let keys: Vec<i64> = (0..200).map(|key| key << 35).collect();
    let opened = open(&keys, r#", "cache_rows": 1000, "hit_rate_threshold": 1.0"#);
    let (bag, table) = (opened.bag("none", on), &opened.table);
    assert_eq!(bag.look(&keys), rows(&keys, 0));
    let (changed, kept) = keys.split_at(100);
    table.upsert(5, changed, &rows(changed, 5), Reach::AtOnce).unwrap();
    table.delete(6, &changed[..10], Reach::AtOnce).unwrap();
    table.upsert(7, &[-1], &row(-1, 7), Reach::AtOnce).unwrap();
    // Older versions are ignored.
    table.upsert(4, &changed[..20], &rows(&changed[..20], 4), Reach::AtOnce).unwrap();
    table.delete(3, changed, Reach::AtOnce).unwrap();
    for _ in 0..2 {
        assert_eq!(bag.look(&changed[10..]), rows(&changed[10..], 5));
        assert_eq!(bag.look(&changed[..10]), DEFAULT.repeat(10));
        assert_eq!(bag.look(&[-1]), row(-1, 7));
        assert_eq!(bag.look(kept), rows(kept, 0));
    }
    // The cache has these after a refresh, also those that only the GPU cache holds.
    table.upsert(8, kept, &rows(kept, 8), Reach::ByRefresh).unwrap();
    table.delete(8, &changed[10..20], Reach::ByRefresh).unwrap();
    assert_eq!(bag.look(kept), rows(kept, 0));
    assert_eq!(bag.look(&changed[10..20]), rows(&changed[10..20], 5));
    table.refresh();
    assert_eq!(bag.look(kept), rows(kept, 8));
    assert_eq!(bag.look(&changed[10..]), [DEFAULT.repeat(10), rows(&changed[20..], 5)].concat());
}

/// Two sessions share one cache: each finds the rows that the other has inserted.
pub fn sharing(on: impl Into<On>) {
    let on = on.into();
    let opened = open(&[1, 2, 3], r#", "cache_rows": 100, "init_ec": false, "hit_rate_threshold": 0.0"#);
    let [first, second] = [opened.bag("none", on), opened.bag("none", on)];
    assert_eq!(first.look(&[1, 2]), DEFAULT.repeat(2));
    opened.embeddings.wait();
    assert_eq!(second.look(&[1, 2, 3]), [rows(&[1, 2], 0), DEFAULT.to_vec()].concat());
    opened.embeddings.wait();
    drop(second);
    assert_eq!(first.look(&[1, 2, 3]), rows(&[1, 2, 3], 0));
    // A graph keeps its tables open, and closes them if it has the last reference.
    if let On::Session(_) = on {
        drop(opened);
        assert_eq!(first.look(&[1, 2, 3]), rows(&[1, 2, 3], 0));
    }
}

/// Several threads look up more keys than fit into the cache, while rows are updated and deleted. Every row is complete
/// and belongs to its key, and no existing row is missing.
pub fn racing(on: impl Into<On>) {
    let on = on.into();
    const KEYS: i64 = 400;
    let keys: Vec<i64> = (0..KEYS).collect();
    let opened = &open(&keys, r#", "cache_rows": 70, "init_ec": false, "hit_rate_threshold": 1.0"#);
    let (stop, keys) = (&AtomicBool::new(false), &keys);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for version in 1.. {
                let (stays, goes) = keys.split_at(300);
                opened.table.upsert(version, stays, &rows(stays, version), Reach::AtOnce).unwrap();
                if version % 2 == 0 {
                    opened.table.delete(version, goes, Reach::AtOnce).unwrap();
                } else {
                    opened.table.upsert(version, goes, &rows(goes, version), Reach::AtOnce).unwrap();
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                scope.spawn(move || {
                    let (bag, mut random) = (opened.bag("none", on), Random(seed));
                    for _ in 0..if on == On::Session(Provider::Cpu) { 20 } else { 200 } {
                        let asked: Vec<i64> = (0..150).map(|_| random.below(KEYS as usize) as i64).collect();
                        let (vectors, hit) = bag.run(&asked, None);
                        for ((key, row), hit) in asked.iter().zip(vectors.chunks_exact(DIM)).zip(hit) {
                            if !hit {
                                assert!(*key >= 300 && row == DEFAULT, "key {key}: {row:?}");
                                continue;
                            }
                            assert_eq!((row[0], row[2]), (*key as f32, -(*key as f32)), "key {key}: {row:?}");
                        }
                    }
                })
            })
            .collect();
        let outcomes: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    });
    // In the end every row has its last version.
    let (bag, stays) = (opened.bag("none", on), &keys[..300]);
    let vectors = bag.look(stays);
    let version = vectors[1];
    assert!(version > 0.0 && vectors == rows(stays, version as u64));
}
