//! `PagedAttention` gives the results that a program written apart from it gave, in one call or in chunks, and refuses bad
//! input by name.
#![cfg(not(miri))] // reads files

mod llm_cases;

use llm_cases::{Case, FILES, Golden, Pool, element, load};
use pagoda_kernels::cpu::reference::{Attended, paged_attention};
use pagoda_kernels::{Element, KvFormat, bf16, f16};
use safetensors::Dtype;

/// Calls `check` with every golden case, in its element type.
macro_rules! each_golden {
    ($check:ident) => {
        for (name, bytes) in FILES {
            match element(bytes) {
                Dtype::F32 => $check(name, load::<f32>(bytes, |bytes, _| f32::from_le_bytes(bytes), 4)),
                Dtype::F16 => $check(name, load::<f16>(bytes, |bytes, _| f16::from_le_bytes([bytes[0], bytes[1]]), 2)),
                Dtype::BF16 => {
                    $check(name, load::<bf16>(bytes, |bytes, _| bf16::from_le_bytes([bytes[0], bytes[1]]), 2))
                }
                other => panic!("{name} is of {other:?}"),
            }
        }
    };
}

fn run<T: Element>(case: &Case<T>, pool: &mut Pool<T>, weights_len: usize) -> Attended {
    paged_attention(&case.call(), &mut pool.borrow(), weights_len).unwrap()
}

fn worst(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, f64::max)
}

#[test]
fn the_reference_gives_the_golden_results() {
    fn check<T: Element>(name: &str, golden: Golden<T>) {
        let mut pool = golden.case.pool.clone();
        let attended = run(&golden.case, &mut pool, golden.weights_len);
        let (output, weights) =
            (worst(&attended.output, &golden.output), worst(&attended.key_weights, &golden.key_weights));
        println!("{name}: output {output:e}, key_weights {weights:e}");
        // Rotations are in f32.
        assert!(output < 2e-6 && weights < 2e-6, "{name}: output {output:e}, key_weights {weights:e}");
        same_pool(name, &pool, &golden.pool);
    }
    each_golden!(check);
}

/// Pools are the same to the bit, but for what an f32 rotation rounds otherwise.
fn same_pool<T: Element>(name: &str, got: &Pool<T>, expected: &Pool<T>) {
    match (got, expected) {
        (Pool::Native(got), Pool::Native(expected)) => {
            let far = |(a, b): (&T, &T)| (a.to_f32() - b.to_f32()).abs() > 4e-7 * b.to_f32().abs().max(1.0);
            assert_eq!(got.iter().zip(expected).filter(|pair| far(*pair)).count(), 0, "{name}");
        }
        _ => assert!(got.bits() == expected.bits(), "{name}"),
    }
}

/// The rows `from..to` of each sequence, with those before them in the cache.
fn chunk<T: Element>(case: &Case<T>, from: usize, to: usize) -> Case<T> {
    let mut chunk = case.clone();
    let mut taken = Vec::new();
    chunk.row_offsets = vec![0];
    for (sequence, rows) in case.row_offsets.windows(2).enumerate() {
        let rows = rows[0] as usize..rows[1] as usize;
        let some = (rows.start + from).min(rows.end)..(rows.start + to).min(rows.end);
        chunk.cached_len[sequence] += (some.start - rows.start) as i32;
        taken.extend(some);
        chunk.row_offsets.push(taken.len() as i32);
    }
    let pick = |tensor: &[T], heads: usize| -> Vec<T> {
        let width = heads * case.head_size;
        taken.iter().flat_map(|row| tensor[row * width..(row + 1) * width].iter().copied()).collect()
    };
    chunk.query = pick(&case.query, case.query_heads);
    chunk.key = pick(&case.key, case.kv_heads);
    chunk.value = pick(&case.value, case.kv_heads);
    chunk.positions = case.positions.as_ref().map(|positions| taken.iter().map(|&row| positions[row]).collect());
    chunk
}

#[test]
fn chunks_and_single_tokens_give_the_bits_of_one_call() {
    fn check<T: Element>(name: &str, golden: Golden<T>) {
        let Golden { case, weights_len, .. } = golden;
        let longest = case.row_offsets.windows(2).map(|rows| (rows[1] - rows[0]) as usize).max().unwrap();
        let mut whole_pool = case.pool.clone();
        let whole = run(&case, &mut whole_pool, weights_len);
        let width = case.query_heads * case.head_size;
        for size in [1, 7, 16] {
            let mut pool = case.pool.clone();
            for from in (0..longest).step_by(size) {
                let part = chunk(&case, from, from + size);
                let attended = run(&part, &mut pool, weights_len);
                for (sequence, rows) in part.row_offsets.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
                    let at = (case.row_offsets[sequence] as usize + from) * width;
                    let part = &attended.output[rows[0] as usize * width..rows[1] as usize * width];
                    assert_eq!(part, &whole.output[at..at + part.len()], "{name}: chunks of {size} from {from} on");
                }
            }
            assert!(pool.bits() == whole_pool.bits(), "{name}: the pool after chunks of {size}");
        }
    }
    each_golden!(check);
}

fn gqa() -> Case<f32> {
    let (_, bytes) = FILES.iter().find(|(name, _)| *name == "f32-gqa").unwrap();
    load::<f32>(bytes, |bytes, _| f32::from_le_bytes(bytes), 4).case
}

/// The slots that a call without slots uses.
fn with_slots(mut case: Case<f32>) -> Case<f32> {
    let sequences = case.cached_len.len();
    let rows = |sequence: usize| case.row_offsets[sequence]..case.row_offsets[sequence + 1];
    let end = |sequence: usize| case.cached_len[sequence] + rows(sequence).end - rows(sequence).start;
    let len = (0..sequences).map(end).max().unwrap() as usize + 3;
    let (mut write_slots, mut token_pos, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..sequences {
        for position in case.cached_len[sequence]..end(sequence) {
            positions.push(position);
            write_slots.extend(vec![position; case.kv_heads]);
        }
        for _ in 0..case.kv_heads {
            token_pos.extend((0..len as i32).map(|slot| if slot < end(sequence) { slot } else { -1 }));
        }
    }
    (case.slots, case.positions) = (Some((write_slots, token_pos, len)), Some(positions));
    case
}

#[test]
fn slots_in_order_are_no_slots() {
    let plain = gqa();
    let slotted = with_slots(plain.clone());
    let (mut pool, mut slotted_pool) = (plain.pool.clone(), plain.pool.clone());
    let expected = run(&plain, &mut pool, 64);
    let got = run(&slotted, &mut slotted_pool, 64);
    assert_eq!((got.output, got.key_weights), (expected.output, expected.key_weights));
    assert!(slotted_pool.bits() == pool.bits());
}

#[test]
fn a_slope_weakens_what_is_far_away() {
    let mut case = gqa();
    let expected = run(&case, &mut case.pool.clone(), 64);
    case.slopes = Some(vec![0.0; case.query_heads]);
    assert_eq!(run(&case, &mut case.pool.clone(), 64).output, expected.output, "a slope of 0 is none");
    // A steep one leaves a row its own value alone.
    case.slopes = Some(vec![1e6; case.query_heads]);
    let output = run(&case, &mut case.pool.clone(), 64).output;
    let (size, group) = (case.head_size, case.query_heads / case.kv_heads);
    for (at, got) in output.iter().enumerate() {
        let (row, head, column) = (at / size / case.query_heads, at / size % case.query_heads, at % size);
        let own = case.value[(row * case.kv_heads + head / group) * size + column];
        assert!((got - f64::from(own)).abs() < 1e-9);
    }
}

#[test]
fn bad_input_is_refused_by_name() {
    type Change = fn(&mut Case<f32>);
    let cases: [(&str, Change, &str); 24] = [
        ("query", |case| case.query.truncate(5), "do not make the shape"),
        ("key", |case| case.key.truncate(5), "do not make the shape"),
        ("value", |case| case.value.push(0.0), "do not make the shape"),
        ("query", |case| case.query_heads = 5, "expected a multiple of the 2 heads of key"),
        ("query", |case| case.kv_heads = 0, "expected some of each"),
        ("row_offsets", |case| case.row_offsets[1] = 99, "goes down"),
        ("row_offsets", |case| case.row_offsets[0] = 1, "first offset 1"),
        ("cached_len", |case| case.cached_len[0] = -1, "expected 0 or more"),
        ("page_indptr", |case| case.page_indptr[1] = 99, "goes down"),
        ("page_ids", |case| case.page_ids[0] = 12, "outside the pool of 12 pages"),
        ("page_ids", |case| case.page_ids[0] = -1, "outside the pool"),
        ("page_ids", |case| case.cached_len[0] += 1000, "expected"),
        ("page_ids", |case| case.page_ids.fill(3), "would be written twice"),
        ("kv_pool", |case| case.page_size = 12, "expected a multiple of 8"),
        ("kv_pool", |case| case.pool_pages = 13, "do not make the shape"),
        ("kv_pool", |case| case.format = KvFormat::Int8, "native numbers, expected Int8"),
        ("window", |case| case.window = -1, "-1, expected 0 or more"),
        ("scale", |case| case.scale = f32::NAN, "NaN"),
        ("softcap", |case| case.softcap = -2.0, "-2"),
        ("sinks", |case| case.sinks = Some(vec![0.0; 5]), "do not make the shape [6]"),
        ("slopes", |case| case.slopes = Some(vec![]), "do not make the shape [6]"),
        ("positions", |case| case.positions = Some(vec![0]), "do not make the shape [54]"),
        (
            "positions",
            |case| case.rotation = Some((vec![1.0; 32], vec![0.0; 32], 32, pagoda_kernels::Pairs::Half)),
            "missing, expected beside cos and sin",
        ),
        (
            "positions",
            |case| {
                case.rotation = Some((vec![1.0; 64], vec![0.0; 64], 32, pagoda_kernels::Pairs::Half));
                case.positions = Some(vec![2; 54]);
            },
            "row 0 has position 2, expected 0 to 1",
        ),
    ];
    for (tensor, change, text) in cases {
        let mut case = gqa();
        case.check().unwrap();
        change(&mut case);
        let error = case.check().expect_err(tensor);
        assert!(error.tensor == tensor && error.to_string().contains(text), "{tensor}, {text}: {error}");
    }
    let slots: [(&str, Change, &str); 5] = [
        ("positions", |case| case.positions = None, "expected beside token_pos"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[0] = -1, "slot -1"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[0] = 41, "slot 41, expected 0 to"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[2] = case_first(case), "is written twice"),
        ("token_pos", |case| case.slots.as_mut().unwrap().1.truncate(5), "do not make the shape"),
    ];
    for (tensor, change, text) in slots {
        let mut case = with_slots(gqa());
        case.check().unwrap();
        change(&mut case);
        let error = case.check().expect_err(tensor);
        assert!(error.tensor == tensor && error.to_string().contains(text), "{tensor}, {text}: {error}");
    }
    let error = gqa().call().check(&gqa().pool.borrow(), Some(3)).unwrap_err();
    assert_eq!(error.tensor, "weights_len", "{error}");
}

fn case_first(case: &Case<f32>) -> i32 {
    case.slots.as_ref().unwrap().0[0]
}
