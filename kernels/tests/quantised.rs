//! Quantised pools: the append and the attention on every instruction set give what the reference gives of the same stored
//! numbers, however a history is cut into calls.

mod common;

use common::quantised::{FORMATS, Pool};
use common::{Case, Random, User, bits, error, only, random_case, tolerance};
use pagoda_kernels::cpu::{Isa, OperatorElement, reference};
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{InputError, KvFormat, bf16, f16};
use pagoda_test_support::kernel_cases;

fn kinds() -> Vec<(KvFormat, Isa)> {
    FORMATS.into_iter().flat_map(|format| Isa::available().into_iter().map(move |isa| (format, isa))).collect()
}

/// A case and its pool before the append; int4 takes heads of even sizes.
fn cases<T: OperatorElement>(first: u64) -> impl Iterator<Item = (u64, Case<T>, Pool)> {
    (first..first + (2 * kernel_cases()).div_ceil(3)).filter_map(|seed| {
        let (case, format) = (random_case::<T>(seed), FORMATS[seed as usize % 3]);
        let fits = format != KvFormat::Int4 || case.head_size.is_multiple_of(2);
        fits.then(|| (seed, case.clone(), Pool::new(&case, format)))
    })
}

#[test]
fn the_append_matches_to_the_bit() {
    fn check<T: OperatorElement>() {
        let threads = Threads::new(3);
        for (seed, case, pool) in cases::<T>(0) {
            let mut expected = pool.clone();
            reference::paged_kv_append_quantised(&case.append(), &mut expected.writes()).unwrap();
            for isa in Isa::available() {
                assert!(pool.appended(&case, isa, &threads) == expected, "seed {seed} {} {isa:?}", T::NAME);
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn the_attention_matches() {
    fn check<T: OperatorElement>() {
        let threads = Threads::new(2);
        let mut worst: f64 = 0.0;
        for (seed, mut case, pool) in cases::<T>(3000) {
            case.candidates_only = seed % 4 == 0;
            let pool = pool.appended(&case, Isa::Portable, &Serial);
            let expected = reference::hstu_attention(&pool.attention(&case)).unwrap();
            for isa in Isa::available() {
                let error = error(&pool.output(&case, isa, &threads), &expected);
                let format = pool.format;
                assert!(
                    error <= tolerance::<T>(),
                    "seed {seed} {} {format:?} {isa:?} error {error:e}: D={} H={} page {} group {} window {} {:?}",
                    T::NAME,
                    case.head_size,
                    case.heads,
                    case.page_size,
                    case.target_group_size,
                    case.max_attn_len,
                    case.users
                );
                worst = worst.max(error);
            }
        }
        println!("{}: worst relative error {worst:e}", T::NAME);
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn an_append_of_many_tasks_matches() {
    let tokens = if cfg!(miri) { 90 } else { 700 };
    let user = User { cached: 13, new: tokens, candidates: 3, contextual: 0 };
    let case = Case::<f32>::new(&mut Random(5), &[user, user], 3, 200, 16);
    for format in FORMATS {
        let pool = Pool::new(&case, format);
        let mut expected = pool.clone();
        reference::paged_kv_append_quantised(&case.append(), &mut expected.writes()).unwrap();
        assert!(pool.appended(&case, Isa::detect(), &Threads::new(3)) == expected, "{format:?}");
    }
}

/// One user's rows from `first` on, up to `end`, behind `first` cached ones; candidates only at the end of the history.
fn part<T: OperatorElement>(case: &Case<T>, first: usize, end: usize) -> Case<T> {
    let (history, width) = (case.users[0].new, case.heads * case.head_size);
    let candidates = if end == history { case.users[0].candidates } else { 0 };
    let mut part = case.clone();
    for tensor in [&mut part.query, &mut part.key, &mut part.value] {
        *tensor = tensor[first * width..(end + candidates) * width].to_vec();
    }
    part.row_offsets[1] = (end - first + candidates) as i32;
    part.num_candidates[0] = candidates as i32;
    part.cached_len[0] = first as i32;
    part
}

#[test]
fn a_history_in_chunks_gives_the_same_bits_as_in_one_call() {
    fn check<T: OperatorElement>(window: i64) {
        let most = if cfg!(miri) { 21 } else { 200 };
        let user = User { cached: 0, new: most, candidates: most / 3, contextual: 0 };
        let mut case = Case::<T>::new(&mut Random(51), &[user], 2, 36, 8);
        (case.max_attn_len, case.target_group_size) = (window, 2);
        for (format, isa) in kinds() {
            let empty = Pool::new(&case, format);
            let whole = empty.appended(&case, isa, &Serial);
            let expected = bits(&whole.output(&case, isa, &Serial));
            for cuts in [vec![most / 2], vec![1, 2, 9, most - 1], vec![most], (1..most).step_by(13).collect()] {
                let (mut pool, mut output, mut first) = (empty.clone(), Vec::new(), 0);
                for end in cuts.iter().copied().chain([most]) {
                    let part = part(&case, first, end);
                    pool = pool.appended(&part, isa, &Serial);
                    let computed = bits(&pool.output(&part, isa, &Serial));
                    // What was computed before the candidates came is not computed again.
                    output.truncate(first * 72);
                    output.extend(computed);
                    first = end;
                }
                assert!(pool == whole, "{format:?} {isa:?} {cuts:?}: the pools differ");
                assert!(output == expected, "{format:?} {isa:?} {} {cuts:?}", T::NAME);
            }
        }
    }
    check::<f32>(0);
    check::<f16>(30);
    check::<bf16>(0);
}

#[test]
fn a_user_alone_or_in_a_batch_and_on_any_number_of_threads() {
    let user = |cached, new, candidates| User { cached, new, candidates, contextual: 0 };
    let users = [user(13, 7, 9), user(0, 40, 3), user(0, 0, 0), user(47, 0, 15), user(9, 1, 0)];
    let case = Case::<f32>::new(&mut Random(12), &users, 2, 36, 16);
    for (format, isa) in kinds() {
        let pool = Pool::new(&case, format).appended(&case, isa, &Serial);
        let together = pool.output(&case, isa, &Serial);
        assert!(bits(&pool.output(&case, isa, &Threads::new(5))) == bits(&together), "{format:?} {isa:?}");
        for user in 0..users.len() {
            let alone = only(&case, &[user]);
            let output = pool.output(&alone, isa, &Serial);
            assert!(bits(&output) == bits(case.rows_of(user, &together)), "{format:?} {isa:?} user {user}");
        }
    }
}

#[test]
fn outputs_are_near_those_of_native_pages_and_not_equal() {
    let users = [User { cached: 60, new: 20, candidates: 10, contextual: 0 }];
    let case = Case::<f32>::new(&mut Random(13), &users, 2, 64, 16);
    let native = reference::hstu_attention(&case.attention()).unwrap();
    let [int8, int4, fp8] = FORMATS.map(|format| {
        let pool = Pool::new(&case, format).appended(&case, Isa::detect(), &Serial);
        error(&pool.output(&case, Isa::detect(), &Serial), &native)
    });
    assert!(0.0 < int8 && int8 < 0.01 && int8 < fp8 && fp8 < 0.06 && fp8 < int4 && int4 < 0.2, "{int8} {fp8} {int4}");
}

/// A scale that is damaged makes the numbers of the rows that see its block NaN, in the reference and in every instruction set.
#[test]
fn a_damaged_scale_reaches_the_rows_that_see_it_alone() {
    let user = |cached| User { cached, new: 6, candidates: 5, contextual: 0 };
    let mut case = Case::<f32>::new(&mut Random(14), &[user(20), user(11)], 2, 20, 8);
    case.max_attn_len = 9;
    for format in FORMATS {
        let clean = Pool::new(&case, format).appended(&case, Isa::Portable, &Serial);
        let page = case.page_ids[1] as usize;
        for (which, damage) in [(0, 0x7e00), (1, 0x7e00), (0, 0x7c00), (1, 0xfc00)] {
            let mut pool = clean.clone();
            let block = ((page * 2 + which) * case.page_size + 7) * case.heads + 1;
            pool.scales[block * format.scales_width()] = damage;
            let expected = reference::hstu_attention(&pool.attention(&case)).unwrap();
            let finite = expected.iter().filter(|number| number.is_finite()).count();
            assert!(0 < finite && finite < expected.len(), "{format:?} {damage:#x}: {finite}");
            for isa in Isa::available() {
                let output = pool.output(&case, isa, &Serial);
                let same = output.iter().zip(&expected).all(|(a, b)| a.is_finite() == b.is_finite());
                assert!(same, "{format:?} {isa:?} {which} {damage:#x}");
            }
        }
    }
}

#[test]
fn bad_pools_are_refused_by_name_and_nothing_is_written() {
    let users = [User { cached: 10, new: 3, candidates: 2, contextual: 0 }];
    let case = Case::<f32>::new(&mut Random(41), &users, 2, 5, 8);
    let good = |format| {
        let case = Case::<f32>::new(&mut Random(41), &users, 2, if format == KvFormat::Int4 { 6 } else { 5 }, 8);
        (Pool::new(&case, format), case)
    };
    let refused = |case: &Case<f32>, pool: &Pool, message: &str| {
        let said = |error: InputError| error.to_string();
        let (mut output, mut after) = (vec![7.0; case.query.len()], pool.clone());
        let attention = pool.attention(case);
        assert_eq!(said(attention.check().unwrap_err()), message);
        assert_eq!(said(reference::hstu_attention(&attention).unwrap_err()), message);
        assert_eq!(said(attention.run(&mut output, &Serial).unwrap_err()), message);
        assert!(output.iter().all(|x| *x == 7.0), "written to despite {message}");
        if case.append().check().is_ok() {
            let append = case.append();
            assert_eq!(said(append.check().unwrap().run_quantised(after.writes(), &Serial).unwrap_err()), message);
            assert_eq!(said(reference::paged_kv_append_quantised(&append, &mut after.writes()).unwrap_err()), message);
        }
        assert!(after == *pool, "written to despite {message}");
    };
    let pages = case.pool_pages;
    for format in FORMATS {
        let (mut pool, case) = good(format);
        let width = format.pool_width(case.head_size);
        let codes = pages * 2 * 8 * 2 * width - 1;
        pool.codes.pop();
        refused(&case, &pool, &format!("kv_pool: {codes} elements do not make the shape [{pages}, 2, 8, 2, {width}]"));
        let (mut pool, case) = good(format);
        pool.scales.push(0);
        let (scales, width) = (pool.scales.len(), format.scales_width());
        refused(
            &case,
            &pool,
            &format!("kv_scales: {scales} elements do not make the shape [{pages}, 2, 8, 2, {width}]"),
        );
    }
    let (pool, _) = good(KvFormat::Int8);
    let odd = Pool { format: KvFormat::Int4, ..pool.clone() };
    refused(&case, &odd, "key: heads of 5 numbers, expected an even number for int4");
    let native = Pool { format: KvFormat::Native, ..pool.clone() };
    refused(&case, &native, "kv_pool: quantised, expected native numbers");
    // New rows are read from the pool too, so they need pages.
    let mut short = case.clone();
    (short.users[0].new, short.cached_len[0]) = (3, 15);
    refused(&short, &pool, "page_ids: user 0: 2 pages of 8, expected 3 for 18 tokens");
}
