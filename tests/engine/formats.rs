//! Pages of other formats than the model's own.

use pagoda::engine::{EngineOptions, EngineStore, RankResponse};
use pagoda::{Engine, KvFormat, KvSize, ModelFolder, Offload, Status};
use pagoda_test_support::Folder;

use crate::cases::{Case, cases, close, folder, open, options};

const QUANTISED: [KvFormat; 3] = [KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4];
/// Graphs whose attention appends, and graphs with an operator for that; blocks in f32 and in bf16.
const MODELS: [&str; 4] = ["fused", "half", "gather", "bag"];

fn with(model: &str, format: KvFormat, options: EngineOptions) -> Engine {
    open(model, EngineOptions { kv_format: Some(format), ..options })
}

/// Every score of a response after the whole history of each user, in one list.
fn scores(model: &str, engine: &Engine) -> Vec<f32> {
    cases(model).iter().flat_map(|case| engine.rank(&case.whole(case.len())).unwrap().scores).collect()
}

/// How far two lists of scores are apart, relative to their length.
fn apart(scores: &[f32], expected: &[f32]) -> f64 {
    let length = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>().sqrt();
    let difference = length(&mut scores.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / length(&mut expected.iter().map(|&score| f64::from(score)))
}

#[test]
fn scores_are_near_those_of_native_pages_and_not_equal() {
    for model in MODELS {
        let native = scores(model, &open(model, options()));
        assert_eq!(scores(model, &with(model, KvFormat::Native, options())), native, "nothing is rewritten");
        let [int8, fp8, int4] = QUANTISED.map(|format| apart(&scores(model, &with(model, format, options())), &native));
        println!("{model}: int8 {int8:e}, fp8 {fp8:e}, int4 {int4:e}");
        assert!(0.0 < int8 && int8 < fp8 && fp8 < int4, "{model}: {int8} {fp8} {int4}");
        assert!(int8 < 2e-3 && fp8 < 1e-2 && int4 < 3e-2, "{model}: {int8} {fp8} {int4}");
    }
}

/// Keys and values are read as they are stored: it makes no difference in how many requests they were computed.
#[test]
fn scores_do_not_depend_on_how_a_history_was_cut() {
    for (model, format) in MODELS.into_iter().flat_map(|model| QUANTISED.map(|format| (model, format))) {
        let uncached = with(model, format, EngineOptions { kv_size: None, ..options() });
        let (cached, evicting) = (with(model, format, options()), with(model, format, small()));
        for case in cases(model) {
            let mut before = 0;
            for events in case.steps() {
                let whole = uncached.rank(&case.whole(events)).unwrap();
                let grown = cached.rank(&case.request(before, events)).unwrap();
                let again = evicting.rank(&case.whole(events)).unwrap();
                assert!(whole.cached_rows == 0 && (before == 0 || grown.cached_rows > 0), "{model}");
                for response in [grown, again] {
                    // A product of another number of rows is rounded in another way by ONNX Runtime, and that can move a code.
                    let tolerance = if model == "fused" || model == "half" { 0.0 } else { 1e-4 };
                    close(&response.scores, &whole.scores, tolerance);
                }
                before = events;
            }
        }
    }
}

/// Room for one history or two.
fn small() -> EngineOptions {
    EngineOptions { kv_size: Some(KvSize::Pages(9)), host_bytes: 1 << 20, ..options() }
}

#[test]
fn the_same_bytes_hold_more_users() {
    const BYTES: u64 = 1 << 20;
    let case = &cases("fused")[0];
    // Of 2 layers of a head of 8: 4 bytes a number, then 1 or half of one, and 4 or 2 bytes of scales for every 8.
    let pages = |head: u64| BYTES / (2 * 2 * 8 * head);
    let held = |format, of_head: u64| {
        let engine = with("fused", format, EngineOptions { kv_size: Some(KvSize::Bytes(BYTES)), ..options() });
        let kv = &engine.folder().kv;
        assert_eq!((kv.format, kv.bytes_per_token), (format, 2 * 2 * of_head));
        assert_eq!(engine.kv_stats().unwrap().pages, pages(of_head));
        let mut request = case.whole(case.len());
        let mut user = 0;
        while engine.kv_stats().unwrap().evicted_owners == 0 {
            (user, request.user) = (user + 1, user);
            engine.rank(&request).unwrap();
        }
        user
    };
    let [native, int8, fp8] = [(KvFormat::Native, 32), (KvFormat::Int8, 12), (KvFormat::Fp8, 10)]
        .map(|(format, of_head)| held(format, of_head));
    println!("users in {BYTES} bytes: native {native}, int8 {int8}, fp8 {fp8}");
    assert!(native > 20 && int8 as f64 > 2.5 * native as f64 && fp8 > int8, "{native} {int8} {fp8}");
}

#[test]
fn histories_come_back_from_host_memory_and_from_disk_as_they_were() {
    for format in QUANTISED {
        let here = Folder::new();
        let stored = || EngineOptions {
            store: Some(EngineStore::new(here.path())),
            offload: Offload::AtCommit,
            remember_bytes: 0,
            ..options()
        };
        let case = &cases("half")[0];
        let (half, last) = (case.len() / 2, case.len());
        let expected = with("half", format, options()).rank(&case.whole(last)).unwrap();
        let check = |response: &RankResponse| {
            assert_eq!((&response.scores, response.cached_rows > 0), (&expected.scores, true), "{format:?}");
        };
        for tier in [EngineOptions { host_bytes: 8 << 20, ..options() }, stored()] {
            let engine = with("half", format, tier);
            engine.rank(&case.whole(half)).unwrap();
            assert_eq!(engine.unload(&[case.user]).unwrap(), 1);
            check(&engine.rank(&case.whole(last)).unwrap());
        }
        // After a restart, and only with pages of the same format.
        let restarted = |format| with("half", format, stored()).rank(&case.whole(last)).unwrap();
        let other = if format == KvFormat::Int8 { KvFormat::Fp8 } else { KvFormat::Int8 };
        assert_eq!([KvFormat::Native, other].map(|format| restarted(format).cached_rows), [0, 0]);
        check(&restarted(format));
    }
}

#[test]
fn a_swap_keeps_the_format() {
    let engine = with("gather", KvFormat::Int8, options());
    engine.swap(folder("second")).unwrap();
    let swapped = &cases("second")[0];
    let opened = with("second", KvFormat::Int8, options());
    let of = |engine: &Engine, case: &Case| engine.rank(&case.whole(case.len())).unwrap().scores;
    assert_eq!(engine.folder().kv.format, KvFormat::Int8);
    assert_eq!(of(&engine, swapped), of(&opened, swapped));
}

#[test]
fn what_a_format_is_not_for_is_refused_by_name() {
    let refused = |model: &str, format| {
        let options = EngineOptions { kv_format: Some(format), ..options() };
        let error = Engine::open(folder(model), options).err().expect("it is refused");
        assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("options.kv_format")), "{error}");
        error.message().to_owned()
    };
    let message = refused("uncached", KvFormat::Int8);
    assert!(message.contains("int8, and this model keeps no keys and values (positions are counted"), "{message}");
    // Native pages are what these have.
    with("uncached", KvFormat::Native, options());
}

#[test]
fn bytes_of_a_row_are_known_without_opening_the_model() {
    let kv = ModelFolder::open(folder("half")).unwrap().kv;
    let of = |format| kv.bytes_per_token_in(format).unwrap();
    assert_eq!((kv.format_name(), of(KvFormat::Native)), ("native", kv.bytes_per_token));
    // 2 layers of keys and values of 2 heads of 32.
    assert_eq!([KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8].map(of), [8 * 36, 8 * 20, 8 * 34]);
}
