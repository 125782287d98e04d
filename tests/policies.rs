//! Cache policies against the 17 runs of tests/data/llm/policies.safetensors (float64, two sequences, 12 slots, 30 tokens), with
//! the attention of the CPU and, where PAGODA_TEST_GPU is the number of a GPU, with that of CUDA; and against what they must be equal
//! to.

use std::collections::HashMap;

use pagoda::Status;
use pagoda::device::{DeviceMemory, Gpu};
use pagoda::kv::policy::{
    CachePolicy, DeviceSlots, LayerSlots, Needs, PolicyOptions, SlotPlan, SlotState, SlotValues, SlotsShape, named,
};
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{HeadSlots, KV_NORMS, KvFormat, KvPool, PagedAttention, Pages, cuda};
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

/// What computes the attention.
#[derive(Clone, Copy)]
enum Device {
    Cpu,
    Cuda(&'static Gpu),
}

/// What `PagedAttention` returns of a call of one sequence.
struct Attended {
    output: Vec<f32>,
    weights: Vec<f32>,
    /// `[rows, HEADS, KV_NORMS]`
    norms: Vec<f32>,
}

/// The attention of one call of one sequence over its own pages, as `PagedAttention` computes it.
fn attend(
    device: Device,
    slots: &LayerSlots,
    plan: &SlotPlan,
    pool: &mut [f32],
    [query, key, value]: [&[f32]; 3],
    positions: &[i32],
) -> Attended {
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
    let mut to = Attended {
        output: vec![f32::NAN; query.len()],
        weights: vec![f32::NAN; HEADS * SLOTS],
        norms: vec![f32::NAN; rows * HEADS * KV_NORMS],
    };
    match device {
        Device::Cpu => {
            let pool = &mut KvPool::Native(pool);
            call.run(pool, &mut to.output, Some((&mut to.weights, SLOTS)), &Serial).unwrap();
            call.kv_norms(pool, &mut to.norms).unwrap();
        }
        Device::Cuda(gpu) => attend_on(gpu, &call, pool, &mut to),
    }
    to
}

/// The same call by the CUDA kernels, on copies of its tensors.
fn attend_on(gpu: &'static Gpu, call: &PagedAttention<'_, f32>, pool: &mut [f32], to: &mut Attended) {
    let upload = |bytes: &[u8]| {
        let memory = DeviceMemory::zeroed(gpu, bytes.len()).unwrap();
        // SAFETY: nothing else uses it.
        unsafe { memory.write(0, bytes) }.unwrap();
        memory
    };
    let floats = |numbers: &[f32]| upload(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    let ints = |numbers: &[i32]| upload(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    let download = |memory: &DeviceMemory, to: &mut [f32]| {
        let mut bytes = vec![0; size_of_val(to)];
        // SAFETY: the kernels have ended.
        unsafe { memory.read(0, &mut bytes) }.unwrap();
        to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, bytes)| *to = f32::from_le_bytes(*bytes));
    };
    let slots = call.slots.unwrap();
    let [query, key, value] = [call.query, call.key, call.value].map(floats);
    let [row_offsets, cached_len, page_indptr, page_ids, positions, write_slots, token_pos] = [
        call.row_offsets,
        call.pages.cached_len,
        call.pages.page_indptr,
        call.pages.page_ids,
        call.positions.unwrap(),
        slots.write_slots,
        slots.token_pos,
    ]
    .map(ints);
    let row_sums = floats(&vec![f32::NAN; call.query.len() / SIZE * 2]);
    let [output, weights, norms, on_device] = [&to.output, &to.weights, &to.norms, &*pool].map(floats);
    let on_gpu = cuda::PagedAttention {
        element: cuda::Type::of::<f32>(),
        sequences: 1,
        total_rows: call.total_rows,
        query_heads: call.query_heads,
        kv_heads: call.kv_heads,
        head_size: call.head_size,
        query: query.address(),
        key: key.address(),
        value: value.address(),
        output: output.address(),
        row_offsets: row_offsets.address(),
        cached_len: cached_len.address(),
        page_indptr: page_indptr.address(),
        page_ids: page_ids.address(),
        page_entries: call.pages.page_ids.len(),
        pool: on_device.address(),
        scales: None,
        format: call.format,
        pool_pages: call.pages.pool_pages,
        page_size: call.pages.page_size,
        positions: Some(positions.address()),
        rotation: None,
        sinks: None,
        slopes: None,
        slots: Some(cuda::HeadSlots {
            write_slots: write_slots.address(),
            token_pos: token_pos.address(),
            len: slots.len,
        }),
        key_weights: Some(cuda::KeyWeights { weights: weights.address(), len: SLOTS, row_sums: row_sums.address() }),
        kv_norms: Some(norms.address()),
        scale: call.scale,
        window: call.window,
        softcap: call.softcap,
        settled: false,
        rows_each: (0, usize::MAX),
        scratch: None,
    };
    // SAFETY: all tensors are on the device and as long as the call says; it is waited for before they are read.
    unsafe { gpu.paged_attention(&on_gpu, std::ptr::null_mut()) }.unwrap();
    gpu.let_all_end().unwrap();
    for (memory, to) in
        [(&output, &mut to.output[..]), (&weights, &mut to.weights), (&norms, &mut to.norms), (&on_device, pool)]
    {
        download(memory, to);
    }
}

/// The slots of sequences in GPU memory, beside those of the host, which they must be equal to.
struct Mirror {
    device: DeviceSlots,
    states: Vec<SlotState>,
    heads: usize,
    lens: Vec<usize>,
    /// Rows of the plan.
    rows: usize,
}

impl Mirror {
    fn new(gpu: &'static Gpu, heads: usize, lens: &[usize], sequences: usize, rows: usize) -> Self {
        let needs = Needs { weights: true, lengths: true, errors: true };
        let shape = SlotsShape { heads, lens: lens.to_vec(), states: sequences + 1, rows, needs };
        let device = DeviceSlots::new(gpu, shape).unwrap();
        let states = (0..sequences).map(|_| device.place(&[]).unwrap()).collect();
        Self { device, states, heads, lens: lens.to_vec(), rows: 0 }
    }

    /// Plans the same rows of each sequence `[sequence][layer]`, and compares with the plans of the host.
    fn plan(&mut self, policies: &[&dyn CachePolicy], slots: &[&[LayerSlots]], plans: &[&[SlotPlan]], what: &str) {
        let rows = |plans: &&[SlotPlan]| plans[0].slots.len() / self.heads;
        self.rows = plans.iter().map(rows).sum();
        let batch = self.states.iter().zip(policies).zip(slots.iter().zip(plans));
        let batch = batch.map(|((state, policy), (slots, plans))| (state, *policy, *slots, rows(plans)));
        self.device.plan(batch).unwrap();
        for layer in 0..self.lens.len() {
            let of_layer = |of: fn(&SlotPlan) -> Vec<i32>| plans.iter().flat_map(|plans| of(&plans[layer])).collect();
            let expected: Vec<i32> = of_layer(|plan| plan.slots.iter().map(|slot| *slot as i32).collect());
            let chosen: Vec<i32> =
                self.device.chosen(layer, self.rows).unwrap().iter().map(|slot| *slot as i32).collect();
            assert_eq!(chosen, expected, "{what}: slots of layer {layer}");
            let tensors = self.device.tensors()[layer];
            let written: Vec<i32> = self.read(tensors.write_slots, expected.len());
            let expected: Vec<i32> = of_layer(|plan| plan.write_slots.clone());
            assert_eq!(written, expected, "{what}: write_slots of layer {layer}");
            let mut expected = Vec::new();
            slots
                .iter()
                .zip(plans)
                .for_each(|(slots, plans)| slots[layer].token_pos_after(&plans[layer], &mut expected));
            assert_eq!(self.read(tensors.token_pos, expected.len()), expected, "{what}: token_pos of layer {layer}");
        }
    }

    /// Ends the step: `weights` of each sequence, and `[length, error]` of each row and head, for each layer.
    fn commit(&mut self, numbers: &[(Vec<f32>, Vec<[f32; 2]>)]) {
        for (layer, (weights, norms)) in numbers.iter().enumerate() {
            let tensors = self.device.tensors()[layer];
            let norms: Vec<f32> =
                norms.iter().flat_map(|[length, error]| [*length, error / 4.0, error * 0.75]).collect();
            for (at, numbers) in [(tensors.weights, weights), (tensors.norms, &norms)] {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                // SAFETY: inside the memory; no step is in flight.
                unsafe { self.device.memory().write(at, &bytes) }.unwrap();
            }
        }
        self.device.commit().unwrap();
    }

    /// Compares with what is known on the host, and moves the sequences to other places.
    fn compare(&mut self, slots: &[&[LayerSlots]], within: f32, what: &str) {
        for (sequence, expected) in slots.iter().enumerate() {
            let mut found: Vec<LayerSlots> = expected.to_vec();
            self.device.save(&self.states[sequence], &mut found).unwrap();
            for (found, expected) in found.iter().zip(*expected) {
                assert_eq!(found.token_pos(), expected.token_pos(), "{what}, sequence {sequence}");
                for head in 0..self.heads {
                    assert_eq!(found.places(head), expected.places(head), "{what}, sequence {sequence}");
                    let numbers = |of: fn(&LayerSlots, usize) -> &[f32]| of(found, head).iter().zip(of(expected, head));
                    let kinds =
                        [numbers(LayerSlots::scores), numbers(LayerSlots::lengths), numbers(LayerSlots::errors)];
                    for (found, expected) in kinds.into_iter().flatten() {
                        let near = (found - expected).abs() <= within * expected.abs();
                        assert!(near, "{what}, sequence {sequence}: {found} and {expected}");
                    }
                }
            }
            self.states[sequence] = self.device.place(&found).unwrap();
        }
    }

    fn read(&self, at: usize, count: usize) -> Vec<i32> {
        let mut bytes = vec![0; count * 4];
        // SAFETY: no step is in flight.
        unsafe { self.device.memory().read(at, &mut bytes) }.unwrap();
        bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }
}

/// The GPU of PAGODA_TEST_GPU.
fn test_gpu() -> Option<&'static Gpu> {
    let device = std::env::var("PAGODA_TEST_GPU").ok()?;
    Some(Gpu::shared(device.parse().unwrap()).unwrap())
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
    let mut devices = vec![Device::Cpu];
    devices.extend(test_gpu().map(Device::Cuda));
    for device in devices {
        cases.iter().for_each(|case| check(&golden, case, device));
    }
}

fn check(golden: &Golden, case: &str, device: Device) {
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
    let mut mirror = match device {
        Device::Cpu => None,
        Device::Cuda(gpu) => Some(Mirror::new(gpu, HEADS, &[SLOTS], BATCH, BATCH * TOKENS)),
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
            let Attended { output, weights, norms } =
                attend(device, &run.slots, &plan, &mut run.pool, [&query, &key, &value], &positions);
            run.output.extend(output);
            let blocks = || key.chunks_exact(SIZE).zip(value.chunks_exact(SIZE));
            let lengths: Vec<f32> = norms.iter().step_by(KV_NORMS).copied().collect();
            let lost = |block: &[f32]| length(block.iter().zip(quantised(block, bits)).map(|(x, y)| x - y));
            let errors: Vec<f32> = blocks().map(|(key, value)| lost(key) + lost(value)).collect();
            done.push((plan, weights, lengths, errors));
        }
        if case == "h2o-orig" {
            let sum: Vec<f32> = done[0].1.iter().zip(&done[1].1).map(|(a, b)| a + b).collect();
            done.iter_mut().for_each(|call| call.1.clone_from(&sum));
        }
        if let Some(mirror) = &mut mirror {
            let slots = runs.each_ref().map(|run| std::slice::from_ref(&run.slots));
            let plans: Vec<_> = done.iter().map(|(plan, ..)| std::slice::from_ref(plan)).collect();
            mirror.plan(&policies.each_ref().map(|policy| &**policy), &slots, &plans, case);
            let weights = done.iter().flat_map(|(_, weights, ..)| weights.clone()).collect();
            let norms = done.iter().flat_map(|(_, _, lengths, errors)| lengths.iter().zip(errors));
            mirror.commit(&[(weights, norms.map(|(length, error)| [*length, *error]).collect())]);
        }
        for ((run, policy), (plan, weights, lengths, errors)) in runs.iter_mut().zip(&policies).zip(done) {
            let values = SlotValues { lengths: &lengths, errors: &errors };
            run.slots.commit(&**policy, &plan, &weights, values).unwrap();
        }
        if let Some(mirror) = &mut mirror {
            mirror.compare(&runs.each_ref().map(|run| std::slice::from_ref(&run.slots)), 1e-6, case);
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

/// With the same weights, a GPU chooses the slots that the host chooses; ties too.
#[test]
fn a_gpu_decides_as_the_host_does() {
    let Some(gpu) = test_gpu() else { return };
    let mut random = Random(17);
    for run in 0..60 {
        // One run of many slots: more than are kept in shared memory.
        let heads = 1 + random.below(3);
        let lens = [0, 1].map(|_| if run == 0 { 6000 } else { 6 + random.below(60) });
        let exact = run % 3 != 2;
        let policies: Vec<Box<dyn CachePolicy>> = (0..3)
            .map(|_| {
                let names: &[&str] = if exact {
                    &["lastrec", "smart-lastrec", "h2o", "qh2o", "h2o-orig"]
                } else {
                    &["h2o-vlen", "qh2o-vlen"]
                };
                let options = PolicyOptions {
                    protect: random.once_in(2).then(|| random.below(9)),
                    grace_period: random.below(5),
                    keep_initial_fraction: random.below(100) as f32 / 100.0,
                    normalise: random.once_in(2),
                    score_share: random.below(100) as f32 / 100.0,
                };
                named(names[random.below(names.len())], &options).unwrap()
            })
            .collect();
        let policies: Vec<&dyn CachePolicy> = policies.iter().map(|policy| &**policy).collect();
        let new = |policy: &&dyn CachePolicy| lens.map(|len| LayerSlots::new(*policy, heads, len).unwrap());
        let mut slots: Vec<[LayerSlots; 2]> = policies.iter().map(new).collect();
        let mut mirror = Mirror::new(gpu, heads, &lens, 3, 3 * 6000);
        for step in 0..if run == 0 { 6 } else { 40 } {
            let what = format!("run {run}, step {step}, {policies:?}, {heads} heads, {lens:?} slots");
            let fill = random.once_in(2) && step == 0;
            let plans: Vec<[SlotPlan; 2]> = slots
                .iter()
                .zip(&policies)
                .map(|(slots, policy)| {
                    let wanted = if fill || run == 0 && step < 2 { 6000 } else { 1 + random.below(7) };
                    let rows = slots.iter().fold(wanted, |rows, slots| slots.most_rows(*policy, rows));
                    slots.each_ref().map(|slots| slots.plan(*policy, rows).unwrap())
                })
                .collect();
            let all: Vec<&[LayerSlots]> = slots.iter().map(|slots| &slots[..]).collect();
            mirror.plan(&policies, &all, &plans.iter().map(|plans| &plans[..]).collect::<Vec<_>>(), &what);
            // A plan alone changes nothing.
            if random.once_in(3) {
                mirror.plan(&policies, &all, &plans.iter().map(|plans| &plans[..]).collect::<Vec<_>>(), &what);
            }
            // Few different numbers: many ties.
            let mut number = || random.below(if exact { 4 } else { 1 << 20 }) as f32 / 64.0;
            let numbers = lens.map(|len| {
                let rows: usize = plans.iter().map(|plans| plans[0].slots.len()).sum();
                let weights: Vec<f32> = (0..3 * heads * len).map(|_| number()).collect();
                (weights, (0..rows).map(|_| [number(), number()]).collect::<Vec<_>>())
            });
            mirror.commit(&numbers);
            let mut first = 0;
            for (sequence, (slots, plans)) in slots.iter_mut().zip(&plans).enumerate() {
                let own = first..first + plans[0].slots.len();
                first = own.end;
                for (layer, (slots, plan)) in slots.iter_mut().zip(plans).enumerate() {
                    let size = heads * lens[layer];
                    let (lengths, errors): (Vec<f32>, Vec<f32>) =
                        numbers[layer].1[own.clone()].iter().map(|[length, error]| (*length, *error)).unzip();
                    let values = SlotValues { lengths: &lengths, errors: &errors };
                    slots
                        .commit(policies[sequence], plan, &numbers[layer].0[sequence * size..][..size], values)
                        .unwrap();
                }
            }
            let all: Vec<&[LayerSlots]> = slots.iter().map(|slots| &slots[..]).collect();
            mirror.compare(&all, if exact { 0.0 } else { 1e-5 }, &what);
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
