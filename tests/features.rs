//! What the features `futures`, `ndarray` and `serde` add.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use futures_core::Stream;
use ndarray::{Array, Array2, ArrayD, arr2};
use pagoda::embedding::{
    Address, DiskOptions, EmbeddingOptions, ModelTables, RedisOptions, Secret, TableSpec, TableStats, TierOptions,
};
use pagoda::engine::{
    BeamOptions, Chat, Columns, Driver, EngineOptions, EngineStore, Events, GenerateRequest, GenerateResponse,
    Generator, GeneratorOptions, Grammar, GraphShape, KvPolicy, Prompt, RankRequest, RankResponse, Token,
};
use pagoda::store::StoreStats;
use pagoda::{KvFormat, KvSize, ModelOptions, Provider, Result, Status, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

// ---- futures -----------------------------------------------------------------------------------------------------

fn open(driver: Driver) -> Generator {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/generate/llama");
    let model =
        ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, sleep_when_idle: true, ..Default::default() };
    Generator::open(folder, GeneratorOptions { model, kv_size: KvSize::Pages(64), driver, ..Default::default() })
        .unwrap()
}

fn request(first: u32) -> GenerateRequest {
    GenerateRequest {
        max_new_tokens: Some(40),
        ignore_eos: true,
        seed: Some(3),
        ..GenerateRequest::new(vec![first, 9])
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs several streams on this thread, which sleeps until one of them is woken.
fn run<S: Stream<Item = Result<Token>> + Unpin>(mut streams: Vec<S>) -> Vec<Vec<Result<u32>>> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut task = Context::from_waker(&waker);
    let mut taken: Vec<Vec<Result<u32>>> = streams.iter().map(|_| Vec::new()).collect();
    let mut open: Vec<usize> = (0..streams.len()).collect();
    while !open.is_empty() {
        open.retain(|&at| {
            loop {
                match pin!(&mut streams[at]).poll_next(&mut task) {
                    Poll::Ready(Some(token)) => taken[at].push(token.map(|token| token.id)),
                    Poll::Ready(None) => return false,
                    Poll::Pending => return true,
                }
            }
        });
        if !open.is_empty() {
            std::thread::park_timeout(Duration::from_secs(60));
        }
    }
    taken
}

#[test]
fn tasks_get_the_tokens_that_threads_get() {
    for driver in [Driver::Thread, Driver::Caller] {
        let generator = open(driver);
        let expected: Vec<Vec<_>> =
            (0..8).map(|n| generator.stream(&request(n)).unwrap().map(|token| token.unwrap().id).collect()).collect();
        let streams = (0..8).map(|n| generator.stream(&request(n)).unwrap().into_async()).collect();
        let taken: Vec<Vec<_>> =
            run(streams).into_iter().map(|all| all.into_iter().map(Result::unwrap).collect()).collect();
        assert_eq!(taken, expected);
    }
}

#[test]
fn an_error_is_the_last_item_and_a_dropped_stream_cancels() {
    let generator = open(Driver::Thread);
    let timed_out = GenerateRequest { timeout: Some(Duration::ZERO), ..request(1) };
    let ended = run(vec![generator.stream(&timed_out).unwrap().into_async()]);
    assert!(ended[0].is_empty(), "an answer that has timed out has no tokens: {ended:?}");
    drop(generator.stream(&GenerateRequest { max_new_tokens: Some(400), ..request(2) }).unwrap().into_async());
    while generator.stats().ended_early < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // One that ends with its generator.
    let stream = generator.stream(&GenerateRequest { max_new_tokens: Some(400), ..request(2) }).unwrap();
    drop(generator);
    let whole = stream.into_async().into_inner().response();
    assert!(whole.is_ok_and(|response| response.choices[0].tokens.len() < 400));
}

#[test]
fn a_stream_moves_from_thread_to_thread() {
    let generator = open(Driver::Thread);
    let expected: Vec<_> = generator.stream(&request(4)).unwrap().map(|token| token.unwrap().id).collect();
    let mut stream = generator.stream(&request(4)).unwrap().into_async();
    let mut taken = Vec::new();
    // Each thread waits with its own waker for one token, and asks for another one with a waker that goes with it.
    loop {
        let thread = std::thread::spawn(move || {
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            let first = loop {
                match pin!(&mut stream).poll_next(&mut Context::from_waker(&waker)) {
                    Poll::Ready(item) => break item,
                    Poll::Pending => std::thread::park_timeout(Duration::from_secs(60)),
                }
            };
            let next = match pin!(&mut stream).poll_next(&mut Context::from_waker(&waker)) {
                Poll::Ready(item) => item,
                Poll::Pending => None,
            };
            (first.into_iter().chain(next).map(|token| token.unwrap().id).collect::<Vec<_>>(), stream)
        });
        let (tokens, moved) = thread.join().unwrap();
        if tokens.is_empty() {
            break;
        }
        (stream, taken) = (moved, [taken, tokens].concat());
    }
    assert_eq!(taken, expected);
}

// ---- ndarray -----------------------------------------------------------------------------------------------------

#[test]
fn arrays_are_views_of_tensors() {
    let mut tensor = Tensor::from_slice(&[2, 3], &[1_i32, 2, 3, 4, 5, 6]).unwrap();
    tensor.view_mut::<i32>().unwrap()[[1, 2]] = 60;
    assert_eq!(tensor.view::<i32>().unwrap(), arr2(&[[1, 2, 3], [4, 5, 60]]).into_dyn());
    assert_eq!(tensor.view::<i32>().unwrap().as_ptr(), tensor.as_slice::<i32>().unwrap().as_ptr(), "no copy");
    let error = tensor.view::<f32>().unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    let scalar = Tensor::from_slice(&[], &[7_i64]).unwrap();
    assert_eq!(scalar.view::<i64>().unwrap().sum(), 7);
    let none = Tensor::from_slice::<f32>(&[0, 4], &[]).unwrap();
    assert_eq!(none.view::<f32>().unwrap().shape(), [0, 4]);
}

#[test]
fn tensors_take_the_memory_of_arrays() {
    let array = Array::from_shape_fn((3, 4), |(row, column)| (10 * row + column) as f32);
    let (data, expected) = (array.as_ptr(), array.clone());
    let tensor = Tensor::from_array(array).unwrap();
    assert_eq!((tensor.dims(), tensor.as_slice::<f32>().unwrap().as_ptr()), (&[3, 4][..], data));
    assert_eq!(tensor.view::<f32>().unwrap(), expected.clone().into_dyn());
    // In another order, and a part of an array.
    let turned = Tensor::from_array(expected.clone().reversed_axes()).unwrap();
    assert_eq!(turned.view::<f32>().unwrap(), expected.t().into_dyn());
    let part = expected.clone().slice_move(ndarray::s![1.., ..]);
    let (data, numbers) = (part.as_ptr(), part.iter().copied().collect::<Vec<_>>());
    let part = Tensor::from_array(part).unwrap();
    assert_eq!((part.dims(), part.as_slice::<f32>().unwrap()), (&[2, 4][..], &numbers[..]));
    assert_eq!(part.as_slice::<f32>().unwrap().as_ptr(), data, "no copy");
    let backwards = expected.slice_move(ndarray::s![..;-1, ..2]);
    assert_eq!(Tensor::from_array(backwards).unwrap().as_slice::<f32>().unwrap(), [20.0, 21.0, 10.0, 11.0, 0.0, 1.0]);
    assert_eq!(Tensor::from_array(ArrayD::<i64>::zeros(vec![2, 0])).unwrap().dims(), [2, 0]);
    assert_eq!(
        Tensor::from_array(Array::zeros((3, 2)).slice_move(ndarray::s![3.., ..]) as Array2<f64>).unwrap().len(),
        0
    );
    assert_eq!(Tensor::from_array(ndarray::arr0(7_u8)).unwrap().as_slice::<u8>().unwrap(), [7]);
}

// ---- serde -------------------------------------------------------------------------------------------------------

/// What is left of a value after its way through JSON.
fn again<T: Serialize + DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

#[test]
fn requests_and_answers_survive_json() {
    let chat = Chat::new(vec![json!({"role": "user", "content": "Hi"})]);
    let request = GenerateRequest {
        prompt: Prompt::Chat(chat),
        temperature: Some(0.5),
        logit_bias: vec![(3, -1.5)],
        stop: vec!["\n".into()],
        timeout: Some(Duration::from_millis(1500)),
        grammar: Some(Grammar::Choice(vec!["a".into(), "b".into()])),
        beams: Some(BeamOptions::new(4)),
        kv_policy: Some(KvPolicy::new("h2o", 64)),
        ..GenerateRequest::default()
    };
    let text = serde_json::to_value(&request).unwrap();
    assert_eq!(serde_json::to_value(again(&request)).unwrap(), text);
    assert_eq!(text["prompt"]["chat"]["messages"][0]["content"], "Hi");
    let few: GenerateRequest = serde_json::from_value(json!({"prompt": {"text": "Hi"}, "max_new_tokens": 4})).unwrap();
    assert_eq!((few.prompt, few.max_new_tokens, few.seed), (Prompt::Text("Hi".into()), Some(4), None));

    let answered = open(Driver::Thread).generate(&self::request(1)).unwrap();
    assert_eq!(again::<GenerateResponse>(&answered), answered);

    let rank = RankRequest {
        user: 7,
        events: Events { keys: Columns::new().with("item", [1, 2]), times: vec![5, 6] },
        user_keys: vec![("country".into(), 2)],
        candidates: Columns::new().with("item", [3]),
        ..RankRequest::default()
    };
    let text = serde_json::to_value(&rank).unwrap();
    assert_eq!((&text["candidates"], &text["user_keys"]), (&json!({"item": [3]}), &json!({"country": 2})));
    assert_eq!(serde_json::to_value(again(&rank)).unwrap(), text);
    assert_eq!(format!("{:?}", again(&rank)), format!("{rank:?}"));
    assert_eq!(again(&RankResponse::default()), RankResponse::default());
}

#[test]
fn options_survive_json() {
    let options = GeneratorOptions {
        kv_size: KvSize::Bytes(1 << 30),
        kv_format: Some(KvFormat::Int8),
        store: Some(EngineStore::new("conversations")),
        draft_model: Some("small".into()),
        ..GeneratorOptions::default()
    };
    let text = serde_json::to_value(&options).unwrap();
    assert_eq!((&text["kv_format"], &text["kv_size"]["bytes"]), (&json!("int8"), &json!(1 << 30)));
    assert_eq!(format!("{:?}", again(&options)), format!("{options:?}"));
    let few: GeneratorOptions = serde_json::from_value(json!({"max_batch": 3})).unwrap();
    assert_eq!(format!("{few:?}"), format!("{:?}", GeneratorOptions { max_batch: 3, ..GeneratorOptions::default() }));
    let error = serde_json::from_value::<GeneratorOptions>(json!({"kv_format": "int3"})).unwrap_err();
    assert!(error.to_string().contains("int3") && error.to_string().contains("int4"), "{error}");
    let engine = EngineOptions { max_batch: 5, ..EngineOptions::default() };
    assert_eq!(format!("{:?}", again(&engine)), format!("{engine:?}"));
}

/// What is read of a JSON text with only the fields that have no default.
fn read<T: DeserializeOwned>(data: serde_json::Value) -> T {
    serde_json::from_value(data).unwrap()
}

#[test]
fn what_is_left_out_has_its_default() {
    let request: GenerateRequest = read(json!({
        "prompt": {"chat": {"messages": []}}, "beams": {"width": 4}, "kv_policy": {"name": "h2o", "cache_length": 64},
    }));
    assert_eq!((request.prompt, request.beams), (Prompt::Chat(Chat::new(Vec::new())), Some(BeamOptions::new(4))));
    assert_eq!(format!("{:?}", request.kv_policy), format!("{:?}", Some(KvPolicy::new("h2o", 64))));
    let options: GeneratorOptions = read(json!({"store": {"path": "conversations"}}));
    assert_eq!(options.store, Some(EngineStore::new("conversations")));
    let options: EngineOptions = read(json!({"cuda_graphs": [{"users": 1, "rows": 256}]}));
    assert_eq!(options.cuda_graphs, [GraphShape { users: 1, rows: 256, candidates: 0, pages: 0 }]);
    let tables: EmbeddingOptions = read(json!({
        "models": [{"name": "m", "tables": [{"name": "t", "path": "t.npy", "dim": 3}]}],
        "tiers": {"disk": {"path": "tables"}, "redis": {"nodes": [{"host": "::1", "port": 6379}], "password": "s3cret"}},
    }));
    assert_eq!(tables.models, [ModelTables::new("m", vec![TableSpec::new("t", "t.npy", 3)])]);
    assert_eq!(tables.tiers.disk, Some(DiskOptions::new("tables")));
    // An absurd size is refused when tables are opened, and takes no memory before.
    let absurd: TableSpec = read(json!({"name": "t", "path": "t.npy", "dim": u32::MAX}));
    assert!(absurd.default_row.len() < 1 << 20);
}

#[test]
fn a_password_is_read_and_not_written() {
    let node = Address { host: "redis".into(), port: 6379 };
    let redis = RedisOptions { nodes: vec![node], password: Secret::new("s3cret"), ..RedisOptions::default() };
    let tiers = TierOptions { redis: Some(redis), ..TierOptions::default() };
    let text = serde_json::to_string(&EmbeddingOptions { tiers, ..EmbeddingOptions::default() }).unwrap();
    assert!(text.contains("6379") && !text.contains("s3cret") && !text.contains("password"), "{text}");
    let read: RedisOptions = read(json!({"password": "s3cret"}));
    assert_eq!(read.password.reveal(), "s3cret");
}

#[test]
fn a_field_that_there_is_not_is_named() {
    fn refused<T: DeserializeOwned + std::fmt::Debug>(data: serde_json::Value, name: &str) {
        let error = serde_json::from_value::<T>(data).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}`")), "{error}");
    }
    refused::<GeneratorOptions>(json!({"max_bach": 3}), "max_bach");
    refused::<GeneratorOptions>(json!({"model": {"provder": "cpu"}}), "provder");
    refused::<EngineOptions>(json!({"store": {"path": "s", "options": {"durable": true}}}), "durable");
    refused::<EngineOptions>(json!({"tables": {"tiers": {"ssd": {}}}}), "ssd");
    refused::<RankRequest>(json!({"cancel": null}), "cancel");
    refused::<TableSpec>(json!({"name": "t", "path": "t.npy", "dim": 3, "default": [1]}), "default");
    refused::<KvPolicy>(json!({"name": "h2o"}), "cache_length");
    // Answers of a later version may have more.
    assert_eq!(read::<RankResponse>(json!({"tasks": 2, "later": 1})).tasks, 2);
}

#[test]
fn statistics_survive_json() {
    let generator = open(Driver::Thread);
    generator.generate(&request(1)).unwrap();
    let (stats, cache, provider) = (generator.stats(), generator.kv_stats(), generator.provider());
    assert_eq!((again(&stats), again(&cache), again(&provider)), (stats, cache, provider));
    assert!(stats.generated_tokens > 0 && cache.pages == 64);
    let (store, table) =
        (StoreStats { writes: 3, ..StoreStats::default() }, TableStats { hits: 4, ..TableStats::default() });
    assert_eq!((again(&store), again(&table)), (store, table));
    assert_eq!(serde_json::to_value(generator.tiers()).unwrap(), json!([]));
}
