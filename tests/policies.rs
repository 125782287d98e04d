//! Cache policies against the 17 runs of tests/data/llm/policies.safetensors (float64, two sequences, 12 slots, 30 tokens), with
//! the attention of the CPU; and against what they must be equal to.

use std::collections::HashMap;

use pagoda::Status;
use pagoda::kv::policy::{CachePolicy, LayerSlots, PolicyOptions, SlotPlan, SlotValues, named};
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{HeadSlots, KvFormat, KvPool, PagedAttention, Pages};
use pagoda_test_support::Random;
use safetensors::SafeTensors;

const BATCH: usize = 2;
const HEADS: usize = 2;
const GROUP: usize = 2;
const SIZE: usize = 16;
const TOKENS: usize = 30;
const SLOTS: usize = 12;
const PAGE: usize = 8;

struct Golden {
    floats: HashMap<String, Vec<f32>>,
    ints: HashMap<String, Vec<i32>>,
}

impl Golden {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llm/policies.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut ints) = (HashMap::new(), HashMap::new());
        for (name, tensor) in file.tensors() {
            let numbers = tensor.data().as_chunks().0;
            match tensor.dtype() {
                safetensors::Dtype::F32 => {
                    drop(floats.insert(name, numbers.iter().map(|n| f32::from_le_bytes(*n)).collect()))
                }
                _ => drop(ints.insert(name, numbers.iter().map(|n| i32::from_le_bytes(*n)).collect())),
            }
        }
        Self { floats, ints }
    }

    /// The numbers of one token: of queries (`q`, of `GROUP` times as many heads), keys or values, `[heads, SIZE]`.
    fn token(&self, name: &str, sequence: usize, position: usize) -> Vec<f32> {
        let heads = if name == "q" { HEADS * GROUP } else { HEADS };
        let at = |head: usize| (((sequence * heads) + head) * TOKENS + position) * SIZE;
        (0..heads).flat_map(|head| self.floats[name][at(head)..][..SIZE].to_vec()).collect()
    }

    /// `[rows, heads, SIZE]`
    fn rows(&self, name: &str, sequence: usize, rows: std::ops::Range<usize>) -> Vec<f32> {
        rows.flat_map(|position| self.token(name, sequence, position)).collect()
    }
}

fn length(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.map(|number| number * number).sum::<f32>().sqrt()
}

/// A number after the quantiser that the golden errors are of.
fn quantised(numbers: &[f32], bits: u32) -> Vec<f32> {
    let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let top = ((1 << bits) - 1) as f32;
    let scale = (most - least) / top;
    let zero = -(least / scale).round_ties_even();
    let code = |number: f32| ((number / scale).round_ties_even() + zero).clamp(0.0, top);
    numbers.iter().map(|&number| (code(number) - zero) * scale).collect()
}

/// The attention of one call of one sequence over its own pages, as `PagedAttention` computes it.
fn attend(
    slots: &LayerSlots,
    plan: &SlotPlan,
    pool: &mut [f32],
    [query, key, value]: [&[f32]; 3],
    positions: &[i32],
) -> (Vec<f32>, Vec<f32>) {
    let rows = positions.len();
    let mut token_pos = Vec::new();
    slots.token_pos_after(plan, &mut token_pos);
    let call = PagedAttention {
        row_offsets: &[0, rows as i32],
        total_rows: rows,
        query_heads: HEADS * GROUP,
        kv_heads: HEADS,
        head_size: SIZE,
        query,
        key,
        value,
        pages: Pages {
            cached_len: &[slots.used() as i32],
            page_indptr: &[0, 2],
            page_ids: &[1, 0],
            pool_pages: 2,
            page_size: PAGE,
        },
        format: KvFormat::Native,
        positions: Some(positions),
        rotation: None,
        sinks: None,
        slopes: None,
        slots: Some(HeadSlots { write_slots: &plan.write_slots, token_pos: &token_pos, len: SLOTS }),
        scale: 0.0,
        window: 0,
        softcap: 0.0,
    };
    let mut output = vec![0.0; query.len()];
    let mut weights = vec![0.0; HEADS * SLOTS];
    call.run(&mut KvPool::Native(pool), &mut output, Some((&mut weights, SLOTS)), &Serial).unwrap();
    (output, weights)
}

/// One sequence under a policy.
struct Run {
    slots: LayerSlots,
    pool: Vec<f32>,
    /// `[tokens, query heads, SIZE]`
    output: Vec<f32>,
}

/// A policy with the options of a golden run: for each sequence.
fn policy_of(case: &str) -> [Box<dyn CachePolicy>; BATCH] {
    let name = ["qh2o-vlen", "qh2o", "h2o-vlen", "h2o-orig", "h2o", "smart-lastrec", "lastrec"]
        .into_iter()
        .find(|name| case.starts_with(name))
        .unwrap();
    let number_after =
        |word: &str| case.split('-').find_map(|part| part.strip_prefix(word)).and_then(|number| number.parse().ok());
    let options = |sequence: usize| PolicyOptions {
        protect: match name {
            "smart-lastrec" => (sequence == 0).then_some(3),
            _ => number_after("sink").map(|sink: f32| sink as usize),
        },
        grace_period: if case == "qh2o-vlen-4" { 2 } else { number_after("grace").unwrap_or(0.0) as usize },
        keep_initial_fraction: number_after("keep").unwrap_or(0.05),
        // One of the runs normalises without saying so: its logged slots follow from no other order.
        normalise: case.contains("normalise") || case == "h2o-grace3-chunk",
        score_share: if case == "qh2o-4-normalise" { 0.3 } else { 0.5 },
    };
    [0, 1].map(|sequence| named(name, &options(sequence)).unwrap())
}

#[test]
fn the_golden_runs_have_the_same_slots_positions_scores_and_outputs() {
    let golden = Golden::read();
    let cases: Vec<&str> = golden.ints.keys().filter_map(|name| name.strip_suffix(".chunks")).collect();
    assert_eq!(cases.len(), 17);
    for case in cases {
        check(&golden, case);
    }
}

fn check(golden: &Golden, case: &str) {
    let policies = policy_of(case);
    let bits = if case.contains("-8") { 8 } else { 4 };
    let new = |policy: &dyn CachePolicy| Run {
        slots: LayerSlots::new(policy, HEADS, SLOTS).unwrap(),
        pool: vec![0.0; 2 * 2 * PAGE * HEADS * SIZE],
        output: Vec::new(),
    };
    let mut runs = [new(&*policies[0]), new(&*policies[1])];
    let slots_at = |sequence: usize, head: usize, index: usize| {
        let chunks = &golden.ints[&format!("{case}.chunks")];
        let logged = TOKENS - chunks[0] as usize;
        golden.ints[&format!("{case}.slots")][(sequence * HEADS + head) * logged + index] as usize
    };
    let mut begin = 0;
    for (call, &rows) in golden.ints[&format!("{case}.chunks")].iter().enumerate() {
        let rows = rows as usize;
        let positions: Vec<i32> = (begin..begin + rows).map(|position| position as i32).collect();
        let mut done = Vec::new();
        for (sequence, (run, policy)) in runs.iter_mut().zip(&policies).enumerate() {
            assert_eq!(run.slots.most_rows(&**policy, rows), rows, "{case}, call {call}");
            let plan = run.slots.plan(&**policy, rows).unwrap();
            for head in (0..HEADS).filter(|_| call > 0) {
                let slots: Vec<usize> =
                    plan.slots.iter().skip(head).step_by(HEADS).map(|slot| *slot as usize).collect();
                let first = begin - golden.ints[&format!("{case}.chunks")][0] as usize;
                let expected: Vec<usize> = (0..rows).map(|row| slots_at(sequence, head, first + row)).collect();
                assert_eq!(slots, expected, "{case}, call {call}, sequence {sequence}, head {head}");
            }
            let [query, key, value] = ["q", "k", "v"].map(|name| golden.rows(name, sequence, begin..begin + rows));
            let (output, weights) = attend(&run.slots, &plan, &mut run.pool, [&query, &key, &value], &positions);
            run.output.extend(output);
            let blocks = || key.chunks_exact(SIZE).zip(value.chunks_exact(SIZE));
            let lengths: Vec<f32> = blocks().map(|(_, value)| length(value.iter().copied())).collect();
            let lost = |block: &[f32]| length(block.iter().zip(quantised(block, bits)).map(|(x, y)| x - y));
            let errors: Vec<f32> = blocks().map(|(key, value)| lost(key) + lost(value)).collect();
            done.push((plan, weights, lengths, errors));
        }
        if case == "h2o-orig" {
            let sum: Vec<f32> = done[0].1.iter().zip(&done[1].1).map(|(a, b)| a + b).collect();
            done.iter_mut().for_each(|call| call.1.clone_from(&sum));
        }
        for ((run, policy), (plan, weights, lengths, errors)) in runs.iter_mut().zip(&policies).zip(done) {
            let values = SlotValues { lengths: &lengths, errors: &errors };
            run.slots.commit(&**policy, &plan, &weights, values).unwrap();
        }
        begin += rows;
    }
    for (sequence, run) in runs.iter().enumerate() {
        let all = HEADS * SLOTS;
        let positions = &golden.ints[&format!("{case}.token_pos")][sequence * all..][..all];
        let by_slot = |slot: usize| (slot / SLOTS, run.slots.place(slot / SLOTS, slot % SLOTS));
        let found: Vec<i32> = (0..all).map(by_slot).map(|(head, place)| run.slots.positions(head)[place]).collect();
        assert_eq!(found, positions, "{case}, sequence {sequence}");
        if let Some(scores) = golden.floats.get(&format!("{case}.scores")) {
            let found = (0..all).map(by_slot).map(|(head, place)| run.slots.scores(head)[place]);
            for (found, expected) in found.zip(&scores[sequence * all..][..all]) {
                assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{case}: {found} and {expected}");
            }
        }
        let heads = HEADS * GROUP;
        for (index, found) in run.output.iter().enumerate() {
            let (token, head, number) = (index / (heads * SIZE), index / SIZE % heads, index % SIZE);
            let at = ((sequence * heads + head) * TOKENS + token) * SIZE + number;
            let expected = golden.floats[&format!("{case}.out")][at];
            assert!((found - expected).abs() < 1e-5, "{case}, token {token}, head {head}: {found} and {expected}");
        }
    }
}

// ---- random runs -------------------------------------------------------------------------------------------------

/// One head by its tokens alone, without slots: those that may leave with their scores, and the newest.
#[derive(Default)]
struct SlowHead {
    tokens: Vec<(usize, f32)>,
    newest: Vec<(usize, f32)>,
}

impl SlowHead {
    /// A call of h2o with `grace`: what leaves is chosen before the first token enters.
    fn call(&mut self, len: usize, grace: usize, positions: std::ops::Range<usize>) {
        let all = self.tokens.len() + self.newest.len() + positions.len();
        self.tokens.sort_by(|a, b| a.1.total_cmp(&b.1));
        self.tokens.drain(..all.saturating_sub(len));
        for position in positions {
            self.newest.push((position, 0.0));
            if self.newest.len() > grace {
                self.tokens.push(self.newest.remove(0));
            }
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut (usize, f32)> {
        self.tokens.iter_mut().chain(&mut self.newest)
    }
}

/// The operator writes the tokens of a call side by side.
fn assert_no_slot_twice(plan: &SlotPlan, heads: usize) {
    for head in 0..heads {
        let mut slots: Vec<_> = plan.write_slots.iter().skip(head).step_by(heads).collect();
        let rows = slots.len();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), rows);
    }
}

#[test]
fn heavy_hitters_keep_the_tokens_that_a_slow_reference_keeps() {
    let mut random = Random(5);
    for _ in 0..200 {
        let (heads, len) = (1 + random.below(3), 4 + random.below(40));
        let grace = random.below(len / 2);
        // All slots are filled by calls that leave some free at first: the first eviction goes by scores, too.
        let options = PolicyOptions { grace_period: grace, ..PolicyOptions::default() };
        let policy = named("h2o", &options).unwrap();
        let mut slots = LayerSlots::new(&*policy, heads, len).unwrap();
        let mut slow: Vec<SlowHead> = (0..heads).map(|_| SlowHead::default()).collect();
        let mut seen = 0;
        while seen < 4 * len {
            let wanted = 1 + random.below(if seen == 0 { len - 1 } else { len / 2 + 1 });
            let rows = slots.most_rows(&*policy, wanted);
            let plan = slots.plan(&*policy, rows).unwrap();
            // Weights by token, so that neither side needs the other's slots.
            let weight = |head: usize, position: usize| {
                Random((seen * 1000 + position) as u64 * 7 + head as u64).below(1 << 20) as f32
            };
            let mut weights = vec![0.0; heads * len];
            let mut token_pos = Vec::new();
            slots.token_pos_after(&plan, &mut token_pos);
            for (at, &position) in token_pos.iter().enumerate().filter(|(_, position)| **position >= 0) {
                weights[at] = weight(at / len, position as usize);
            }
            assert_no_slot_twice(&plan, heads);
            slots.commit(&*policy, &plan, &weights, SlotValues::default()).unwrap();
            for (head, slow) in slow.iter_mut().enumerate() {
                slow.call(len, grace, seen..seen + rows);
                for (position, score) in slow.all().filter(|_| seen > 0) {
                    *score += weight(head, *position);
                }
                let mut kept: Vec<_> = slow.all().map(|(position, score)| (*position, *score)).collect();
                kept.sort_by_key(|(position, _)| *position);
                let mut found: Vec<_> = slots
                    .positions(head)
                    .iter()
                    .zip(slots.scores(head))
                    .filter(|(position, _)| **position >= 0)
                    .map(|(position, score)| (*position as usize, *score))
                    .collect();
                found.sort_by_key(|(position, _)| *position);
                assert_eq!(found, kept, "{heads} heads of {len} slots, grace {grace}, {seen} tokens and {rows} more");
                let mut places: Vec<_> = (0..len).map(|slot| slots.place(head, slot)).collect();
                places.sort_unstable();
                assert_eq!(places, (0..len).collect::<Vec<_>>(), "each slot has a place of its own");
            }
            seen += rows;
        }
    }
}

/// A token that a slow reference keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SlowToken {
    position: usize,
    score: f64,
    length: f64,
    error: f64,
}

/// All heads by their tokens alone, in float64: h2o, by the lengths of values and by errors or not, without a grace period.
struct SlowHeads {
    heads: Vec<Vec<SlowToken>>,
    by_length: bool,
    score_share: Option<f64>,
}

impl SlowHeads {
    /// c·mm(score) + ((c-1)/2)·mm(err) + (1-c), with mm over all heads; the score alone without c.
    fn rank(&self, token: &SlowToken) -> f64 {
        let Some(c) = self.score_share else { return token.score };
        let scaled = |of: fn(&SlowToken) -> f64| {
            let all = || self.heads.iter().flatten().map(of);
            let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(f64::MIN, f64::max));
            if most > least { (of(token) - least) / (most - least) } else { 0.0 }
        };
        c * scaled(|token| token.score) + (c - 1.0) / 2.0 * scaled(|token| token.error) + (1.0 - c)
    }

    fn call(&mut self, len: usize, new: &[Vec<SlowToken>], weight: impl Fn(usize, usize) -> f64) {
        let exact = self.heads[0].is_empty();
        let ranked: Vec<Vec<f64>> =
            self.heads.iter().map(|head| head.iter().map(|token| self.rank(token)).collect()).collect();
        for (head, (tokens, ranked)) in self.heads.iter_mut().zip(ranked).enumerate() {
            let mut order: Vec<usize> = (0..tokens.len()).collect();
            order.sort_by(|&a, &b| ranked[a].total_cmp(&ranked[b]));
            let leave = &order[..(tokens.len() + new[head].len()).saturating_sub(len)];
            let stays = tokens.iter().enumerate().filter(|(at, _)| !leave.contains(at)).map(|(_, token)| *token);
            *tokens = stays.chain(new[head].iter().copied()).collect();
            let share =
                |token: &SlowToken| weight(head, token.position) * if self.by_length { token.length } else { 1.0 };
            let sum: f64 = tokens.iter().map(share).sum();
            let scale = if self.by_length { new[head].len() as f64 / sum } else { 1.0 };
            for token in tokens.iter_mut().filter(|_| !exact) {
                token.score += share(token) * scale;
            }
        }
    }
}

#[test]
fn lengths_and_errors_count_as_a_slow_reference_has_it() {
    let mut random = Random(11);
    for run in 0..60 {
        let (heads, len) = (1 + random.below(3), 3 + random.below(20));
        let name = ["h2o", "h2o-vlen", "qh2o", "qh2o-vlen"][run % 4];
        let score_share = [0.5, 0.3, 0.9][random.below(3)];
        let policy = named(name, &PolicyOptions { score_share, ..PolicyOptions::default() }).unwrap();
        let mut slots = LayerSlots::new(&*policy, heads, len).unwrap();
        let mut slow = SlowHeads {
            heads: vec![Vec::new(); heads],
            by_length: name.ends_with("vlen"),
            score_share: name.starts_with('q').then_some(f64::from(score_share)),
        };
        let mut seen = 0;
        while seen < 5 * len {
            // Not all slots at once: the first eviction goes by scores, too.
            let rows = slots.most_rows(&*policy, 1 + random.below(if seen == 0 { len - 1 } else { len / 2 + 1 }));
            let mut number = || (1 + random.below(1 << 20)) as f32 / 1024.0;
            let numbers: Vec<[f32; 2]> = (0..rows * heads).map(|_| [number(), number()]).collect();
            let (lengths, errors): (Vec<f32>, Vec<f32>) = numbers.iter().map(|[a, b]| (*a, *b)).unzip();
            let weight = |head: usize, position: usize| {
                (1 + Random((seen * 1000 + position) as u64 * 7 + head as u64).below(1 << 20)) as f32 / 1024.0
            };
            let plan = slots.plan(&*policy, rows).unwrap();
            let mut token_pos = Vec::new();
            slots.token_pos_after(&plan, &mut token_pos);
            let of_place =
                |(at, &position): (usize, &i32)| if position < 0 { 0.0 } else { weight(at / len, position as usize) };
            let weights: Vec<f32> = token_pos.iter().enumerate().map(of_place).collect();
            slots.commit(&*policy, &plan, &weights, SlotValues { lengths: &lengths, errors: &errors }).unwrap();
            let token = |head: usize, row: usize| SlowToken {
                position: seen + row,
                score: 0.0,
                length: lengths[row * heads + head].into(),
                error: errors[row * heads + head].into(),
            };
            let new: Vec<Vec<_>> = (0..heads).map(|head| (0..rows).map(|row| token(head, row)).collect()).collect();
            slow.call(len, &new, |head, position| weight(head, position).into());
            for (head, expected) in slow.heads.iter().enumerate() {
                let all = slots.positions(head).iter().zip(slots.scores(head)).filter(|(position, _)| **position >= 0);
                let mut found: Vec<_> = all.map(|(position, score)| (*position as usize, f64::from(*score))).collect();
                found.sort_by_key(|(position, _)| *position);
                let positions: Vec<_> = expected.iter().map(|token| token.position).collect();
                assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<_>>(), positions, "{name}, {seen} and {rows}");
                for ((_, found), SlowToken { score, .. }) in found.iter().zip(expected) {
                    assert!((found - score).abs() <= 1e-4 * score.max(1e-3), "{name}: {found} and {score}");
                }
            }
            seen += rows;
        }
    }
}

#[test]
fn the_newest_tokens_stay_and_so_does_the_beginning() {
    for (name, protect, kept) in
        [("lastrec", None, 4), ("lastrec", Some(0), 0), ("lastrec", Some(7), 7), ("smart-lastrec", None, 16)]
    {
        let policy = named(name, &PolicyOptions { protect, ..PolicyOptions::default() }).unwrap();
        let mut slots = LayerSlots::new(&*policy, 2, 32).unwrap();
        let mut seen = 0;
        for wanted in [20, 15, 1, 1, 32, 7, 9].into_iter().cycle().take(20) {
            let rows = slots.most_rows(&*policy, wanted);
            let plan = slots.plan(&*policy, rows).unwrap();
            assert_no_slot_twice(&plan, 2);
            slots.commit(&*policy, &plan, &[], SlotValues::default()).unwrap();
            seen += rows;
            let newest = seen - (32 - kept).min(seen);
            let mut expected: Vec<_> =
                (0..kept.min(newest)).chain(newest..seen).map(|position| position as i32).collect();
            expected.resize(32, -1);
            for head in slots.token_pos().chunks_exact(32) {
                let mut found = head.to_vec();
                found.sort_by_key(|position| if *position < 0 { i32::MAX } else { *position });
                assert_eq!(found, expected, "{name} {protect:?} after {seen}");
            }
        }
    }
}

#[test]
fn what_a_policy_can_not_do_is_refused_in_words() {
    let error = named("h2", &PolicyOptions::default()).unwrap_err();
    assert!(error.message().contains("\"h2\" is none of lastrec, smart-lastrec, h2o"), "{error}");
    let bad = PolicyOptions { keep_initial_fraction: 1.5, ..PolicyOptions::default() };
    assert_eq!(named("h2o", &bad).unwrap_err().argument(), Some("keep_initial_fraction"));
    let policy = named("h2o", &PolicyOptions { grace_period: 8, ..PolicyOptions::default() }).unwrap();
    let error = LayerSlots::new(&*policy, 1, 8).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("cache_length")));
    let mut slots = LayerSlots::new(&*policy, 1, 12).unwrap();
    assert!(
        slots.plan(&*policy, 13).unwrap_err().message().contains("13 tokens in a call, which may have 1 to 12 now")
    );
    let plan = slots.plan(&*policy, 12).unwrap();
    let late = plan.clone();
    slots.commit(&*policy, &plan, &[], SlotValues::default()).unwrap();
    assert_eq!(slots.commit(&*policy, &late, &[], SlotValues::default()).unwrap_err().argument(), Some("plan"));
    let plan = slots.plan(&*policy, 2).unwrap();
    assert_eq!(slots.commit(&*policy, &plan, &[0.0], SlotValues::default()).unwrap_err().argument(), Some("weights"));
    assert_eq!(slots.seen(), 12, "what was refused has changed nothing");
}
