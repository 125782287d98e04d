//! Sampling on the GPU against the sampler of the CPU: `PAGODA_TEST_GPU=0 cargo test --lib -- --ignored device_tests`.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda_test_support::Random;

use super::*;
use crate::device::Gpu;
use crate::json::{Field, Json};

fn gpu() -> &'static Gpu {
    let device = std::env::var("PAGODA_TEST_GPU").expect("PAGODA_TEST_GPU is the number of the GPU");
    Gpu::shared(device.parse().expect("a number")).unwrap()
}

/// A row with its sampler.
struct Case {
    sampler: Sampler,
    logits: Vec<f32>,
    position: u64,
    logprobs: Option<u32>,
    mask: Option<Vec<u32>>,
}

impl Case {
    fn to_sample(&self, row: usize) -> ToSample<'_> {
        let Self { sampler, position, logprobs, mask, .. } = self;
        ToSample { row, sampler, position: *position, logprobs: *logprobs, mask: mask.as_deref() }
    }

    fn on_cpu(&self, scratch: &mut Scratch) -> crate::error::Result<Sampled> {
        let token = self.sampler.sample(&self.logits, self.position, self.mask.as_deref(), scratch)?;
        let logprobs = self.logprobs.map(|top| logprobs(&self.logits, token, top as usize, scratch)).transpose()?;
        Ok(Sampled { token, logprobs })
    }
}

fn on_gpu(sampler: &mut DeviceSampler, cases: &[Case]) -> Vec<Option<Sampled>> {
    for (row, case) in cases.iter().enumerate() {
        // SAFETY: numbers seen as bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts(case.logits.as_ptr().cast::<u8>(), size_of_val(&case.logits[..])) };
        // SAFETY: nothing runs on the GPU.
        unsafe { sampler.logits().write(row * bytes.len(), bytes) }.unwrap();
    }
    let rows = cases.iter().enumerate().map(|(row, case)| Some(case.to_sample(row)));
    let mut sampled = Vec::new();
    sampler.sample(rows, &mut sampled).unwrap();
    sampled
}

fn options(random: &mut Random, vocab: usize) -> SamplingOptions {
    let mut bias: Vec<u32> = (0..random.below(6)).map(|_| random.below(vocab) as u32).collect();
    bias.sort_unstable();
    bias.dedup();
    SamplingOptions {
        do_sample: !random.once_in(5),
        temperature: random.pick(&[0.0, 0.1, 0.8, 1.0, 1.5, 100.0]),
        top_k: random.pick(&[0, 0, 1, 5, 50, 3000, u32::MAX]),
        top_p: random.pick(&[1.0, 1.0, 0.0, 0.3, 0.9, 0.99]),
        min_p: random.pick(&[0.0, 0.0, 0.0, 0.05, 1.0]),
        repetition_penalty: random.pick(&[1.0, 1.0, 1.2, 0.8]),
        presence_penalty: random.pick(&[0.0, 0.0, 0.6, -0.3]),
        frequency_penalty: random.pick(&[0.0, 0.0, 0.3]),
        no_repeat_ngram_size: random.pick(&[0, 0, 0, 1, 2, 3]),
        logit_bias: bias.into_iter().map(|token| (token, random.number() * 5.0)).collect(),
        min_new_tokens: random.pick(&[0, 0, 12]),
        forced_eos: random.once_in(15).then_some(0),
        ..SamplingOptions::default()
    }
}

fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let kind = random.below(5);
    let mut logits: Vec<f32> = (0..vocab)
        .map(|_| match kind {
            0 => random.below(9) as f32,
            _ => (0..4).map(|_| random.number()).sum::<f32>() * [0.0, 0.5, 2.0, 6.0, 2.0][kind],
        })
        .collect();
    if kind == 4 {
        for _ in 0..1 + vocab / 20 {
            let at = random.below(vocab);
            logits[at] = random.pick(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, f32::MAX, f32::MIN]);
        }
    }
    if random.once_in(30) {
        logits.fill(f32::NAN);
    }
    logits
}

#[test]
#[ignore = "needs a GPU"]
fn tokens_are_those_of_the_cpu() {
    let mut random = Random(1);
    let mut scratch = Scratch::default();
    let mut errors = 0;
    for vocab in [1, 5, 272, 1001, 32_000, 128_256] {
        let mut sampler = DeviceSampler::new(gpu(), 16, vocab).unwrap();
        for _ in 0..if vocab > 2000 { 12 } else { 100 } {
            let cases: Vec<_> = (0..16)
                .map(|_| {
                    let history: Vec<u32> = (0..random.below(300)).map(|_| random.below(vocab) as u32).collect();
                    let (prompt, output) = history.split_at(history.len() / 2);
                    let (options, seed) = (options(&mut random, vocab), random.bits());
                    let most = output.len() as u32 + random.pick(&[1, 20]);
                    let most = most.max(options.min_new_tokens);
                    let mut sampler = Sampler::new(&options, seed, &[0], vocab, prompt, most).unwrap();
                    output.iter().for_each(|&token| sampler.observe(token));
                    let logits = logits(&mut random, vocab);
                    let logprobs = random.pick(&[None, None, Some(0), Some(4), Some(20), Some(21)]);
                    let bits = random.pick(&[0, 1, 3]);
                    let word = |random: &mut Random| (0..bits).fold(u32::MAX, |word, _| word & random.bits() as u32);
                    let mask = random.once_in(3).then(|| (0..vocab.div_ceil(32)).map(|_| word(&mut random)).collect());
                    Case { sampler, logits, position: random.below_u64(1 << 40), logprobs, mask }
                })
                .collect();
            for (case, found) in cases.iter().zip(on_gpu(&mut sampler, &cases)) {
                match (found, case.on_cpu(&mut scratch)) {
                    (Some(found), Ok(expected)) => same(case, &found, &expected),
                    (found, expected) => {
                        assert!(found.is_none(), "{found:?}, {expected:?}: {:?}", case.sampler.options);
                        assert!(case.logprobs == Some(21) || expected.is_err(), "{:?}", case.sampler.options);
                        errors += usize::from(expected.is_err());
                    }
                }
            }
        }
    }
    assert!(errors > 20, "{errors}");
}

fn same(case: &Case, found: &Sampled, expected: &Sampled) {
    let what = || format!("{found:?}, not {expected:?}: {:?}", case.sampler.options);
    assert_eq!(found.token, expected.token, "{}", what());
    let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * a.abs().max(1.0);
    if let (Some(found), Some(expected)) = (&found.logprobs, &expected.logprobs) {
        assert!(close(found.logprob, expected.logprob) && found.rank == expected.rank, "{}", what());
        assert_eq!(found.top.len(), expected.top.len(), "{}", what());
        let mut pairs = found.top.iter().zip(&expected.top);
        assert!(pairs.all(|(found, expected)| found.0 == expected.0 && close(found.1, expected.1)), "{}", what());
    } else {
        assert_eq!(found.logprobs.is_some(), expected.logprobs.is_some(), "{}", what());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn golden_cases() {
    const DRAWS: usize = 4000;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llm/sampling.json");
    let cases = Json::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = Field::new("sampling.json", &cases).list("cases").unwrap();
    let mut device = DeviceSampler::new(gpu(), DRAWS, 24).unwrap();
    for (index, case) in cases.iter().enumerate() {
        let case = case.open_object().unwrap();
        let real = |key| case.value(key).unwrap().real(-1e9..=1e9).unwrap();
        let whole = |key| case.value(key).unwrap().whole(0..=1000u32).unwrap();
        let reals = |key| -> Vec<f64> {
            case.value(key).unwrap().list("numbers").unwrap().iter().map(|n| n.real(-1e9..=1e9).unwrap()).collect()
        };
        let tokens = case.value("tokens").unwrap().list("ids").unwrap();
        let tokens: Vec<u32> = tokens.iter().map(|token| token.whole(0..=23u32).unwrap()).collect();
        let logits: Vec<f32> = reals("logits").iter().map(|&logit| logit as f32).collect();
        let options = SamplingOptions {
            do_sample: case.value("do_sample").unwrap().flag().unwrap(),
            temperature: real("temperature") as f32,
            top_k: whole("top_k"),
            top_p: real("top_p") as f32,
            repetition_penalty: real("repetition_penalty") as f32,
            no_repeat_ngram_size: whole("no_repeat_ngram_size"),
            ..SamplingOptions::default()
        };
        let (prompt, output) = tokens.split_at(tokens.len() / 2);
        let mut sampler = Sampler::new(&options, 3, &[], 24, prompt, 1000).unwrap();
        output.iter().for_each(|&token| sampler.observe(token));
        let case =
            |position| Case { sampler: sampler.clone(), logits: logits.clone(), position, logprobs: None, mask: None };
        let cases: Vec<_> = (0..DRAWS as u64).map(case).collect();
        let mut scratch = Scratch::default();
        let mut found = [0.0; 24];
        for (case, sampled) in cases.iter().zip(on_gpu(&mut device, &cases)) {
            let sampled = sampled.unwrap();
            assert_eq!(sampled, case.on_cpu(&mut scratch).unwrap(), "case {index}");
            found[sampled.token as usize] += 1.0;
        }
        let mut chi_square = 0.0;
        for (token, probability) in reals("expected_probabilities").into_iter().enumerate() {
            let expected = probability * DRAWS as f64;
            assert!(expected > 0.0 || found[token] == 0.0, "case {index}: token {token} can not be drawn");
            chi_square += if expected > 0.0 { (found[token] - expected).powi(2) / expected.max(1.0) } else { 0.0 };
        }
        // At most 23 degrees of freedom: above 75 with a probability of 1e-6 or less.
        assert!(chi_square < 75.0, "case {index}: {chi_square}");
    }
}

/// Prints how long it takes to sample rows on the GPU, and to copy their logits to the host and sample them there.
#[test]
#[ignore = "measures, on a GPU"]
fn time() {
    const VOCAB: usize = 128_256;
    let mut random = Random(9);
    let row: Vec<f32> = (0..VOCAB).map(|_| (0..4).map(|_| random.number()).sum::<f32>() * 3.0).collect();
    let nucleus = SamplingOptions { do_sample: true, temperature: 0.8, top_p: 0.9, ..SamplingOptions::default() };
    let kinds = [
        ("greedy", SamplingOptions::default(), None),
        ("temperature", SamplingOptions { top_p: 1.0, ..nucleus.clone() }, None),
        ("temperature, top_p", nucleus.clone(), None),
        ("temperature, top_k, top_p", SamplingOptions { top_k: 50, ..nucleus.clone() }, None),
        ("temperature, top_p, penalties", SamplingOptions { repetition_penalty: 1.1, ..nucleus }, None),
        ("greedy, logprobs 5", SamplingOptions::default(), Some(5)),
    ];
    for rows in [8, 32, 128] {
        for (name, options, logprobs) in &kinds {
            let mut device = DeviceSampler::new(gpu(), rows, VOCAB).unwrap();
            let cases: Vec<_> = (0..rows)
                .map(|at| {
                    let prompt: Vec<u32> = (0..1000).map(|_| random.below(VOCAB) as u32).collect();
                    let sampler = Sampler::new(options, at as u64, &[], VOCAB, &prompt, 1000).unwrap();
                    let mut logits = row.clone();
                    logits.rotate_left(at * 977);
                    Case { sampler, logits, position: 5, logprobs: *logprobs, mask: None }
                })
                .collect();
            let expected = on_gpu(&mut device, &cases);
            let rows_to_sample = || cases.iter().enumerate().map(|(row, case)| Some(case.to_sample(row)));
            let (mut sampled, mut host, mut scratch) = (Vec::new(), vec![0.0; rows * VOCAB], Scratch::default());
            let of_gpu = median(200, || device.sample(rows_to_sample(), &mut sampled).unwrap());
            let copy = median(20, || device.fetch(0..rows, &mut host).unwrap());
            let mut on_cpu = Vec::new();
            let of_cpu = median(3, || {
                on_cpu = cases.iter().map(|case| case.on_cpu(&mut scratch).ok()).collect();
            });
            assert_eq!(sampled, expected);
            let tokens = |all: &[Option<Sampled>]| all.iter().flatten().map(|one| one.token).collect::<Vec<_>>();
            assert_eq!(tokens(&sampled), tokens(&on_cpu));
            println!("{rows:4} rows, {name:30}: GPU {of_gpu:9.1?}; copy {copy:9.1?} + CPU {of_cpu:9.1?}");
        }
    }
}

fn median(times: usize, mut run: impl FnMut()) -> Duration {
    let mut took: Vec<Duration> = (0..times + 1)
        .map(|_| {
            let begun = Instant::now();
            run();
            begun.elapsed()
        })
        .skip(1)
        .collect();
    took.sort_unstable();
    took[took.len() / 2]
}
