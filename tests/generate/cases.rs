//! The model of the tests, options, requests, and the oracle.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use pagoda::engine::{Driver, GenerateRequest, Generator, GeneratorOptions};
use pagoda::{KvSize, Model, ModelOptions, Provider, Tensor};
use pagoda_test_support::Random;

/// A Llama with random weights: 2 layers, 272 tokens, a context of 512. `tests/data/llm/llama`, exported. PAGODA_TEST_MODEL names a
/// folder with the same model in another form, of which these tests hold too, where they ask for nothing that it does not have.
pub fn folder() -> PathBuf {
    std::env::var_os("PAGODA_TEST_MODEL").map_or_else(paged, PathBuf::from)
}

/// The same in the paged form.
fn paged() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/generate/llama")
}

/// The number of its tokens.
pub const VOCAB: usize = 272;
/// The tokens of a page.
pub const PAGE: usize = 32;

/// The CPU with one thread, or the GPU whose number is in PAGODA_TEST_GPU.
fn model_options() -> ModelOptions {
    let options = ModelOptions { intra_op_threads: 1, sleep_when_idle: true, ..ModelOptions::default() };
    match std::env::var("PAGODA_TEST_GPU") {
        Ok(device) => ModelOptions { provider: Provider::Cuda, device_id: device.parse().unwrap(), ..options },
        Err(_) => ModelOptions { provider: Provider::Cpu, ..options },
    }
}

/// Whether the tests run on a GPU.
pub fn on_gpu() -> bool {
    model_options().provider == Provider::Cuda
}

/// A pool of so many pages.
pub fn options(pages: u32) -> GeneratorOptions {
    GeneratorOptions { model: model_options(), kv_size: KvSize::Pages(pages), ..GeneratorOptions::default() }
}

/// The same, with steps that the test runs.
pub fn stepped(pages: u32) -> GeneratorOptions {
    GeneratorOptions { driver: Driver::Caller, ..options(pages) }
}

pub fn open(options: GeneratorOptions) -> Generator {
    Generator::open(folder(), options).unwrap()
}

/// A request for the likeliest tokens, that no token ends.
pub fn greedy(prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(max_new_tokens),
        ..GenerateRequest::new(prompt.to_vec())
    }
}

/// Any tokens.
pub fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..tokens).map(|_| random.below(VOCAB) as u32).collect()
}

/// The tokens of the first answer.
pub fn tokens(generator: &Generator, request: &GenerateRequest) -> Vec<u32> {
    generator.generate(request).unwrap().choices[0].tokens.clone()
}

/// The likeliest tokens after a prompt, computed without a generator: each from the whole sequence, with pages of its own.
pub fn oracle(prompt: &[u32], new_tokens: usize) -> Vec<u32> {
    static KNOWN: LazyLock<Mutex<HashMap<Vec<u32>, u32>>> = LazyLock::new(Mutex::default);
    let mut tokens = prompt.to_vec();
    for _ in 0..new_tokens {
        let known = KNOWN.lock().unwrap().get(&tokens).copied();
        let next = known.unwrap_or_else(|| {
            let logits = oracle_logits(&tokens);
            (0..VOCAB).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
        });
        KNOWN.lock().unwrap().insert(tokens.clone(), next);
        tokens.push(next);
    }
    tokens.split_off(prompt.len())
}

/// The logits of the last of these tokens.
pub fn oracle_logits(tokens: &[u32]) -> Vec<f32> {
    static MODEL: LazyLock<Model> =
        LazyLock::new(|| Model::open(paged().join("model.onnx"), &model_options()).unwrap());
    let len = tokens.len() as i32;
    let pages = tokens.len().div_ceil(PAGE) as i32;
    let tensor = |numbers: &[i32]| Tensor::from_slice(&[numbers.len() as i64], numbers).unwrap();
    let pool =
        Tensor::from_slice(&[pages.into(), 2, PAGE as i64, 2, 8], &vec![0.0_f32; pages as usize * 2 * PAGE * 16]);
    let pool = pool.unwrap();
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    // In reverse: the order of pages is any.
    let page_ids: Vec<i32> = (0..pages).rev().collect();
    let outputs = MODEL.run(
        &[
            ("input_ids", &tensor(&ids)),
            ("positions", &tensor(&(0..len).collect::<Vec<_>>())),
            ("row_offsets", &tensor(&[0, len])),
            ("cached_len", &tensor(&[0])),
            ("page_indptr", &tensor(&[0, pages])),
            ("page_ids", &tensor(&page_ids)),
            ("logits_rows", &tensor(&[len - 1])),
            ("kv_pool_0", &pool),
            ("kv_pool_1", &pool),
        ],
        &["logits"],
    );
    outputs.unwrap()[0].as_slice::<f32>().unwrap().to_vec()
}
