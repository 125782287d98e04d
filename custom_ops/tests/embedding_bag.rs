//! EmbeddingBag in a real session, with tables in memory.

mod session;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use pagoda_custom_ops::side_channel::tables::{self, TableRows, Tables};
use pagoda_test_support::{Attribute, BOOL, Dim, F32, Graph, I64, Random};
use session::{Numbers, Session, Values};

/// The keys of each table: negative, beyond 2^32, and both ends of the range.
const KEYS: [i64; 6] = [0, -1, 7, (1 << 40) + 3, i64::MIN, i64::MAX];
const DEFAULT: f32 = -0.5;

/// The tables `narrow` (3 elements a row), `wide` (70) and `failing`. The key determines the row.
struct InMemory;

impl Tables for InMemory {
    fn table(&self, name: &str) -> Result<Arc<dyn TableRows>, String> {
        let dim = match name {
            "narrow" => 3,
            "wide" => 70,
            "failing" => 1,
            _ => return Err("no such table".to_owned()),
        };
        let rows = KEYS.iter().map(|&key| (key, row(key, dim))).collect();
        Ok(Arc::new(Table { dim, rows, failing: name == "failing" }))
    }
}

struct Table {
    dim: usize,
    rows: HashMap<i64, Vec<f32>>,
    failing: bool,
}

impl TableRows for Table {
    fn dim(&self) -> usize {
        self.dim
    }

    fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool]) -> Result<(), String> {
        match self.failing {
            true if keys == [13] => panic!("a panic that was asked for"),
            true => return Err("out of order".to_owned()),
            false => {}
        }
        assert_eq!((numbers.len(), found.len()), (keys.len() * self.dim, keys.len()));
        for ((key, numbers), found) in keys.iter().zip(numbers.chunks_exact_mut(self.dim)).zip(found) {
            let row = self.rows.get(key);
            *found = row.is_some();
            numbers.copy_from_slice(row.unwrap_or(&vec![DEFAULT; self.dim]));
        }
        Ok(())
    }
}

fn row(key: i64, dim: usize) -> Vec<f32> {
    let mut random = Random(key.cast_unsigned());
    (0..dim).map(|_| random.number()).collect()
}

static OPENED: AtomicUsize = AtomicUsize::new(0);

fn open(model: &Graph, entry: Option<&str>) -> Result<Session, String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tables::set_opener(|entry| match entry {
            "nowhere" => Err("there is no such file".to_owned()),
            "counted" => {
                OPENED.fetch_add(1, Ordering::Relaxed);
                Ok(Arc::new(InMemory))
            }
            _ => Ok(Arc::new(InMemory)),
        });
    });
    Session::open(&model.to_bytes(), entry)
}

fn graph(inputs: &[&str], outputs: &[&str], attributes: &[Attribute]) -> Graph {
    let mut graph = Graph::new();
    for name in inputs.iter().filter(|name| !name.is_empty()) {
        graph = graph.input(name, I64, &[Dim::Any(if *name == "keys" { "K" } else { "R+1" })]);
    }
    for name in outputs {
        graph = match *name {
            "vectors" => graph.output(name, F32, &[Dim::Any("R"), Dim::Any("dim")]),
            "hit" => graph.output(name, BOOL, &[Dim::Any("K")]),
            _ => graph,
        };
    }
    graph.node("ai.pagoda.EmbeddingBag", inputs, outputs, attributes)
}

fn attributes(table: &'static str, combiner: &'static str) -> [Attribute; 2] {
    [Attribute::Text("table", table), Attribute::Text("combiner", combiner)]
}

fn bag(table: &'static str, combiner: &'static str) -> Session {
    open(&graph(&["keys", "offsets"], &["vectors", "hit"], &attributes(table, combiner)), Some("tables")).unwrap()
}

fn vector(key: i64, dim: usize) -> Vec<f32> {
    if KEYS.contains(&key) { row(key, dim) } else { vec![DEFAULT; dim] }
}

/// The reference result: in f64, key by key.
fn expected(keys: &[i64], offsets: &[i64], dim: usize, combiner: &str) -> Vec<f64> {
    let slot = |pair: &[i64]| {
        let keys = &keys[pair[0] as usize..pair[1] as usize];
        let mut sum = vec![0.0; dim];
        for &key in keys {
            sum.iter_mut().zip(vector(key, dim)).for_each(|(sum, number)| *sum += f64::from(number));
        }
        let count = keys.len().max(1) as f64;
        let divisor = if combiner == "sum" {
            1.0
        } else if combiner == "mean" {
            count
        } else {
            count.sqrt()
        };
        sum.into_iter().map(move |sum| sum / divisor).collect::<Vec<_>>()
    };
    offsets.windows(2).flat_map(slot).collect()
}

fn check(session: &Session, keys: &[i64], offsets: &[i64], dim: usize, combiner: &str) {
    let counts = [keys.len() as i64, offsets.len() as i64];
    let inputs = [Numbers("keys", &counts[..1], keys), Numbers("offsets", &counts[1..], offsets)];
    let outputs = session.run(&inputs, &["vectors", "hit"]).unwrap();
    let Values::Floats(dims, vectors) = &outputs[0] else { panic!("{outputs:?}") };
    assert_eq!(dims, &[offsets.len() as i64 - 1, dim as i64]);
    let expected = expected(keys, offsets, dim, combiner);
    for (at, (got, expected)) in vectors.iter().zip(&expected).enumerate() {
        assert!((f64::from(*got) - expected).abs() < 1e-4, "{combiner} {at}: {got} is not {expected}");
    }
    if !keys.is_empty() {
        let hit = keys.iter().map(|key| KEYS.contains(key)).collect();
        assert_eq!(outputs[1], Values::Bools(vec![keys.len() as i64], hit));
    }
}

#[test]
fn rows_are_combined_and_missing_keys_told() {
    for (table, dim) in [("narrow", 3), ("wide", 70)] {
        for combiner in ["sum", "mean", "sqrtn"] {
            let session = bag(table, combiner);
            check(&session, &[7, -1, 7, 99, i64::MIN, i64::MAX, KEYS[3]], &[0, 4, 4, 7], dim, combiner);
            check(&session, &[], &[0], dim, combiner);
            check(&session, &[], &[0, 0, 0], dim, combiner);
            check(&session, &[4], &[0, 0, 1, 1], dim, combiner);
            let mut random = Random(5);
            let keys: Vec<i64> = (0..20_000).map(|_| random.pick(&[0, -1, 7, 8, i64::MAX])).collect();
            let offsets: Vec<i64> = (0..=4_000).map(|slot| slot * 5).collect();
            check(&session, &keys, &offsets, dim, combiner);
        }
    }
}

#[test]
fn without_a_combiner_each_key_has_a_vector() {
    let without = ["keys"];
    let left_out = ["keys", ""];
    for inputs in [&without[..], &left_out[..]] {
        let graph = graph(inputs, &["vectors", "hit"], &attributes("narrow", "none"));
        let session = open(&graph, Some("tables")).unwrap();
        let keys = [7, 5, 7, i64::MIN];
        let outputs = session.run(&[Numbers("keys", &[4], &keys)], &["vectors", "hit"]).unwrap();
        let rows = keys.iter().flat_map(|&key| vector(key, 3)).collect();
        assert_eq!(outputs, [Values::Floats(vec![4, 3], rows), Values::Bools(vec![4], vec![true, false, true, true])]);
        let outputs = session.run(&[Numbers("keys", &[0], &[])], &["vectors"]).unwrap();
        assert_eq!(outputs, [Values::Floats(vec![0, 3], vec![])]);
    }
}

#[test]
fn which_keys_were_found_may_be_left_out() {
    let one = ["vectors"];
    let unnamed = ["vectors", ""];
    for outputs in [&one[..], &unnamed[..]] {
        let graph = graph(&["keys", "offsets"], outputs, &attributes("narrow", "sum"));
        let session = open(&graph, Some("tables")).unwrap();
        let inputs = [Numbers("keys", &[1], &[7]), Numbers("offsets", &[2], &[0, 1])];
        assert_eq!(session.run(&inputs, &["vectors"]).unwrap(), [Values::Floats(vec![1, 3], row(7, 3))]);
    }
}

#[test]
fn many_threads_run_one_session() {
    let session = bag("wide", "mean");
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let session = &session;
            scope.spawn(move || {
                for round in 0..50 {
                    let keys: Vec<i64> = (0..1 + (thread * 31 + round * 7) % 90).map(|i| KEYS[i % 6] ^ 1).collect();
                    check(session, &keys, &[0, keys.len() as i64 / 2, keys.len() as i64], 70, "mean");
                }
            });
        }
    });
}

#[test]
fn bad_input_is_named() {
    let session = bag("narrow", "sum");
    let refused = |keys: Numbers<'_>, offsets: Numbers<'_>, words: &str| {
        let error = session.run(&[keys, offsets], &["vectors", "hit"]).unwrap_err();
        assert!(error.contains(words), "{error}");
    };
    let offsets = |offsets: &[i64], words: &str| {
        let dims = [offsets.len() as i64];
        refused(Numbers("keys", &[3], &[7, 7, 7]), Numbers("offsets", &dims, offsets), words);
    };
    offsets(&[], "offsets: 0 offsets");
    offsets(&[1, 3], "offsets: first offset 1, expected 0");
    offsets(&[0, 2, 1, 3], "offsets: row 1: offset goes down from 2 to 1");
    offsets(&[0, -4, 3], "offsets: row 0: offset goes down from 0 to -4");
    offsets(&[0, 2], "offsets: last offset 2, expected 3, the number of keys");
    offsets(&[0, i64::MAX], "offsets: last offset 9223372036854775807, expected 3");
    check(&session, &[7, 7, 7], &[0, 3], 3, "sum");
}

#[test]
fn inputs_of_another_rank_are_refused() {
    let free = |name: &str, graph: Graph| graph.input(name, I64, &[Dim::Any("a"), Dim::Any("b")]);
    let flat = |name: &str, graph: Graph| graph.input(name, I64, &[Dim::Any("c")]);
    let finish = |graph: Graph| {
        let graph = graph.output("vectors", F32, &[Dim::Any("R"), Dim::Any("dim")]);
        let bytes =
            graph.node("ai.pagoda.EmbeddingBag", &["keys", "offsets"], &["vectors"], &attributes("narrow", "sum"));
        open(&bytes, Some("tables")).unwrap()
    };
    let session = finish(flat("offsets", free("keys", Graph::new())));
    let inputs = [Numbers("keys", &[1, 2], &[7, 7]), Numbers("offsets", &[2], &[0, 2])];
    let error = session.run(&inputs, &["vectors"]).unwrap_err();
    assert!(error.contains("keys: 1 dimensions expected, got 2 ([1, 2])"), "{error}");
    let session = finish(free("offsets", flat("keys", Graph::new())));
    let inputs = [Numbers("keys", &[2], &[7, 7]), Numbers("offsets", &[1, 2], &[0, 2])];
    let error = session.run(&inputs, &["vectors"]).unwrap_err();
    assert!(error.contains("offsets: 1 dimensions expected, got 2 ([1, 2])"), "{error}");
}

#[test]
fn a_lookup_that_fails_is_told() {
    let session = bag("failing", "sum");
    let run = |keys: &[i64]| {
        let inputs = [Numbers("keys", &[1], keys), Numbers("offsets", &[2], &[0, 1])];
        session.run(&inputs, &["vectors"]).unwrap_err()
    };
    let error = run(&[1]);
    assert!(error.contains("EmbeddingBag: table \"failing\": out of order"), "{error}");
    let error = run(&[13]);
    assert!(error.contains("internal error (a panic): a panic that was asked for"), "{error}");
    assert!(run(&[1]).contains("out of order"));
}

#[test]
fn a_model_that_can_not_be_bound_says_why() {
    let refused = |inputs: &[&str], attributes: &[Attribute], entry: Option<&str>, words: &str| {
        let error = open(&graph(inputs, &["vectors"], attributes), entry).err().expect(words);
        assert!(error.contains(words), "{error}");
    };
    let (both, keys, left_out) = (["keys", "offsets"], ["keys"], ["keys", ""]);
    let good = || attributes("narrow", "sum");
    refused(&both, &good(), None, "table \"narrow\": the session does not say where tables come from");
    refused(&both, &good(), None, "ai.pagoda.tables");
    refused(
        &both,
        &good(),
        Some("nowhere"),
        "table \"narrow\": ai.pagoda.tables is \"nowhere\": there is no such file",
    );
    let unknown = attributes("other", "sum");
    refused(&both, &unknown, Some("tables"), "table \"other\": ai.pagoda.tables is \"tables\": no such table");
    let expected = "expected sum, mean, sqrtn or none";
    refused(&both, &attributes("narrow", "max"), Some("tables"), &format!("combiner: \"max\", {expected}"));
    let [table, combiner] = good();
    refused(&both, &[table], Some("tables"), &format!("the attribute combiner is missing, {expected}"));
    refused(&both, &[combiner], Some("tables"), "the attribute table (the name of an embedding table) is missing");
    let number = [Attribute::Int("table", 1), Attribute::Text("combiner", "sum")];
    refused(&both, &number, Some("tables"), "table: this attribute is an int, expected a string");
    let missing = "offsets: this input is missing";
    refused(&keys, &good(), Some("tables"), missing);
    refused(&left_out, &good(), Some("tables"), missing);
    refused(&both, &attributes("narrow", "none"), Some("tables"), "offsets: with the combiner none there are none");
}

#[test]
fn the_nodes_of_a_session_share_tables() {
    let inputs = ["keys", "offsets"];
    let graph = graph(&inputs, &["vectors", "hit"], &attributes("narrow", "sum"));
    let graph = graph.output("more", F32, &[Dim::Any("R"), Dim::Any("wide")]);
    let graph = graph.node("ai.pagoda.EmbeddingBag", &inputs, &["more"], &attributes("wide", "sum"));
    for times in 1..3 {
        let session = open(&graph, Some("counted")).unwrap();
        check(&session, &[7, 1], &[0, 2], 3, "sum");
        assert_eq!(OPENED.load(Ordering::Relaxed), times, "the session before has let go of them");
    }
}
