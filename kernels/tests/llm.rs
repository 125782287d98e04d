//! `PagedAttention` gives the results that a program written apart from it gave, in one call or in chunks, and refuses bad
//! input by name.
#![cfg(not(miri))] // reads files

mod llm_cases;

use llm_cases::random::{alone, chunk, longest, random_case, random_slots, with_slots};
use llm_cases::{Case, FILES, Golden, Pool, each_golden, load};
use pagoda_kernels::cpu::Isa;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference::{Attended, paged_attention};
use pagoda_kernels::parallel::{Parallel, Serial, Threads};
use pagoda_kernels::{KvFormat, Pairs, bf16, f16};
use pagoda_test_support::{Random, kernel_cases};

fn run<T: OperatorElement>(case: &Case<T>, pool: &mut Pool<T>, weights_len: usize) -> Attended {
    paged_attention(&case.call(), &mut pool.borrow(), weights_len).unwrap()
}

fn worst(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, f64::max)
}

#[test]
fn the_reference_gives_the_golden_results() {
    fn check<T: OperatorElement>(name: &str, golden: Golden<T>) {
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

/// The bound of the specification, relative by Frobenius norms.
fn tolerance<T: OperatorElement>() -> f64 {
    match T::NAME {
        "f32" => 1e-5,
        "f16" => 2e-3,
        _ => 1e-2,
    }
}

fn error(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let square = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let difference = square(&mut got.iter().zip(expected).map(|(got, expected)| got - expected));
    difference / square(&mut expected.iter().copied()).max(1e-30)
}

/// The output and the key weights of the fast kernel.
fn fast<T: OperatorElement>(
    isa: Isa,
    case: &Case<T>,
    pool: &mut Pool<T>,
    weights_len: usize,
    parallel: &dyn Parallel,
) -> (Vec<T>, Vec<f32>) {
    let mut output = vec![T::from_f32(f32::NAN); case.query.len()];
    let mut weights = vec![f32::NAN; case.cached_len.len() * case.kv_heads * weights_len];
    let asked = Some((&mut weights[..], weights_len));
    case.call().run_with(isa, &mut pool.borrow(), &mut output, asked, parallel).unwrap();
    (output, weights)
}

fn wide<T: OperatorElement>(numbers: &[T]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(number.to_f32())).collect()
}

fn compare<T: OperatorElement>(name: &str, case: &Case<T>, weights_len: usize) {
    let mut expected_pool = case.pool.clone();
    let expected = run(case, &mut expected_pool, weights_len);
    for isa in Isa::available() {
        let mut pool = case.pool.clone();
        let (output, weights) = fast(isa, case, &mut pool, weights_len, &Serial);
        let (output, weights) =
            (error(&wide(&output), &expected.output), error(&wide(&weights), &expected.key_weights));
        assert!(output <= tolerance::<T>(), "{name} {isa:?}: output {output:e}");
        assert!(weights <= 1e-5, "{name} {isa:?}: key_weights {weights:e}");
        assert!(pool.bits() == expected_pool.bits(), "{name} {isa:?}: pool");
    }
}

#[test]
fn every_instruction_set_gives_the_golden_results() {
    fn check<T: OperatorElement>(name: &str, golden: Golden<T>) {
        compare(name, &golden.case, golden.weights_len);
    }
    each_golden!(check);
}

#[test]
fn random_calls_match_the_reference() {
    let mut random = Random(27);
    for number in 0..kernel_cases() / 5 {
        let case = random_case::<f32>(&mut random);
        compare(&format!("f32 {number}"), &case, longest(&case));
        let case = random_case::<f16>(&mut random);
        compare(&format!("f16 {number}"), &case, longest(&case));
        let case = random_case::<bf16>(&mut random);
        compare(&format!("bf16 {number}"), &case, longest(&case));
    }
}

fn bits<T: OperatorElement>(numbers: &[T]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_f32().to_bits()).collect()
}

#[test]
fn threads_chunks_and_neighbours_change_no_bit() {
    let mut random = Random(28);
    let threads = Threads::new(3);
    for number in 0..kernel_cases() / 10 {
        let case = random_case::<f32>(&mut random);
        let len = longest(&case);
        let width = case.query_heads * case.head_size;
        for isa in Isa::available() {
            let mut pool = case.pool.clone();
            let (output, weights) = fast(isa, &case, &mut pool, len, &Serial);
            let spread = fast(isa, &case, &mut case.pool.clone(), len, &threads);
            assert!(bits(&spread.0) == bits(&output) && bits(&spread.1) == bits(&weights), "{number} {isa:?}: threads");
            let most = case.row_offsets.windows(2).map(|rows| (rows[1] - rows[0]) as usize).max().unwrap();
            for size in [1, 16] {
                let mut chunked_pool = case.pool.clone();
                for from in (0..most).step_by(size) {
                    let part = chunk(&case, from, from + size);
                    let (got, _) = fast(isa, &part, &mut chunked_pool, len, &Serial);
                    for (sequence, rows) in part.row_offsets.windows(2).enumerate() {
                        let at = (case.row_offsets[sequence] as usize + from) * width;
                        let got = &got[rows[0] as usize * width..rows[1] as usize * width];
                        let whole = output.get(at..at + got.len()).unwrap_or_default();
                        assert!(bits(got) == bits(whole), "{number} {isa:?}: chunks of {size} from {from} on");
                    }
                }
                assert!(chunked_pool.bits() == pool.bits(), "{number} {isa:?}: pool after chunks of {size}");
            }
            // Each sequence by itself.
            for sequence in 0..case.cached_len.len() {
                let rows = case.row_offsets[sequence] as usize..case.row_offsets[sequence + 1] as usize;
                let alone = alone(&case, sequence);
                let (got, _) = fast(isa, &alone, &mut case.pool.clone(), len, &Serial);
                assert!(bits(&got) == bits(&output[rows.start * width..rows.end * width]), "{number} {isa:?}: alone");
            }
        }
    }
}

#[test]
fn slots_of_heads_match_the_reference() {
    let mut random = Random(29);
    for number in 0..kernel_cases() / 12 {
        let case = random_slots::<f32>(&mut random);
        let len = case.slots.as_ref().unwrap().2;
        compare(&format!("slots {number}"), &case, len);
    }
}

/// A NaN reaches the rows that see it, and no other.
#[test]
fn a_nan_stays_with_those_who_see_it() {
    let mut case = gqa();
    let (width, size) = (case.query_heads * case.head_size, case.head_size);
    let rows = case.row_offsets[1] as usize - case.row_offsets[0] as usize;
    assert!(rows > 3);
    let plain = fast(Isa::detect(), &case, &mut case.pool.clone(), 64, &Serial).0;
    for which in 0..2 {
        let mut spoiled = case.clone();
        let tensor = if which == 0 { &mut spoiled.key } else { &mut spoiled.value };
        tensor[2 * case.kv_heads * size] = f32::NAN;
        for isa in Isa::available() {
            let got = fast(isa, &spoiled, &mut case.pool.clone(), 64, &Serial).0;
            assert!(got[..2 * width].iter().all(|number| !number.is_nan()), "{isa:?}: earlier rows");
            assert!((2..rows).all(|row| got[row * width].is_nan()), "{isa:?}: rows from there on, of the first head");
            assert!(got[rows * width..].iter().all(|number| !number.is_nan()), "{isa:?}: other sequences");
        }
    }
    case.query[0] = f32::NAN;
    let got = fast(Isa::detect(), &case, &mut case.pool.clone(), 64, &Serial).0;
    assert!(got[0].is_nan() && bits(&got[size..]) == bits(&plain[size..]));
}

/// Pools are the same to the bit, but for what an f32 rotation rounds otherwise.
fn same_pool<T: OperatorElement>(name: &str, got: &Pool<T>, expected: &Pool<T>) {
    match (got, expected) {
        (Pool::Native(got), Pool::Native(expected)) => {
            let far = |(a, b): (&T, &T)| (a.to_f32() - b.to_f32()).abs() > 4e-7 * b.to_f32().abs().max(1.0);
            assert_eq!(got.iter().zip(expected).filter(|pair| far(*pair)).count(), 0, "{name}");
        }
        _ => assert!(got.bits() == expected.bits(), "{name}"),
    }
}

#[test]
fn chunks_and_single_tokens_give_the_bits_of_one_call() {
    fn check<T: OperatorElement>(name: &str, golden: Golden<T>) {
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

/// Scores beyond a number of bytes are not kept for the weights of slots, but computed again. What a sequence gets does not depend
/// on it.
#[test]
fn the_weights_of_a_sequence_do_not_depend_on_how_large_the_call_is() {
    let mut random = Random(31);
    // Scores of all sequences together are more than the 8 Mi that are kept, and those of each are fewer.
    let scores = |case: &Case<f32>, rows: usize| rows * case.query_heads * longest(case).next_multiple_of(64);
    let mut case = random_case::<f32>(&mut random);
    while scores(&case, case.total_rows()) < 9 << 20 || scores(&case, 70) > 8 << 20 {
        case = random_case::<f32>(&mut random);
    }
    let len = longest(&case);
    for isa in Isa::available() {
        let (_, together) = fast(isa, &case, &mut case.pool.clone(), len, &Serial);
        for sequence in 0..case.cached_len.len() {
            let one = alone(&case, sequence);
            let (_, weights) = fast(isa, &one, &mut one.pool.clone(), len, &Serial);
            let own = sequence * case.kv_heads * len..(sequence + 1) * case.kv_heads * len;
            assert!(bits(&weights[own.clone()]) == bits(&together[own]), "{isa:?}");
        }
    }
}

#[test]
fn norms_are_those_of_values_and_of_what_formats_lose() {
    let mut random = Random(30);
    for number in 0..40 {
        let case = Case { rotation: None, ..random_case::<f32>(&mut random) };
        let mut pool = case.pool.clone();
        fast(Isa::detect(), &case, &mut pool, longest(&case), &Serial);
        let mut norms = vec![f32::NAN; case.total_rows() * case.kv_heads * 3];
        case.call().kv_norms(&pool.borrow(), &mut norms).unwrap();
        let length = |numbers: &[f32]| numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let lost = |block: &[f32]| {
            let (mut codes, mut scales) =
                (vec![0; case.format.pool_width(block.len())], vec![f16::ZERO; case.format.scales_width()]);
            if case.format == KvFormat::Native {
                return 0.0;
            }
            case.format.quantise(block, &mut codes, &mut scales);
            let stored = (0..block.len()).map(|index| case.format.dequantise(&codes, &scales, index));
            length(&block.iter().zip(stored).map(|(x, y)| x - y).collect::<Vec<_>>())
        };
        let blocks = case.key.chunks_exact(case.head_size).zip(case.value.chunks_exact(case.head_size));
        for (found, (key, value)) in norms.chunks_exact(3).zip(blocks) {
            for (found, expected) in found.iter().zip([length(value), lost(key), lost(value)]) {
                let distance = (f64::from(*found) - expected).abs();
                assert!(distance <= 1e-5 * expected.max(1e-3), "{number}: {found} and {expected}");
            }
        }
    }
    let golden = load::<f32>(FILES[9].1, |bytes, _| f32::from_le_bytes(bytes), 4).case;
    let mut pool = golden.pool.clone();
    fast(Isa::detect(), &golden, &mut pool, longest(&golden), &Serial);
    let mut norms = vec![f32::NAN; golden.total_rows() * golden.kv_heads * 3];
    golden.call().kv_norms(&pool.borrow(), &mut norms).unwrap();
    // A rotation changes no length, and 8 bits lose about one part in 500 of a range: of rotated keys, as they are stored.
    for (norms, key) in norms.chunks_exact(3).zip(golden.key.chunks_exact(golden.head_size)) {
        let length = key.iter().map(|x| x * x).sum::<f32>().sqrt();
        assert!(norms[1] > 0.0 && norms[1] < 0.02 * length, "{} of {length}", norms[1]);
    }
}

fn gqa() -> Case<f32> {
    let (_, bytes) = FILES.iter().find(|(name, _)| *name == "f32-gqa").unwrap();
    load::<f32>(bytes, |bytes, _| f32::from_le_bytes(bytes), 4).case
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
            |case| case.rotation = Some((vec![1.0; 32], vec![0.0; 32], 32, Pairs::Half)),
            "missing, expected beside cos and sin",
        ),
        (
            "positions",
            |case| {
                case.rotation = Some((vec![1.0; 64], vec![0.0; 64], 32, Pairs::Half));
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
    let slots: [(&str, Change, &str); 6] = [
        ("positions", |case| case.positions = None, "expected beside token_pos"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[0] = -1, "slot -1"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[0] = 41, "slot 41, expected 0 to"),
        ("write_slots", |case| case.slots.as_mut().unwrap().0[2] = case_first(case), "is written twice"),
        ("token_pos", |case| case.positions.as_mut().unwrap()[0] += 1, "expected"),
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

#[test]
fn a_cached_token_is_not_overwritten() {
    // A sequence of 8 cached tokens and a new one, in pages 0 and 1; then one of 16 cached tokens that has page 1 too.
    let small = |pages: &[i32], indptr: &[i32], cached: &[i32]| {
        let mut case = gqa();
        let rows = cached.len();
        case.row_offsets = (0..=rows as i32).collect();
        case.query.truncate(rows * case.query_heads * case.head_size);
        case.key.truncate(rows * case.kv_heads * case.head_size);
        case.value.truncate(rows * case.kv_heads * case.head_size);
        (case.cached_len, case.page_ids, case.page_indptr) = (cached.to_vec(), pages.to_vec(), indptr.to_vec());
        case.check()
    };
    let page = gqa().page_size as i32;
    small(&[0, 1, 2, 3, 4], &[0, 2, 5], &[page, 2 * page]).unwrap();
    let error = small(&[0, 1, 2, 1, 4], &[0, 2, 5], &[page, 2 * page]).unwrap_err();
    assert!(error.tensor == "page_ids" && error.message.contains("would overwrite"), "{error}");
    assert!(small(&[5, 5], &[0, 2], &[page]).unwrap_err().message.contains("would overwrite"));
    // A prefix that several share is only read.
    small(&[0, 1, 0, 2], &[0, 2, 4], &[page, page]).unwrap();
}

#[test]
fn an_empty_batch_is_nothing() {
    let mut case = gqa();
    (case.row_offsets, case.page_indptr) = (vec![0], vec![0]);
    (case.query, case.key, case.value) = (vec![], vec![], vec![]);
    (case.cached_len, case.page_ids) = (vec![], vec![]);
    let mut pool = case.pool.clone();
    assert!(fast(Isa::detect(), &case, &mut pool, 8, &Serial).0.is_empty());
    assert!(pool.bits() == case.pool.bits());
}

fn case_first(case: &Case<f32>) -> i32 {
    case.slots.as_ref().unwrap().0[0]
}
