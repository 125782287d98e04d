//! What can not be asked: each has its error, and the next good request works.

use pagoda::Status::{self, InvalidArgument, NotFound};
use pagoda::engine::{Columns, Engine, Events, RankRequest};

use crate::cases::{Case, cases, close, open, options};

/// The request is refused, for this reason, and a good one is answered afterwards.
fn refused(engine: &Engine, case: &Case, request: &RankRequest, status: Status, argument: &str, text: &str) {
    for outcome in [engine.rank(request).map(drop), engine.rank_async(request, |_| panic!("is not called"))] {
        let error = outcome.unwrap_err();
        assert_eq!((error.status(), error.argument()), (status, Some(argument)), "{error}");
        assert!(error.message().contains(text), "{error} does not say {text:?}");
    }
    case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len());
}

/// The same columns, each changed.
fn changed(columns: &Columns, change: impl Fn(&str, Vec<i64>) -> Vec<i64>) -> Columns {
    columns.iter().fold(Columns::new(), |made, (name, keys)| made.with(name, change(name, keys.to_vec())))
}

#[test]
fn candidates() {
    for model in ["gather", "bag", "uncached"] {
        let (engine, case) = (open(model, options()), &cases(model)[0]);
        let good = case.whole(case.len());
        let with = |candidates: Columns| RankRequest { candidates, ..good.clone() };
        let many = |count: usize| changed(&good.candidates, |_, _| vec![1; count]);
        let check = |candidates: Columns, status, text: &str| {
            refused(&engine, case, &with(candidates), status, "candidates", text);
        };
        check(Columns::new(), InvalidArgument, "there are none");
        check(many(0), InvalidArgument, "there are none");
        check(many(51), InvalidArgument, "51 are more than the 50");
        check(
            many(100_000),
            InvalidArgument,
            "100000 are more than the 50 that this model takes (limits.max_candidates)",
        );
        check(many(2).with("item", [1, 2]), InvalidArgument, "\"item\" is given twice");
        check(many(2).with("rating", [1, 2]), NotFound, "no feature \"rating\"; they have item, genre");
        check(Columns::new().with("item", [1, 2]), InvalidArgument, "the keys of \"genre\" are missing");
        check(Columns::new().with("item", [1, 2]).with("genre", [1]), InvalidArgument, "has 1 keys and \"item\" has 2");
        for key in [40, -2, i64::MAX, i64::MIN] {
            let unknown =
                changed(&good.candidates, |name, keys| if name == "item" { vec![key; keys.len()] } else { keys });
            check(
                unknown,
                InvalidArgument,
                &format!("\"item\" has the key {key}, and table \"items\" has rows 0 to 39"),
            );
        }
        assert!(engine.rank(&with(many(50))).is_ok());
    }
}

#[test]
fn a_default_row_serves_new_keys_and_no_key_is_one_too() {
    for model in ["gather", "bag"] {
        let (engine, case) = (open(model, options()), &cases(model)[0]);
        let genres = |key: i64| {
            let mut request = case.whole(case.len());
            let change = |name: &str, keys: Vec<i64>| if name == "genre" { vec![key; keys.len()] } else { keys };
            request.candidates = changed(&request.candidates, change);
            request.events.keys = changed(&request.events.keys, change);
            engine.rank(&request).unwrap().scores
        };
        let default = genres(0);
        for key in [6, 1_000_000, -2, i64::MIN] {
            close(&genres(key), &default, 1e-6);
        }
        assert!(genres(-1) != default, "no key at all is another thing");
        case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len());
    }
}

#[test]
fn keys_that_a_keyed_table_does_not_have() {
    let (engine, case) = (open("keyed", options()), &cases("keyed")[0]);
    for key in [0, 39, 10_i64.pow(12) + 1] {
        let unknown = |name: &str, mut keys: Vec<i64>| {
            if name == "item" {
                keys[1] = key;
            }
            keys
        };
        let text = format!("\"item\" has the key {key}, which table \"items\" does not have");
        let mut request = case.whole(case.len());
        request.candidates = changed(&request.candidates, unknown);
        refused(&engine, case, &request, InvalidArgument, "candidates", &text);
        let mut request = case.whole(case.len());
        request.events.keys = changed(&request.events.keys, unknown);
        refused(&engine, case, &request, InvalidArgument, "events", &text);
    }
}

#[test]
fn events() {
    for model in ["gather", "bag"] {
        let (engine, case) = (open(model, options()), &cases(model)[0]);
        let good = case.whole(case.len());
        let check = |events: Events, status, argument: &str, text: &str| {
            refused(&engine, case, &RankRequest { events, ..good.clone() }, status, argument, text);
        };
        let keys = |keys: Columns| Events { keys, times: good.events.times.clone() };
        let times = |times: Vec<i64>| Events { keys: good.events.keys.clone(), times };
        check(times(vec![]), InvalidArgument, "events.times", "0 times for 23 events");
        check(times(vec![1; 22]), InvalidArgument, "events.times", "22 times for 23 events");
        let rating = changed(&good.events.keys, |name, keys| if name == "rating" { vec![5; keys.len()] } else { keys });
        check(keys(rating), InvalidArgument, "events", "\"rating\" has the key 5");
        check(keys(Columns::new().with("item", vec![1; 23])), InvalidArgument, "events", "\"genre\" are missing");
        check(keys(good.events.keys.clone().with("mood", vec![1; 23])), NotFound, "events", "no feature \"mood\"");
        let long = Events { keys: changed(&good.events.keys, |_, _| vec![1; 41]), times: vec![5; 41] };
        check(long, InvalidArgument, "events", "41 events and this model takes 40 at most (limits.max_history)");
        for start in [18, u64::MAX] {
            let request = RankRequest { start: Some(start), ..good.clone() };
            refused(&engine, case, &request, InvalidArgument, "events", "takes 40 at most");
        }
    }
}

#[test]
fn user_keys() {
    let (engine, case) = (open("gather", options()), &cases("gather")[0]);
    let good = case.whole(case.len());
    let check = |user_keys: &[(&str, i64)], status, text: &str| {
        let user_keys = user_keys.iter().map(|&(name, key)| (name.to_owned(), key)).collect();
        refused(&engine, case, &RankRequest { user_keys, ..good.clone() }, status, "user_keys", text);
    };
    check(&[], InvalidArgument, "the key of \"age\" is missing");
    check(&[("age", 1)], InvalidArgument, "the key of \"town\" is missing");
    check(&[("age", 1), ("town", 2), ("age", 1)], InvalidArgument, "\"age\" is given twice");
    check(&[("age", 1), ("town", 2), ("shoe", 1)], NotFound, "no feature \"shoe\"");
    check(&[("age", 7), ("town", 2)], InvalidArgument, "\"age\" has the key 7");
}

#[test]
fn times_may_be_any() {
    for model in ["gather", "bag", "uncached"] {
        let (engine, case) = (open(model, options()), &cases(model)[0]);
        for time in [i64::MIN, -1, 0, i64::MAX] {
            for now in [i64::MIN, 0, i64::MAX] {
                let mut request = RankRequest { time: Some(now), ..case.whole(case.len()) };
                request.events.times.fill(time);
                let response = engine.rank(&request);
                let response = response.unwrap_or_else(|error| panic!("{model}, events at {time}, now {now}: {error}"));
                assert!(response.scores.iter().all(|score| score.is_finite()));
            }
        }
        case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len());
    }
}
