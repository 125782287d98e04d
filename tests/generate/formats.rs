//! Pages of other formats than the model's own.

use pagoda::KvFormat;
use pagoda::KvSize;
use pagoda::engine::{EngineStore, GenerateRequest, Generator, GeneratorOptions};
use pagoda_test_support::Folder;

use super::cases::{greedy, on_gpu, open, options, prompt, stepped};

const QUANTISED: [KvFormat; 3] = [KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8];

fn with(format: KvFormat, options: GeneratorOptions) -> Generator {
    open(GeneratorOptions { kv_format: Some(format), ..options })
}

/// The tokens after a prompt, and their log probabilities.
fn answer(generator: &Generator, request: &GenerateRequest) -> (Vec<u32>, Vec<f32>) {
    let request = GenerateRequest { logprobs: Some(0), ..request.clone() };
    let choice = generator.generate(&request).unwrap().choices.remove(0);
    (choice.tokens, choice.logprobs.iter().map(|logprobs| logprobs.logprob).collect())
}

#[test]
fn log_probabilities_are_near_those_of_native_pages_and_not_equal() {
    let requests: Vec<_> = (0..20).map(|seed| greedy(&prompt(seed, 100), 1)).collect();
    let logprobs = |generator: Generator| requests.iter().map(|request| answer(&generator, request).1[0]).collect();
    let native: Vec<f32> = logprobs(open(options(256)));
    let [int8, int4, fp8] = [KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8].map(|format| {
        let found: Vec<f32> = logprobs(with(format, options(256)));
        found.iter().zip(&native).map(|(found, native)| (found - native).abs()).sum::<f32>() / 20.0
    });
    assert!(0.0 < int8 && int8 < fp8 && fp8 < int4 && int4 < 0.5, "{int8} {fp8} {int4}");
    // The format that the folder has: nothing is rewritten.
    assert_eq!(logprobs(with(KvFormat::Native, options(256))), native);
}

#[test]
fn a_pool_of_so_many_bytes_has_more_pages() {
    let pages = |format| {
        let options = GeneratorOptions { kv_size: KvSize::Bytes(1 << 20), ..options(0) };
        with(format, options).kv_stats().pages
    };
    // Of 2 layers of 2 heads of 8: 4 bytes a number, then 1 or half of one, and 4 or 2 bytes of scales for every 8.
    let bytes = |head: u64| (1 << 20) / (2 * 2 * 2 * 32 * head);
    assert_eq!(pages(KvFormat::Native), bytes(32));
    assert_eq!(pages(KvFormat::Int8), bytes(12));
    assert_eq!(pages(KvFormat::Int4), bytes(8));
    assert_eq!(pages(KvFormat::Fp8), bytes(10));
}

/// Keys and values are read as they are stored: it makes no difference in how many calls they were computed, and beside what.
#[test]
fn answers_do_not_depend_on_chunks_batches_and_sharing() {
    for format in QUANTISED {
        let prompts: Vec<Vec<u32>> =
            (2..8).map(|seed| [prompt(1, 100), prompt(seed, 5 + 9 * seed as usize)].concat()).collect();
        let own = with(format, GeneratorOptions { share_prefixes: false, ..options(256) });
        let alone: Vec<_> = prompts.iter().map(|prompt| answer(&own, &greedy(prompt, 12))).collect();
        let small_steps = GeneratorOptions { max_batch_tokens: 7, ..options(256) };
        for options in [small_steps, options(256), stepped(256)] {
            let generator = with(format, options);
            let requests: Vec<_> =
                prompts.iter().map(|prompt| GenerateRequest { logprobs: Some(0), ..greedy(prompt, 12) }).collect();
            let together = generator.generate_all(&requests, |_| {});
            for (index, (response, alone)) in together.into_iter().zip(&alone).enumerate() {
                let choice = &response.unwrap().choices[0];
                assert_eq!(choice.tokens, alone.0, "{format:?}, prompt {index}");
                for (found, expected) in choice.logprobs.iter().zip(&alone.1) {
                    let error = (found.logprob - expected).abs();
                    // cuBLAS rounds by the shape of a product, and that moves a code now and then.
                    assert!(error == 0.0 || on_gpu() && error < 1e-2, "{format:?}, prompt {index}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_conversation_comes_back_from_host_memory_and_from_disk_as_it_was() {
    for format in QUANTISED {
        let folder = Folder::new();
        let store = || Some(EngineStore::new(folder.path().join("store")));
        let turn = |tokens: &[u32]| GenerateRequest { session: Some("anna".into()), ..greedy(tokens, 10) };
        let first = prompt(1, 77);
        let cold = with(format, options(64));
        let second = [first.clone(), answer(&cold, &greedy(&first, 10)).0, prompt(2, 7)].concat();
        let expected = answer(&cold, &greedy(&second, 10));
        for tier in [
            GeneratorOptions { host_bytes: 8 << 20, ..options(64) },
            GeneratorOptions { store: store(), ..options(64) },
        ] {
            let generator = with(format, tier);
            generator.generate(&turn(&first)).unwrap();
            assert_eq!(generator.unload(&["anna"]).unwrap(), 1);
            let response = generator.generate(&turn(&second)).unwrap();
            assert_eq!((response.cached_tokens, &response.choices[0].tokens), (86, &expected.0), "{format:?}");
        }
        // After a restart, and only with pages of the same format.
        let third = [second, expected.0, prompt(3, 5)].concat();
        let restarted = |format| {
            let options = GeneratorOptions { store: store(), ..options(64) };
            with(format, options).generate(&turn(&third)).unwrap().cached_tokens
        };
        assert_eq!(restarted(KvFormat::Native), 0);
        assert_eq!(restarted(format), 103, "{format:?}");
    }
}
