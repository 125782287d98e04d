//! Sampling: the tokens of a plain sampler that sorts all logits and computes in f64, the distribution of many draws, log
//! probabilities, and the same result whatever else is in the call. By every kernel that the GPU has.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cuda::{Gpu, Sampling, SamplingPath, SamplingResult, SamplingRow, TokenEdit};
use pagoda_test_support::Random;

use crate::Context;
use crate::device::{Tensor, bytes};

/// What a row asks for.
#[derive(Clone, Debug)]
struct Request {
    seed: u64,
    position: u64,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
    biases: Vec<(u32, f32)>,
    /// Tokens, and how often each is in the output.
    seen: Vec<(u32, u32)>,
    bans: Vec<u32>,
    mask: Option<Vec<u32>>,
    forced: Option<u32>,
    top_n: Option<usize>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            seed: 0,
            position: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            biases: Vec::new(),
            seen: Vec::new(),
            bans: Vec::new(),
            mask: None,
            forced: None,
            top_n: None,
        }
    }
}

/// Samples row i of the logits as request i says, by one kernel.
fn sample_by(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    path: SamplingPath,
    vocab: usize,
    logits: &[f32],
    requests: &[Request],
) -> Vec<SamplingResult> {
    let (mut rows, mut edits, mut masks) = (Vec::new(), Vec::new(), Vec::new());
    let words = vocab.div_ceil(32);
    for (row, request) in (0..).zip(requests) {
        let first_edit = edits.len() as i32;
        edits.extend(request.biases.iter().map(|&(token, bias)| TokenEdit { token, value: bias.to_bits() }));
        edits.extend(request.seen.iter().map(|&(token, value)| TokenEdit { token, value }));
        edits.extend(request.bans.iter().map(|&token| TokenEdit { token, value: 0 }));
        let mask = request.mask.as_ref().map_or(-1, |mask| {
            masks.extend_from_slice(mask);
            (masks.len() / words) as i32 - 1
        });
        rows.push(SamplingRow {
            seed: request.seed,
            position: request.position,
            row,
            first_edit,
            biases: request.biases.len() as i32,
            seen: request.seen.len() as i32,
            bans: request.bans.len() as i32,
            mask,
            forced: request.forced.map_or(-1, |token| token as i32),
            top_k: request.top_k as i32,
            top_n: request.top_n.map_or(-1, |top| top as i32),
            temperature: request.temperature,
            top_p: request.top_p,
            min_p: request.min_p,
            repetition: request.repetition,
            presence: request.presence,
            frequency: request.frequency,
            unused: 0,
        });
    }
    call(gpu, stream, path, vocab, logits, &rows, &edits, &masks)
}

#[allow(clippy::too_many_arguments, reason = "the tensors of a call")]
fn call(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    path: SamplingPath,
    vocab: usize,
    logits: &[f32],
    rows: &[SamplingRow],
    edits: &[TokenEdit],
    masks: &[u32],
) -> Vec<SamplingResult> {
    let on_device = |bytes: &[u8]| Tensor::new(stream, bytes);
    let (given, rows_there, edits_there) = (on_device(bytes(logits)), on_device(bytes(rows)), on_device(bytes(edits)));
    let masks_there = on_device(bytes(masks));
    // What lies behind the results must stay as it is.
    const BEHIND: usize = 64;
    let results =
        on_device(&vec![0xff; size_of_val(rows) / size_of::<SamplingRow>() * size_of::<SamplingResult>() + BEHIND]);
    let copies = if path == SamplingPath::Block { rows.len() * vocab * 4 } else { 0 };
    let scratch = on_device(&vec![0xff; copies]);
    let call = Sampling {
        logits: given.address,
        logits_rows: logits.len() / vocab,
        vocab,
        rows: rows_there.address,
        row_count: rows.len(),
        edits: edits_there.address,
        edit_count: edits.len(),
        masks: masks_there.address,
        mask_rows: masks.len() / vocab.div_ceil(32),
        results: results.address,
        scratch: scratch.address,
    };
    // SAFETY: every tensor is as long as the call says; waited for by the reads.
    unsafe { gpu.sample_by(path, &call, stream.cu_stream()) }.unwrap();
    let read = results.read(stream);
    assert!(read[read.len() - BEHIND..].iter().all(|byte| *byte == 0xff), "written behind the results");
    assert!(given.read(stream) == bytes(logits), "the logits were changed");
    let size = size_of::<SamplingResult>();
    // SAFETY: plain numbers, as many bytes as one has; no alignment is asked for.
    let result = |at: usize| unsafe { read[at * size..][..size].as_ptr().cast::<SamplingResult>().read_unaligned() };
    (0..rows.len()).map(result).collect()
}

/// By every kernel; they must agree to the bit.
fn sample(context: &Context, vocab: usize, logits: &[f32], requests: &[Request]) -> Vec<SamplingResult> {
    let gpu = context.gpu;
    let stream = gpu.context().new_stream().unwrap();
    let paths = gpu.sampling_paths(vocab);
    let results = sample_by(gpu, &stream, paths[0], vocab, logits, requests);
    for &path in &paths[1..] {
        let others = sample_by(gpu, &stream, path, vocab, logits, requests);
        for (row, (one, other)) in results.iter().zip(&others).enumerate() {
            let same = same(one, other, requests[row].top_n.is_some());
            assert!(same, "{path:?}, row {row}, {:?}: {other:?}, not {one:?}", requests[row]);
        }
    }
    results
}

fn same(one: &SamplingResult, other: &SamplingResult, logprobs: bool) -> bool {
    let (tops, others) = (one.top_count.clamp(0, 20) as usize, other.top_count.clamp(0, 20) as usize);
    one.token == other.token
        && (!logprobs
            || one.token < 0
            || one.rank == other.rank
                && one.logprob.to_bits() == other.logprob.to_bits()
                && one.top_tokens[..tops] == other.top_tokens[..others]
                && bytes(&one.top_logprobs[..tops]) == bytes(&other.top_logprobs[..others]))
}

/// The plain sampler: what it gives, and whether it is a matter of rounding.
struct Plain {
    /// The tokens that can be drawn, by their ids, with their probabilities.
    kept: Vec<(u32, f64)>,
    close: bool,
}

/// How far sums of f64 and of the kernels may be apart, relative to the sum of all weights.
const ROUNDING: f64 = 3e-9;

fn plain(logits: &[f32], request: &Request) -> Plain {
    let mut adjusted = logits.to_vec();
    let mut change = |token: u32, of: &dyn Fn(f32) -> f32| {
        if let Some(logit) = adjusted.get_mut(token as usize).filter(|logit| logit.is_finite()) {
            *logit = of(*logit).clamp(f32::MIN, f32::MAX);
        }
    };
    request.biases.iter().for_each(|&(token, bias)| change(token, &|logit| logit + bias));
    for &(token, outputs) in &request.seen {
        let r = request.repetition;
        change(token, &|logit| if logit < 0.0 { logit * r } else { logit / r });
        if outputs > 0 {
            change(token, &|logit| logit - outputs as f32 * request.frequency - request.presence);
        }
    }
    let banned = |token: u32| {
        let masked = |mask: &Vec<u32>| mask[token as usize / 32] >> (token % 32) & 1 == 0;
        request.bans.contains(&token) || request.mask.as_ref().is_some_and(masked)
    };
    for (token, logit) in (0..).zip(&mut adjusted) {
        *logit = if banned(token) { f32::NEG_INFINITY } else { *logit };
    }
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&at| adjusted[at as usize] > f32::NEG_INFINITY).collect();
    let logit = |token: u32| adjusted[token as usize];
    order.sort_by(|&a, &b| logit(b).partial_cmp(&logit(a)).unwrap().then(a.cmp(&b)));
    let Some(&first) = order.first() else { return Plain { kept: Vec::new(), close: false } };
    if request.temperature == 0.0 {
        return Plain { kept: vec![(first, 1.0)], close: false };
    }
    if request.top_k > 0 && request.top_k < order.len() {
        let last = logit(order[request.top_k - 1]);
        order.retain(|&token| logit(token) >= last);
    }
    let max = f64::from(logit(first));
    let weight = |token: u32| {
        let own = f64::from(logit(token));
        if own == max { 1.0 } else { ((own - max) / f64::from(request.temperature)).exp() }
    };
    let mut close = false;
    if request.top_p < 1.0 {
        let total: f64 = order.iter().map(|&token| weight(token)).sum();
        let mut before = 0.0;
        let end = order.iter().position(|&token| {
            let keeps = |by: f64| (before / total + by) as f32 <= request.top_p;
            close |= before > 0.0 && keeps(ROUNDING) != keeps(-ROUNDING) && !exact(before, total);
            let out = !keeps(0.0);
            before += weight(token);
            out
        });
        order.truncate(end.unwrap_or(order.len()));
    }
    if request.min_p > 0.0 {
        let keeps = |token: &u32, by: f64| (weight(*token) * (1.0 + by)) as f32 >= request.min_p;
        let is_close = |token: &u32| weight(*token) < 1.0 && keeps(token, ROUNDING) != keeps(token, -ROUNDING);
        close |= order.iter().any(is_close);
        order.retain(|token| keeps(token, 0.0));
    }
    order.sort_unstable();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let kept = order.iter().map(|&token| (token, weight(token) / total)).collect();
    Plain { kept, close }
}

/// Whole numbers, as the sums of equal largest logits are, have no rounding.
fn exact(before: f64, total: f64) -> bool {
    before.fract() == 0.0 && total.fract() == 0.0
}

impl Plain {
    /// The token of a draw; `None` if it is a matter of rounding.
    fn draw(&self, uniform: f64) -> Option<i32> {
        let mut sum = 0.0;
        for &(token, probability) in &self.kept {
            let before = sum;
            sum += probability;
            if sum > uniform {
                let close = self.kept.len() > 1 && (uniform - before < ROUNDING || sum - uniform < ROUNDING);
                return (!close && !self.close).then_some(token as i32);
            }
        }
        (self.kept.is_empty()).then_some(-1)
    }
}

/// A number of (seed, position): Philox4x32-10.
fn uniform(seed: u64, position: u64) -> f64 {
    let mut counter = [position as u32, (position >> 32) as u32, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let (even, odd) = (u64::from(counter[0]) * 0xD251_1F53, u64::from(counter[2]) * 0xCD9E_8D57);
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    (((u64::from(counter[1]) << 32 | u64::from(counter[0])) >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
}

/// Logits of several kinds: spread like a model's, in steps with many equals, all equal, and with what is no number.
fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let kind = random.below(7);
    let (scale, steps) = (random.pick(&[0.1, 2.0, 10.0, 1e4]), random.pick(&[2, 5, 300]));
    let mut logits: Vec<f32> = (0..vocab)
        .map(|_| match kind {
            0 => 1.5,
            1 => random.below(steps) as f32 * 0.37 - 3.0,
            _ => (0..4).map(|_| random.number()).sum::<f32>() * scale,
        })
        .collect();
    if kind == 2 {
        for _ in 0..5 {
            let at = random.below(vocab);
            logits[at] += scale * 4.0;
        }
    }
    if kind >= 4 {
        let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::MAX, f32::MIN, -0.0, 0.0, f32::MIN_POSITIVE / 8.0];
        for _ in 0..1 + vocab / 10 {
            let at = random.below(vocab);
            logits[at] = random.pick(&odd[..if kind == 4 { 2 } else { odd.len() }]);
        }
    }
    logits
}

fn request(random: &mut Random, vocab: usize) -> Request {
    let token = |random: &mut Random| random.below(vocab + 2) as u32;
    let mut request = Request {
        seed: random.bits(),
        position: random.pick(&[0, 1, 77, 1 << 40]),
        temperature: random.pick(&[0.0, 0.05, 0.7, 1.0, 1.0, 3.0, 1e-6, 1e6]),
        top_k: random.pick(&[0, 0, 1, 2, 40, 700, vocab, vocab + 9]),
        top_p: random.pick(&[1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999]),
        min_p: random.pick(&[0.0, 0.0, 0.02, 0.5, 1.0]),
        ..Request::default()
    };
    if random.once_in(2) {
        let distinct = |random: &mut Random, most: usize| {
            let mut tokens: Vec<u32> = (0..random.below(most)).map(|_| token(random)).collect();
            tokens.sort_unstable();
            tokens.dedup();
            random.shuffle(&mut tokens);
            tokens
        };
        let bias = |random: &mut Random| random.pick(&[-1e30, -2.0, 0.5, 100.0, f32::MAX]);
        request.biases = distinct(random, 20).into_iter().map(|token| (token, bias(random))).collect();
        request.seen = distinct(random, 2000).into_iter().map(|token| (token, random.below(4) as u32)).collect();
        request.bans = (0..random.below(30)).map(|_| token(random)).collect();
        request.repetition = random.pick(&[1.0, 1.1, 0.5]);
        request.presence = random.pick(&[0.0, 0.4, -2.0]);
        request.frequency = random.pick(&[0.0, 0.3, -1.0]);
    }
    if random.once_in(4) {
        request.mask = Some((0..vocab.div_ceil(32)).map(|_| (random.bits() & random.bits()) as u32).collect());
    }
    if random.once_in(20) {
        request.forced = Some(random.below(vocab) as u32);
    }
    if random.once_in(3) {
        request.top_n = Some(random.pick(&[0, 1, 5, 20]));
    }
    request
}

/// Random rows with random requests get the tokens of the plain sampler, and its log probabilities.
pub fn random(context: &Context) {
    let mut random = Random(71);
    let (mut rows, mut unclear) = (0, 0);
    let mut left = context.cases as usize;
    while left > 0 {
        let vocab = random.pick(&[1, 2, 7, 32, 100, 272, 1003, 5000, 32_000, 50_257, 128_256]);
        let count = (1 + random.below(40)).min(left).min(if vocab > 20_000 { 6 } else { 40 });
        left -= count;
        let requests: Vec<_> = (0..count).map(|_| request(&mut random, vocab)).collect();
        let given: Vec<_> = (0..count).map(|_| logits(&mut random, vocab)).collect();
        let results = sample(context, vocab, &given.concat(), &requests);
        for ((logits, request), result) in given.iter().zip(&requests).zip(&results) {
            let expected = plain(logits, request);
            let any = logits.iter().any(|&logit| logit > f32::NEG_INFINITY);
            let token = match request.forced {
                Some(_) if request.top_n.is_some() && !any => Some(-1),
                Some(token) => Some(token as i32),
                None => expected.draw(uniform(request.seed, request.position)),
            };
            rows += 1;
            unclear += usize::from(token.is_none());
            let what = || format!("{vocab} tokens, {request:?}");
            assert!(token.is_none_or(|token| token == result.token), "{result:?}, not {token:?}: {}", what());
            if request.temperature == 0.0 || request.forced.is_some() {
                assert!(token.is_some(), "{}", what());
            } else if result.token >= 0 && !expected.close {
                assert!(expected.kept.iter().any(|(kept, _)| *kept as i32 == result.token), "{result:?}: {}", what());
            }
            if let Some(top) = request.top_n.filter(|_| result.token >= 0) {
                check_logprobs(logits, top, result, &what);
            }
        }
    }
    assert!(unclear * 50 <= rows, "{unclear} of {rows} rows are a matter of rounding");
}

fn check_logprobs(logits: &[f32], top: usize, result: &SamplingResult, what: &dyn Fn() -> String) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let above = |logit: f32| if logit == max { 0.0 } else { f64::from(logit) - f64::from(max) };
    let sum: f64 = logits.iter().filter(|logit| !logit.is_nan()).map(|&logit| above(logit).exp()).sum();
    let expected = |logit: f32| if logit.is_nan() { f64::NEG_INFINITY } else { above(logit) - sum.ln() };
    let is = |got: f32, logit: f32| {
        let expected = expected(logit);
        f64::from(got) == expected
            || got == expected as f32
            || (f64::from(got) - expected).abs() < 1e-6 * expected.abs().max(1.0)
    };
    let value = |token: u32| Some(logits[token as usize]).filter(|logit| !logit.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).unwrap().then(a.cmp(&b)));
    let token = result.token as u32;
    assert!(is(result.logprob, logits[token as usize]), "{result:?}: {}", what());
    assert_eq!(order[result.rank as usize - 1], token, "{result:?}: {}", what());
    order.retain(|&token| value(token) > f32::NEG_INFINITY);
    order.truncate(top);
    assert_eq!(result.top_tokens[..result.top_count as usize], order[..], "{}", what());
    for (&token, &got) in order.iter().zip(&result.top_logprobs) {
        assert!(is(got, logits[token as usize]), "token {token}, {result:?}: {}", what());
    }
}

/// 100,000 draws are distributed as the probabilities are.
pub fn draws(context: &Context) {
    const DRAWS: usize = 100_000;
    let mut random = Random(5);
    let options = [
        Request { temperature: 1.0, ..Request::default() },
        Request { temperature: 1.7, top_k: 30, ..Request::default() },
        Request { temperature: 0.8, top_p: 0.9, ..Request::default() },
        Request { temperature: 1.0, min_p: 0.05, ..Request::default() },
        Request {
            temperature: 1.2,
            top_k: 60,
            top_p: 0.95,
            min_p: 0.01,
            repetition: 1.2,
            seen: (0..40).map(|token| (token, token % 3)).collect(),
            frequency: 0.2,
            presence: 0.1,
            ..Request::default()
        },
    ];
    for (number, options) in options.iter().enumerate() {
        let vocab = 150;
        let logits: Vec<f32> = (0..vocab).map(|_| random.number() * 3.0).collect();
        let requests: Vec<_> =
            (0..DRAWS as u64).map(|position| Request { seed: 9, position, ..options.clone() }).collect();
        let results = sample(context, vocab, &logits.repeat(DRAWS), &requests);
        let plain = plain(&logits, options);
        let mut found = vec![0_u32; vocab];
        results.iter().for_each(|result| found[result.token as usize] += 1);
        let (mut chi_square, mut rest) = (0.0, (0.0, 0.0));
        let mut bins = 0;
        for &(token, probability) in &plain.kept {
            let (expected, got) = (probability * DRAWS as f64, f64::from(std::mem::take(&mut found[token as usize])));
            if expected < 10.0 {
                rest = (rest.0 + expected, rest.1 + got);
            } else {
                (chi_square, bins) = (chi_square + (got - expected).powi(2) / expected, bins + 1);
            }
        }
        if rest.0 > 0.0 {
            (chi_square, bins) = (chi_square + (rest.1 - rest.0).powi(2) / rest.0, bins + 1);
        }
        assert!(found.iter().all(|count| *count == 0), "options {number}: a token that can not be drawn");
        let freedom = f64::from(bins - 1);
        // Six standard deviations.
        assert!(
            chi_square < freedom + 6.0 * (2.0 * freedom).sqrt() + 12.0,
            "options {number}: {chi_square}, {freedom}"
        );
    }
}

/// A row gets the same result alone, among others and in another place; and once more.
pub fn same_bits(context: &Context) {
    let mut random = Random(3);
    for vocab in [272, 50_257] {
        let requests: Vec<_> = (0..20).map(|_| request(&mut random, vocab)).collect();
        let given: Vec<_> = (0..20).map(|_| logits(&mut random, vocab)).collect();
        let together = sample(context, vocab, &given.concat(), &requests);
        let reversed = |list: &[Vec<f32>]| list.iter().rev().cloned().collect::<Vec<_>>().concat();
        let backwards: Vec<_> = requests.iter().rev().cloned().collect();
        let moved = sample(context, vocab, &reversed(&given), &backwards);
        for (row, request) in requests.iter().enumerate() {
            let alone = &sample(context, vocab, &given[row], std::slice::from_ref(request))[0];
            let logprobs = request.top_n.is_some();
            assert!(same(&together[row], alone, logprobs), "alone: {alone:?}, {:?}, {request:?}", together[row]);
            assert!(same(&together[row], &moved[19 - row], logprobs), "moved: {request:?}");
        }
    }
}

/// Numbers that point outside the tensors do no harm.
pub fn nonsense(context: &Context) {
    let gpu = context.gpu;
    let stream = gpu.context().new_stream().unwrap();
    let mut random = Random(17);
    let vocab = 1000;
    let odd = [i32::MIN, -7, -1, 0, 1, 999, 1000, 1 << 20, i32::MAX];
    let floats = [f32::NAN, f32::NEG_INFINITY, -1.0, 0.0, 1e-40, 1.0, 1e30, f32::INFINITY];
    for &path in gpu.sampling_paths(vocab) {
        for _ in 0..context.cases.min(300) {
            let logits: Vec<f32> = (0..3).flat_map(|_| logits(&mut random, vocab)).collect();
            let row = |random: &mut Random| SamplingRow {
                seed: random.bits(),
                position: random.bits(),
                row: random.pick(&odd),
                first_edit: random.pick(&odd),
                biases: random.pick(&odd),
                seen: random.pick(&odd),
                bans: random.pick(&odd),
                mask: random.pick(&odd),
                forced: random.pick(&odd),
                top_k: random.pick(&odd),
                top_n: random.pick(&odd),
                temperature: random.pick(&floats),
                top_p: random.pick(&floats),
                min_p: random.pick(&floats),
                repetition: random.pick(&floats),
                presence: random.pick(&floats),
                frequency: random.pick(&floats),
                unused: 0,
            };
            let rows: Vec<_> = (0..3).map(|_| row(&mut random)).collect();
            let edits = [TokenEdit { token: u32::MAX, value: u32::MAX }, TokenEdit { token: 5, value: 7 }];
            let masks = vec![0x5555_5555; vocab.div_ceil(32)];
            let results = call(gpu, &stream, path, vocab, &logits, &rows, &edits, &masks);
            assert!(results.iter().all(|result| (-1..vocab as i32).contains(&result.token)), "{rows:?}: {results:?}");
        }
    }
}
