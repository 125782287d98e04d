//! The sampler as a whole: golden cases, an oracle, the statistics of the draws, and the order of the steps.

use std::path::Path;

use pagoda_test_support::times;

use super::*;
use crate::error::Status;
use crate::json::{Field, Json};

/// Draws at random, with every step off.
fn sampled() -> SamplingOptions {
    SamplingOptions { do_sample: true, ..SamplingOptions::default() }
}

/// A sampler without end-of-sequence tokens, for many tokens.
fn sampler(options: &SamplingOptions, vocab_size: usize, prompt: &[u32]) -> Sampler {
    Sampler::new(options, 1, &[], vocab_size, prompt, 1000).unwrap()
}

fn distribution(sampler: &Sampler, logits: &[f32]) -> Vec<f32> {
    sampler.distribution(logits, None, &mut Scratch::default()).unwrap()
}

fn sample(sampler: &Sampler, logits: &[f32], position: u64) -> u32 {
    sampler.sample(logits, position, None, &mut Scratch::default()).unwrap()
}

/// The tokens that can be drawn.
fn kept(probabilities: &[f32]) -> Vec<usize> {
    (0..probabilities.len()).filter(|&token| probabilities[token] > 0.0).collect()
}

/// Logits whose softmax are these probabilities.
fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|probability| probability.ln() as f32).collect()
}

/// Numbers for random cases (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ bits >> 31) % end
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[test]
fn golden_cases() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llm/sampling.json");
    let cases = Json::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = Field::new("sampling.json", &cases).list("cases").unwrap();
    assert_eq!(cases.len(), 24);
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
        // The penalties that are in the file do not tell prompt from output.
        for prompt in [0, tokens.len() / 2, tokens.len()] {
            let mut sampler = sampler(&options, logits.len(), &tokens[..prompt]);
            tokens[prompt..].iter().for_each(|&token| sampler.observe(token));
            let got = distribution(&sampler, &logits);
            for (token, (&got, expected)) in got.iter().zip(reals("expected_probabilities")).enumerate() {
                assert!((f64::from(got) - expected).abs() < 1e-6, "case {index}, token {token}: {got}, not {expected}");
            }
        }
    }
}

/// What the sampler has to give, by the straightest way: f64, all tokens sorted, the history scanned. Also how close the
/// closest decision was: where it is a matter of rounding, the two can differ.
struct Oracle<'a> {
    options: &'a SamplingOptions,
    eos: &'a [u32],
    prompt: &'a [u32],
    output: &'a [u32],
    max_new_tokens: usize,
    mask: Option<&'a [u32]>,
}

impl Oracle<'_> {
    fn probabilities(&self, logits: &[f32]) -> Option<(Vec<f64>, f64)> {
        let options = self.options;
        let mut margin = f64::INFINITY;
        let mut x: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
        for (token, bias) in &options.logit_bias {
            x[*token as usize] += f64::from(*bias);
        }
        let history = [self.prompt, self.output].concat();
        let r = f64::from(options.repetition_penalty);
        for (token, x) in x.iter_mut().enumerate() {
            if history.contains(&(token as u32)) {
                *x = if *x < 0.0 { *x * r } else { *x / r };
            }
        }
        for (token, x) in x.iter_mut().enumerate() {
            let count = self.output.iter().filter(|&&output| output as usize == token).count();
            if count > 0 {
                *x -= f64::from(options.presence_penalty);
                *x -= f64::from(options.frequency_penalty) * count as f64;
            }
        }
        let n = options.no_repeat_ngram_size as usize;
        if n > 0 && history.len() + 1 >= n {
            let last = &history[history.len() + 1 - n..];
            for end in n - 1..history.len() {
                if history[end + 1 - n..end] == *last {
                    x[history[end] as usize] = f64::NEG_INFINITY;
                }
            }
        }
        if self.output.len() < options.min_new_tokens as usize {
            self.eos.iter().for_each(|&token| x[token as usize] = f64::NEG_INFINITY);
        }
        if let Some(mask) = self.mask {
            for token in (0..x.len()).filter(|token| mask[token / 32] & 1 << (token % 32) == 0) {
                x[token] = f64::NEG_INFINITY;
            }
        }
        if let Some(eos) = options.forced_eos.filter(|_| self.output.len() + 1 == self.max_new_tokens) {
            x.fill(f64::NEG_INFINITY);
            x[eos as usize] = 0.0;
        }
        let mut order: Vec<usize> = (0..x.len()).filter(|&token| x[token] > f64::NEG_INFINITY).collect();
        order.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).unwrap().then(a.cmp(&b)));
        let max = x[*order.first()?];
        if !options.do_sample || options.temperature == 0.0 {
            if let Some(&second) = order.get(1).filter(|&&second| x[second] != max) {
                margin = max - x[second];
            }
            let mut probabilities = vec![0.0; x.len()];
            probabilities[order[0]] = 1.0;
            return Some((probabilities, margin));
        }
        let mut p = vec![0.0; x.len()];
        for &token in &order {
            p[token] = ((x[token] - max) / f64::from(options.temperature)).exp();
        }
        if options.top_k > 0 && (options.top_k as usize) < order.len() {
            let smallest = x[order[options.top_k as usize - 1]];
            let ends = order.iter().position(|&token| x[token] < smallest);
            if let Some(end) = ends {
                margin = margin.min(smallest - x[order[end]]);
                order.truncate(end);
            }
        }
        let normalise = |p: &mut Vec<f64>, order: &[usize]| {
            let sum: f64 = order.iter().map(|&token| p[token]).sum();
            let old = std::mem::replace(p, vec![0.0; x.len()]);
            order.iter().for_each(|&token| p[token] = old[token] / sum);
        };
        normalise(&mut p, &order);
        if options.top_p < 1.0 {
            let top_p = f64::from(options.top_p);
            let mut before = 0.0;
            let mut kept = Vec::new();
            for &token in &order {
                // The first stays in any case.
                if before > 0.0 {
                    margin = margin.min((before - top_p).abs());
                }
                if before <= top_p {
                    kept.push(token);
                }
                before += p[token];
            }
            order = kept;
            normalise(&mut p, &order);
        }
        let least = f64::from(options.min_p) * p[order[0]];
        for &token in order.iter().filter(|&&token| options.min_p > 0.0 && x[token] < max) {
            margin = margin.min((p[token] / p[order[0]] - f64::from(options.min_p)).abs());
        }
        order.retain(|&token| p[token] >= least);
        normalise(&mut p, &order);
        Some((p, margin))
    }
}

#[test]
fn random_cases_agree_with_the_oracle() {
    let mut random = Random(3);
    let mut scratch = Scratch::default();
    let (mut compared, mut banned, mut close) = (0, 0, 0);
    let cases = times(1200, 4000);
    for case in 0..cases as u64 {
        let vocab_size = random.of(&[1, 2, 5, 31, 32, 33, 64, 100, 500]) as usize;
        // On a grid there are ties, and sums of the grid are exact.
        let grid = random.of(&[true, false]);
        let logits: Vec<f32> = (0..vocab_size)
            .map(|_| match grid {
                true => random.below(64) as f32 * 0.25 - 8.0,
                false => random.below(1 << 24) as f32 * (16.0 / (1 << 24) as f32) - 8.0,
            })
            .collect();
        let id = |random: &mut Random| random.below(vocab_size as u64) as u32;
        let tokens = |random: &mut Random, most: u64| -> Vec<u32> {
            // Few different ones, so that sequences repeat.
            let few = random.of(&[2, 5, 1000]).min(vocab_size as u64);
            (0..random.below(most + 1)).map(|_| random.below(few) as u32).collect()
        };
        let prompt = tokens(&mut random, 12);
        let output = tokens(&mut random, 12);
        let max_new_tokens = output.len() as u32 + random.of(&[1, 2, 10]);
        let off = random.of(&[0, 1, 2]) == 0;
        let maybe = |random: &mut Random, on: &[f32], neutral: f32| if off { neutral } else { random.of(on) };
        let first_bias = id(&mut random);
        let options = SamplingOptions {
            do_sample: random.below(8) > 0,
            temperature: random.of(&[1.0, 1.0, 0.5, 0.7, 1.5, 8.0, 0.01, 0.0]),
            top_k: random.of(&[0, 0, 1, 2, 5, 30, 100, 1000]),
            top_p: random.of(&[1.0, 1.0, 0.0, 0.3, 0.5, 0.9, 0.99, 0.9999]),
            min_p: random.of(&[0.0, 0.0, 0.05, 0.3, 1.0]),
            repetition_penalty: maybe(&mut random, &[1.0, 2.0, 0.5, 1.3], 1.0),
            presence_penalty: maybe(&mut random, &[0.0, 0.5, -1.25, 2.0, 0.3], 0.0),
            frequency_penalty: maybe(&mut random, &[0.0, 0.25, -0.5, 1.7], 0.0),
            no_repeat_ngram_size: random.of(&[0, 0, 0, 1, 2, 3, 5]),
            logit_bias: if off { Vec::new() } else { vec![(first_bias, random.of(&[-3.0, 0.5, 100.0, -1e30]))] },
            min_new_tokens: random.of(&[0, 0, 5]).min(max_new_tokens),
            forced_eos: random.of(&[None, None, Some(vocab_size as u32 - 1)]),
            ..SamplingOptions::default()
        };
        let eos = [id(&mut random), id(&mut random)];
        let masked: Option<Vec<u32>> = (random.below(3) == 0).then(|| {
            let word = |random: &mut Random| {
                let bits = random.below(1 << 32) as u32;
                random.of(&[0, u32::MAX, bits])
            };
            (0..vocab_size.div_ceil(32)).map(|_| word(&mut random)).collect()
        });
        let mask = masked.as_deref();
        let mut sampler = Sampler::new(&options, case, &eos, vocab_size, &prompt, max_new_tokens).unwrap();
        output.iter().for_each(|&token| sampler.observe(token));
        let oracle = Oracle {
            options: &options,
            eos: &eos,
            prompt: &prompt,
            output: &output,
            max_new_tokens: max_new_tokens as usize,
            mask,
        };
        let got = sampler.distribution(&logits, mask, &mut scratch);
        match oracle.probabilities(&logits) {
            None => {
                banned += 1;
                assert_eq!(got.unwrap_err().status(), Status::InvalidArgument);
                assert!(sampler.sample(&logits, 0, mask, &mut scratch).is_err());
            }
            Some((_, margin)) if margin < 1e-6 => close += 1,
            Some((expected, _)) => {
                compared += 1;
                let got = got.unwrap();
                for (token, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
                    // Penalties in f32 move a logit by up to 1e-6, divided by the temperature.
                    let tolerance = 1e-6 + 2e-6 / f64::from(options.temperature).max(0.01);
                    let same = (f64::from(got) - expected).abs() < tolerance;
                    // What f32 can not hold can be 0.
                    let kept = if expected > 1e-40 { got > 0.0 } else { expected > 0.0 || got == 0.0 };
                    assert!(same && kept, "case {case}, token {token}: {got}, not {expected}; {options:?}");
                }
                let token = sampler.sample(&logits, case, mask, &mut scratch).unwrap();
                assert!(got[token as usize] > 0.0, "case {case}: token {token} can not be drawn; {options:?}");
            }
        }
    }
    assert!(compared > cases * 3 / 4 && banned > cases / 80 && close < cases / 8, "{compared} {banned} {close}");
}

#[test]
fn draws_have_the_frequencies_of_the_distribution() {
    const DRAWS: u64 = 100_000;
    let logits: Vec<f32> = (0..40).map(|token| ((token * 17 % 40) as f32) * 0.12).collect();
    let settings = [
        sampled(),
        SamplingOptions { temperature: 0.6, ..sampled() },
        SamplingOptions { temperature: 1.7, top_k: 12, ..sampled() },
        SamplingOptions { top_p: 0.8, ..sampled() },
        SamplingOptions { top_k: 20, top_p: 0.9, ..sampled() },
        SamplingOptions { min_p: 0.2, ..sampled() },
        SamplingOptions { repetition_penalty: 1.5, presence_penalty: 0.5, ..sampled() },
    ];
    let mut scratch = Scratch::default();
    for (seed, options) in (0..).zip(settings) {
        let sampler = Sampler::new(&options, seed, &[], 40, &[39, 5], 1000).unwrap();
        let expected = distribution(&sampler, &logits);
        // The draws are from one choice: to make it again for each takes most of the time of a test.
        let choice = sampler.choose(&logits, None, &mut scratch).unwrap();
        let mut counts = [0u32; 40];
        for position in 0..300 {
            let token = sampler.sample(&logits, position, None, &mut scratch).unwrap();
            assert_eq!(token, sampler.draw(&choice, position, &scratch));
        }
        for position in 0..DRAWS {
            counts[sampler.draw(&choice, position, &scratch) as usize] += 1;
        }
        let mut chi_square = 0.0;
        let mut freedom = -1.0;
        for (token, (&count, &probability)) in counts.iter().zip(&expected).enumerate() {
            if probability == 0.0 {
                assert_eq!(count, 0, "token {token} was drawn; {options:?}");
                continue;
            }
            let expected = f64::from(probability) * DRAWS as f64;
            assert!(expected > 5.0, "too rare for the test: token {token}, {options:?}");
            chi_square += (f64::from(count) - expected).powi(2) / expected;
            freedom += 1.0;
        }
        // The quantile of 1 - 1e-6 by Wilson and Hilferty; 4.753 is that of the normal distribution.
        let spread: f64 = 2.0 / (9.0 * freedom);
        let critical = freedom * (1.0 - spread + 4.753 * spread.sqrt()).powi(3);
        assert!(freedom >= 5.0 && chi_square < critical, "{chi_square} of {critical}; {options:?}");
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..1000).map(|token| (token * 7 % 13) as f32 * 0.1).collect();
    for options in [sampled(), SamplingOptions { top_k: 50, top_p: 0.9, ..sampled() }] {
        let mut used = Scratch::default();
        let one = sampler(&options, 1000, &[]);
        let forward: Vec<u32> = (0..50).map(|at| one.sample(&logits, at, None, &mut used).unwrap()).collect();
        let other = sampler(&SamplingOptions { temperature: 2.0, ..options.clone() }, 1000, &[1]);
        for position in (0..50).rev() {
            // A neighbour draws from other logits in between, with the same buffers.
            other.sample(&vec![1.0; 1000], position, None, &mut used).unwrap();
            let token = one.clone().sample(&logits, position, None, &mut used).unwrap();
            assert_eq!(token, forward[position as usize]);
        }
        let seed_2 = Sampler::new(&options, 2, &[], 1000, &[], 1000).unwrap();
        let differ = (0..50).filter(|&at| sample(&seed_2, &logits, at) != forward[at as usize]).count();
        assert!(differ > 40, "only {differ} of 50 draws differ with another seed");
        assert!(forward.iter().any(|&token| token != forward[0]), "every position draws the same");
    }
}

/// Numbers that a change of the generator or of the order of the candidates would change: users keep their seeds. They
/// are those of an independent program.
#[test]
fn draws_stay_what_they_were() {
    let logits: Vec<f32> = (0..100).map(|token| (token * 7 % 13) as f32 * 0.5).collect();
    let draws = |options: &SamplingOptions| -> Vec<u32> {
        let sampler = Sampler::new(options, 42, &[], 100, &[], 1000).unwrap();
        (0..8).map(|position| sample(&sampler, &logits, position)).collect()
    };
    assert_eq!(draws(&sampled()), [48, 35, 63, 63, 83, 31, 74, 38]);
    assert_eq!(draws(&SamplingOptions { top_k: 20, top_p: 0.9, ..sampled() }), [46, 33, 61, 61, 76, 24, 63, 37]);
}

#[test]
fn a_replayed_or_forked_sequence_is_in_the_same_state() {
    let options = SamplingOptions {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        no_repeat_ngram_size: 3,
        min_new_tokens: 10,
        ..sampled()
    };
    let logits: Vec<f32> = (0..30).map(|token| (token % 4) as f32).collect();
    let prompt = [3, 7, 3, 7, 11];
    let mut original = Sampler::new(&options, 9, &[2], 30, &prompt, 64).unwrap();
    let mut output = Vec::new();
    for position in 5..45 {
        let fork = original.clone();
        let mut replayed = Sampler::new(&options, 9, &[2], 30, &prompt, 64).unwrap();
        output.iter().for_each(|&token| replayed.observe(token));
        assert_eq!(replayed, original);
        assert_eq!(replayed.new_tokens() as usize, output.len());
        let token = sample(&original, &logits, position);
        assert_eq!(sample(&fork, &logits, position), token);
        assert_eq!(sample(&replayed, &logits, position), token);
        original.observe(token);
        assert_eq!(fork.new_tokens() + 1, original.new_tokens(), "a fork has its own state");
        output.push(token);
    }
}

#[test]
fn bias_comes_before_the_repetition_penalty() {
    let options = SamplingOptions { logit_bias: vec![(0, 5.0)], repetition_penalty: 2.0, ..sampled() };
    let got = distribution(&sampler(&options, 2, &[0]), &[-1.0, 2.0]);
    // (-1 + 5) / 2 = 2; the other order gives -1 * 2 + 5 = 3.
    assert_eq!(got, [0.5, 0.5]);
}

#[test]
fn the_repetition_penalty_comes_before_presence_and_frequency() {
    let options =
        SamplingOptions { repetition_penalty: 2.0, presence_penalty: 1.0, frequency_penalty: 0.5, ..sampled() };
    let mut sampler = sampler(&options, 2, &[]);
    sampler.observe(0);
    sampler.observe(0);
    // 6 / 2 - 1 - 2 * 0.5 = 1; the other order gives (6 - 2) / 2 = 2.
    assert_eq!(distribution(&sampler, &[6.0, 1.0]), [0.5, 0.5]);
}

#[test]
fn repetition_counts_a_token_of_prompt_and_output_once() {
    let options = SamplingOptions { repetition_penalty: 2.0, ..sampled() };
    let mut sampler = sampler(&options, 4, &[0, 0, 1]);
    sampler.observe(0);
    sampler.observe(2);
    sampler.observe(2);
    assert_eq!(distribution(&sampler, &[2.0, 2.0, 2.0, 1.0]), [0.25; 4]);
    assert_eq!(distribution(&sampler, &[-1.0, -1.0, -1.0, -2.0]), [0.25; 4]);
}

#[test]
fn presence_and_frequency_count_the_output_only() {
    let options = SamplingOptions { presence_penalty: 1.0, frequency_penalty: 0.5, ..sampled() };
    let mut sampler = sampler(&options, 3, &[0, 0, 0]);
    sampler.observe(1);
    sampler.observe(2);
    sampler.observe(2);
    assert_eq!(distribution(&sampler, &[0.0, 1.5, 2.0]), [1.0 / 3.0; 3]);
}

#[test]
fn no_sequence_is_repeated() {
    let options = SamplingOptions { no_repeat_ngram_size: 2, ..SamplingOptions::default() };
    let mut sampler = sampler(&options, 4, &[0, 1]);
    let logits = [4.0, 3.0, 2.0, 1.0];
    let mut output = Vec::new();
    for _ in 0..20 {
        let Ok(token) = sampler.sample(&logits, 0, None, &mut Scratch::default()) else { break };
        sampler.observe(token);
        output.push(token);
    }
    // After the last 0 every token was there before.
    assert_eq!(output, [0, 0, 2, 0, 3, 0]);
}

#[test]
fn the_end_is_banned_until_there_are_enough_tokens() {
    let options = SamplingOptions { min_new_tokens: 2, ..SamplingOptions::default() };
    let mut sampler = Sampler::new(&options, 0, &[0, 1], 3, &[], 10).unwrap();
    let logits = [9.0, 8.0, 1.0];
    for expected in [2, 2, 0] {
        let token = sample(&sampler, &logits, 0);
        assert_eq!(token, expected);
        sampler.observe(token);
    }
}

#[test]
fn the_last_token_is_forced_over_ban_mask_and_logits() {
    let options = SamplingOptions { forced_eos: Some(1), min_new_tokens: 3, logit_bias: vec![(1, -50.0)], ..sampled() };
    let mut sampler = Sampler::new(&options, 0, &[1], 3, &[], 3).unwrap();
    let logits = [1.0, f32::NAN, 0.0];
    let mask = Some(&[0b101][..]);
    let mut scratch = Scratch::default();
    for _ in 0..2 {
        assert_ne!(sampler.sample(&logits, 0, mask, &mut scratch).unwrap(), 1);
        sampler.observe(0);
    }
    assert_eq!(sampler.sample(&logits, 0, mask, &mut scratch).unwrap(), 1);
    assert_eq!(sampler.distribution(&logits, mask, &mut scratch).unwrap(), [0.0, 1.0, 0.0]);
}

#[test]
fn a_mask_bans_what_it_does_not_allow() {
    let mut scratch = Scratch::default();
    let logits: Vec<f32> = (0..70).map(|token| token as f32).collect();
    // Bits beyond the vocabulary have no effect.
    let mask = [1 << 3 | 1 << 31, u32::MAX, 0b100 | !0 << 6];
    for (options, expected) in [(SamplingOptions::default(), 66), (SamplingOptions { top_k: 1, ..sampled() }, 66)] {
        let sampler = sampler(&options, 70, &[]);
        assert_eq!(sampler.sample(&logits, 0, Some(&mask), &mut scratch).unwrap(), expected);
        assert_eq!(sampler.sample(&logits, 0, Some(&[8, 0, 0]), &mut scratch).unwrap(), 3);
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_ignores_the_filters() {
    for options in [
        SamplingOptions { top_k: 3, top_p: 0.1, min_p: 0.5, temperature: 2.0, ..SamplingOptions::default() },
        SamplingOptions { temperature: 0.0, ..sampled() },
    ] {
        let sampler = sampler(&options, 5, &[]);
        assert_eq!(sample(&sampler, &[1.0, f32::NAN, 7.0, 7.0, f32::NEG_INFINITY], 3), 2);
        assert_eq!(distribution(&sampler, &[1.0, 7.0, 7.0, 0.0, 7.0]), [0.0, 1.0, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn top_k_keeps_ties_with_the_last() {
    let options = SamplingOptions { top_k: 2, ..sampled() };
    let got = distribution(&sampler(&options, 6, &[]), &[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]);
    assert_eq!(kept(&got), [1, 2, 3, 4]);
}

#[test]
fn top_p_keeps_a_token_while_the_probability_before_it_is_at_most_p() {
    let logits = logits_of(&[0.25, 0.5, 0.125, 0.125]);
    for (top_p, expected) in
        [(0.0, &[1][..]), (0.49, &[1]), (0.5, &[0, 1]), (0.74, &[0, 1]), (0.75, &[0, 1, 2]), (0.9, &[0, 1, 2, 3])]
    {
        let options = SamplingOptions { top_p, ..sampled() };
        assert_eq!(kept(&distribution(&sampler(&options, 4, &[]), &logits)), expected, "{top_p}");
        let options = SamplingOptions { top_p, top_k: 3, ..sampled() };
        let got = distribution(&sampler(&options, 4, &[]), &logits);
        // The fourth ties with the third, so that top_k keeps both.
        assert_eq!(kept(&got), expected, "{top_p} and top_k");
    }
    // A decimal fraction means itself, and not the f32 below it.
    let options = SamplingOptions { top_p: 0.9, ..sampled() };
    let got = distribution(&sampler(&options, 10, &[]), &[0.0; 10]);
    assert_eq!(kept(&got).len(), 10);
}

#[test]
fn top_p_counts_the_probability_that_top_k_left() {
    // Of the two that top_k leaves the first has 0.5 / 0.9 = 0.56, above top_p.
    let options = SamplingOptions { top_k: 2, top_p: 0.52, ..sampled() };
    assert_eq!(kept(&distribution(&sampler(&options, 3, &[]), &logits_of(&[0.4, 0.5, 0.1]))), [1]);
    let options = SamplingOptions { top_k: 0, ..options };
    assert_eq!(kept(&distribution(&sampler(&options, 3, &[]), &logits_of(&[0.4, 0.5, 0.1]))), [0, 1]);
}

#[test]
fn the_temperature_comes_before_top_p_and_min_p() {
    let logits = logits_of(&[0.6, 0.3, 0.1]);
    // At 0.5 the probabilities are 0.78, 0.20, 0.02.
    let options = SamplingOptions { temperature: 0.5, top_p: 0.7, ..sampled() };
    assert_eq!(kept(&distribution(&sampler(&options, 3, &[]), &logits)), [0]);
    let options = SamplingOptions { temperature: 0.5, min_p: 0.2, ..sampled() };
    assert_eq!(kept(&distribution(&sampler(&options, 3, &[]), &logits)), [0, 1]);
    let options = SamplingOptions { temperature: 1.0, min_p: 0.16, ..sampled() };
    assert_eq!(kept(&distribution(&sampler(&options, 3, &[]), &logits)), [0, 1, 2]);
}

#[test]
fn a_wide_nucleus_is_as_a_sort_of_all_tokens_has_it() {
    // A flat distribution over more tokens than the first try has, with banned and broken logits and with ties.
    let mut random = Random(8);
    let mut logits: Vec<f32> = (0..20_000).map(|_| random.below(1 << 14) as f32 / (1 << 14) as f32).collect();
    logits[5] = f32::NEG_INFINITY;
    logits[600] = f32::NAN;
    let cases = [(0.001, 1.0), (0.1, 1.0), (0.9, 1.0), (0.9999, 1.0), (0.7, 0.02), (0.7, 1e4), (0.99, 0.1)];
    for (top_p, temperature) in cases {
        let options = SamplingOptions { top_p, temperature, ..sampled() };
        let got = distribution(&sampler(&options, 20_000, &[]), &logits);
        let oracle = Oracle { options: &options, eos: &[], prompt: &[], output: &[], max_new_tokens: 9, mask: None };
        let (expected, margin) = oracle.probabilities(&logits).unwrap();
        assert!(margin > 6e-8, "{margin}");
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() <= expected * 1e-6, "{got} {expected}");
        }
    }
}

#[test]
fn tiny_temperatures_and_huge_logits_overflow_nothing() {
    let mut logits = vec![-1e38; 100];
    logits[7] = 3e38;
    logits[8] = 3e38;
    for options in [
        SamplingOptions { temperature: 1e-3, ..sampled() },
        SamplingOptions { temperature: 1e-30, top_k: 50, top_p: 0.9, min_p: 0.1, ..sampled() },
        SamplingOptions { temperature: 1e-3, top_p: 0.9, logit_bias: vec![(7, 3e38), (8, 3e38)], ..sampled() },
        SamplingOptions { temperature: 1e-3, min_p: 0.9, repetition_penalty: 1e-30, ..sampled() },
    ] {
        let got = distribution(&sampler(&options, 100, &[7, 8, 9]), &logits);
        assert_eq!((kept(&got), got[7]), (vec![7, 8], 0.5), "{options:?}");
    }
    // Infinite logits share all of the probability.
    let mut logits = vec![0.0; 600];
    logits[7] = f32::INFINITY;
    logits[8] = f32::INFINITY;
    for (top_k, top_p, min_p) in
        [(0, 1.0, 0.0), (0, 1.0, 0.1), (0, 0.9, 0.0), (0, 0.9, 0.1), (2, 0.9, 0.1), (9, 1.0, 0.1)]
    {
        let options = SamplingOptions { top_k, top_p, min_p, ..sampled() };
        let got = distribution(&sampler(&options, 600, &[7, 8, 9]), &logits);
        assert_eq!((kept(&got), got[7]), (vec![7, 8], 0.5), "{options:?}");
    }
    // A penalty makes no ban of a large negative logit.
    let options = SamplingOptions { repetition_penalty: 1e30, ..sampled() };
    assert_eq!(sample(&sampler(&options, 1, &[0]), &[-1e30], 0), 0);
}

#[test]
fn an_error_names_what_banned_the_last_token() {
    let mut scratch = Scratch::default();
    let mut error = |options: &SamplingOptions, logits: &[f32], mask: Option<&[u32]>| {
        let sampler = Sampler::new(options, 0, &[1], logits.len(), &[0, 1, 0, 1, 0], 9).unwrap();
        sampler.sample(logits, 0, mask, &mut scratch).unwrap_err()
    };
    for base in [SamplingOptions::default(), sampled(), SamplingOptions { top_k: 1, top_p: 0.5, ..sampled() }] {
        let broken = error(&base, &[f32::NAN, f32::NEG_INFINITY], None);
        assert_eq!(broken.status(), Status::Runtime);
        assert_eq!(broken.message(), "all 2 logits of the model are NaN or -inf; check its weights and its inputs");
        let options = SamplingOptions { no_repeat_ngram_size: 1, ..base.clone() };
        assert_eq!(
            error(&options, &[0.0; 2], None).to_string(),
            "no_repeat_ngram_size: is 1, and each of the 2 tokens would complete a sequence that was there before; use a \
             larger size"
        );
        let options = SamplingOptions { min_new_tokens: 5, ..base.clone() };
        assert_eq!(
            error(&options, &[f32::NAN, 0.0], None).to_string(),
            "min_new_tokens: is 5 and the output has 0, so the end of the sequence is banned, and no other token was \
             left; use a smaller number"
        );
        assert_eq!(
            error(&base, &[0.0; 2], Some(&[0b100])).to_string(),
            "mask: the grammar allows none of the 2 tokens that were left; if other options ban tokens, use fewer of \
             them with a grammar"
        );
    }
}

#[test]
fn a_sampler_refuses_what_does_not_fit() {
    let message = |result: Result<Sampler, crate::Error>| result.unwrap_err().to_string();
    let options = SamplingOptions { min_new_tokens: 9, ..SamplingOptions::default() };
    assert_eq!(
        message(Sampler::new(&options, 0, &[], 4, &[], 8)),
        "min_new_tokens: is 9; it must be at most max_new_tokens, which is 8"
    );
    let options = SamplingOptions::default();
    assert_eq!(
        message(Sampler::new(&options, 0, &[3, 4], 4, &[], 8)),
        "eos[1]: token 4 is not in the vocabulary; its ids are 0 to 3"
    );
    let broken = SamplingOptions { top_p: 2.0, ..SamplingOptions::default() };
    assert_eq!(message(Sampler::new(&broken, 0, &[], 4, &[], 8)), "top_p: is 2; it must be from 0 to 1 (1: off)");
    let sampler = Sampler::new(&options, 0, &[], 40, &[99], 8).unwrap();
    let mut scratch = Scratch::default();
    let error = sampler.sample(&[0.0; 39], 0, None, &mut scratch).unwrap_err();
    assert_eq!(error.to_string(), "logits: 39 numbers for a vocabulary of 40");
    let error = sampler.sample(&[0.0; 40], 0, Some(&[0]), &mut scratch).unwrap_err();
    assert_eq!(error.to_string(), "mask: 1 words for a vocabulary of 40; it needs 2");
}

#[test]
fn tokens_without_a_logit_are_ignored() {
    let options = SamplingOptions { repetition_penalty: 2.0, no_repeat_ngram_size: 1, ..SamplingOptions::default() };
    let mut sampler = sampler(&options, 3, &[3, 99]);
    sampler.observe(u32::MAX);
    assert_eq!(sample(&sampler, &[1.0, 2.0, 0.0], 0), 1);
}
