//! Bad input is refused with the tensor, the user and the value named, and nothing is written.

mod common;

use common::{Case, Random, User, bits};
use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{HstuAttention, KvView, PagedKvAppend, Pages, Rows};

/// Three users on pages of 8: the first has 2 pages, the second 3, the third 1; the pool has 8.
fn good() -> Case<f32> {
    let users = [
        User { cached: 10, new: 3, candidates: 2, contextual: 0 },
        User { cached: 16, new: 4, candidates: 0, contextual: 0 },
        User { cached: 0, new: 5, candidates: 1, contextual: 0 },
    ];
    let mut case = Case::new(&mut Random(41), &users, 2, 4, 8);
    case.pool_pages = 8;
    case.pool.resize(8 * 2 * 8 * 8, f32::NAN);
    case
}

fn attention_refuses(case: &Case<f32>, message: &str) {
    refuses_attention(&case.attention(), message);
}

fn refuses_attention(op: &HstuAttention<'_, f32>, message: &str) {
    assert_eq!(op.check().unwrap_err().to_string(), message);
    assert_eq!(reference::hstu_attention(op).unwrap_err().to_string(), message);
    let mut output = vec![7.0; op.query.len()];
    for isa in Isa::available() {
        assert_eq!(op.run_with(isa, &mut output, &Serial).unwrap_err().to_string(), message);
    }
    assert_eq!(op.run(&mut output, &Serial).unwrap_err().to_string(), message);
    assert!(output.iter().all(|x| *x == 7.0), "written to despite {message}");
    assert_eq!(op.unmasked_pairs(), 0);
}

fn append_refuses(case: &Case<f32>, message: &str) {
    refuses_append(&case.append(), &case.pool, message);
}

fn refuses_append(op: &PagedKvAppend<'_, f32>, pool: &[f32], message: &str) {
    let mut after = pool.to_vec();
    assert_eq!(op.run(&mut after, &Serial).unwrap_err().to_string(), message);
    assert_eq!(bits(&after), bits(pool), "written to despite {message}");
    assert!(reference::paged_kv_append(op, &mut after).is_err());
    assert_eq!(bits(&after), bits(pool));
}

fn both_refuse(change: impl Fn(&mut Case<f32>), message: &str) {
    let mut case = good();
    change(&mut case);
    attention_refuses(&case, message);
    append_refuses(&case, message);
}

#[test]
fn good_input_passes() {
    let case = good();
    case.attention().check().unwrap();
    case.append().check().unwrap();
    assert!(case.attention().unmasked_pairs() > 0);
}

#[test]
fn row_offsets() {
    both_refuse(|c| c.row_offsets[0] = 1, "row_offsets: first offset 1, expected 0");
    both_refuse(|c| c.row_offsets[0] = -1, "row_offsets: first offset -1, expected 0");
    both_refuse(|c| c.row_offsets[2] = 4, "row_offsets: user 1: offset goes down from 5 to 4");
    both_refuse(|c| c.row_offsets[1] = i32::MIN, "row_offsets: user 0: offset goes down from 0 to -2147483648");
    both_refuse(|c| c.row_offsets[1] = i32::MAX, "row_offsets: user 1: offset goes down from 2147483647 to 9");
    both_refuse(|c| c.row_offsets[3] = 16, "row_offsets: last offset 16, expected 15, the number of rows");
    both_refuse(|c| c.row_offsets.truncate(3), "row_offsets: 3 offsets, expected 4 for 3 users");
    both_refuse(|c| c.row_offsets.clear(), "row_offsets: 0 offsets, expected 4 for 3 users");
}

#[test]
fn num_candidates() {
    both_refuse(|c| c.num_candidates[1] = -1, "num_candidates: user 1: -1 candidates, expected 0 to the user's 4 rows");
    both_refuse(|c| c.num_candidates[0] = 6, "num_candidates: user 0: 6 candidates, expected 0 to the user's 5 rows");
}

#[test]
fn cached_len() {
    both_refuse(|c| c.cached_len[2] = -3, "cached_len: user 2: length -3, expected 0 or more");
    both_refuse(|c| c.cached_len.truncate(2), "cached_len: 2 lengths, expected 3, one a user");
}

#[test]
fn page_lists() {
    both_refuse(|c| c.page_indptr[0] = 2, "page_indptr: first offset 2, expected 0");
    both_refuse(|c| c.page_indptr[2] = 1, "page_indptr: user 1: offset goes down from 2 to 1");
    both_refuse(|c| c.page_indptr[3] = 5, "page_indptr: last offset 5, expected 6, the number of page ids");
    both_refuse(|c| c.page_indptr.truncate(1), "page_indptr: 1 offsets, expected 4 for 3 users");
    let mut case = good();
    case.cached_len[0] = i32::MAX;
    attention_refuses(&case, "page_ids: user 0: 2 pages of 8, expected 268435456 for 2147483647 tokens");
    append_refuses(&case, "page_ids: user 0: 2 pages of 8, expected 268435457 for 2147483650 tokens");
}

#[test]
fn page_ids() {
    // The second page of user 1 holds positions 8 to 15: cached, so attention reads it and append leaves it alone.
    for (page, shown) in [(-1, "-1"), (8, "8"), (17, "17"), (i32::MIN, "-2147483648")] {
        let mut case = good();
        case.page_ids[3] = page;
        let text = format!("page_ids: user 1: page {shown} for position 8 lies outside the pool of 8 pages");
        attention_refuses(&case, &text);
        case.append().check().unwrap();
        // The third one is only appended to.
        let mut case = good();
        case.page_ids[4] = page;
        let text = format!("page_ids: user 1: page {shown} for position 16 lies outside the pool of 8 pages");
        append_refuses(&case, &text);
        case.attention().check().unwrap();
    }
}

#[test]
fn entries_that_no_token_needs_may_hold_anything() {
    let mut case = good();
    case.page_ids.extend([-1, 99]);
    case.page_indptr[3] += 2;
    case.attention().check().unwrap();
    case.append().check().unwrap();
}

#[test]
fn a_slot_written_twice() {
    // User 0 writes slots 2 to 4 of its second page, user 1 slots 0 to 3 of its third.
    let mut case = good();
    case.page_ids[4] = case.page_ids[1];
    let page = case.page_ids[1];
    append_refuses(&case, &format!("page_ids: user 1: page {page} slot 2 would be written twice, by user 0 too"));

    // One user, one page for two places: positions 8 to 15 and 16 to 20.
    let users = [User { cached: 8, new: 13, candidates: 0, contextual: 0 }];
    let mut case = Case::<f32>::new(&mut Random(42), &users, 1, 4, 8);
    case.page_ids[2] = case.page_ids[1];
    let page = case.page_ids[1];
    append_refuses(&case, &format!("page_ids: user 0: page {page} slot 0 would be written twice, by user 0 too"));

    // A page shared without an overlap of the slots written does no harm.
    let mut case = good();
    case.page_ids[5] = case.page_ids[2];
    case.append().check().unwrap();
}

#[test]
fn num_contextual() {
    let with = |contextual: &[i32]| {
        let mut case = good();
        case.num_contextual = Some(contextual.to_vec());
        case
    };
    with(&[0, 0, 5]).attention().check().unwrap();
    let cases: [(&[i32], &str); 4] = [
        (&[0, 0], "num_contextual: 2 numbers, expected 3, one a user"),
        (&[0, 0, -1], "num_contextual: user 2: -1 contextual rows, expected 0 to the user's 5 history rows"),
        (&[0, 0, 6], "num_contextual: user 2: 6 contextual rows, expected 0 to the user's 5 history rows"),
        (&[0, 2, 0], "num_contextual: user 1: 2 contextual rows beside 16 cached tokens, expected none"),
    ];
    for (contextual, message) in cases {
        attention_refuses(&with(contextual), message);
    }
}

#[test]
fn attributes() {
    let refuses = |change: &dyn Fn(&mut Case<f32>), message| {
        let mut case = good();
        change(&mut case);
        attention_refuses(&case, message);
    };
    refuses(&|c| c.scaling_seqlen = 0, "scaling_seqlen: 0, expected 1 or more");
    refuses(&|c| c.target_group_size = -5, "target_group_size: -5, expected 1 or more");
    refuses(&|c| c.max_attn_len = -1, "max_attn_len: -1, expected 0 or more");
    refuses(&|c| c.alpha = f32::NAN, "alpha: NaN, expected a finite number");
    refuses(&|c| c.alpha = f32::INFINITY, "alpha: inf, expected a finite number");
}

#[test]
fn lengths_and_shapes() {
    both_refuse(|c| c.key.truncate(119), "key: 119 elements do not make the shape [15, 2, 4]");
    both_refuse(|c| c.value.push(0.0), "value: 121 elements do not make the shape [15, 2, 4]");
    both_refuse(|c| c.pool.truncate(1000), "kv_pool: 1000 elements do not make the shape [8, 2, 8, 2, 4]");
    both_refuse(|c| c.page_size = 0, "kv_pool: page_size 0, expected a multiple of 8");
    both_refuse(|c| c.page_size = 12, "kv_pool: page_size 12, expected a multiple of 8");

    let case = good();
    let mut short = vec![7.0; 119];
    let error = case.attention().run(&mut short, &Serial).unwrap_err();
    assert_eq!(error.to_string(), "output: 119 elements, expected 120");
    assert!(short.iter().all(|x| *x == 7.0));
}

#[test]
fn shapes_whose_product_overflows() {
    let case = good();
    let rows = Rows { heads: usize::MAX / 2, ..case.rows() };
    let text = format!("query: 120 elements do not make the shape [15, {}, 4]", usize::MAX / 2);
    refuses_attention(&HstuAttention { rows, ..case.attention() }, &text);
    let pages = Pages { pool_pages: usize::MAX / 4, ..case.pages() };
    let text = format!("kv_pool: 1024 elements do not make the shape [{}, 2, 8, 2, 4]", usize::MAX / 4);
    refuses_attention(&HstuAttention { cache: Some((pages, KvView::Native(&case.pool))), ..case.attention() }, &text);
    refuses_append(&PagedKvAppend { pages, ..case.append() }, &case.pool, &text);
    assert!(PagedKvAppend { pages, ..case.append() }.check().is_err());
    for (heads, head_size) in [(0, 4), (2, 0)] {
        let rows = Rows { heads, head_size, ..case.rows() };
        let text = format!("query: shape [15, {heads}, {head_size}] has no heads or no head size");
        refuses_attention(&HstuAttention { rows, ..case.attention() }, &text);
    }
}
