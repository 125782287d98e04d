//! What the features `futures`, `ndarray` and `serde` add.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use futures_core::Stream;
use ndarray::{Array, ArrayD, arr2};
use pagoda::engine::{
    BeamOptions, Chat, Columns, Driver, EngineOptions, EngineStore, Events, GenerateRequest, GenerateResponse,
    Generator, GeneratorOptions, Grammar, KvPolicy, Prompt, RankRequest, RankResponse, Token,
};
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
    assert_eq!(
        Tensor::from_array(part).unwrap().as_slice::<f32>().unwrap(),
        [10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 23.0]
    );
    let backwards = expected.slice_move(ndarray::s![..;-1, ..2]);
    assert_eq!(Tensor::from_array(backwards).unwrap().as_slice::<f32>().unwrap(), [20.0, 21.0, 10.0, 11.0, 0.0, 1.0]);
    assert_eq!(Tensor::from_array(ArrayD::<i64>::zeros(vec![2, 0])).unwrap().dims(), [2, 0]);
}

// ---- serde -------------------------------------------------------------------------------------------------------

/// What is left of a value after its way through JSON.
fn again<T: Serialize + DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

#[test]
fn requests_and_answers_survive_json() {
    let chat = Chat { messages: vec![json!({"role": "user", "content": "Hi"})], ..Chat::default() };
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
        candidates: Columns::new().with("item", [3]),
        ..RankRequest::default()
    };
    let text = serde_json::to_value(&rank).unwrap();
    assert_eq!(text["candidates"], json!([["item", [3]]]));
    assert_eq!(serde_json::to_value(again(&rank)).unwrap(), text);
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
