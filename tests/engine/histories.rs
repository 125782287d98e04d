//! Histories that are edited, shortened, delayed, or have a gap.

use pagoda::engine::{EngineOptions, EngineStore, RankRequest, RankResponse};
use pagoda::{Engine, KvSize, Status};
use pagoda_test_support::Folder;

use crate::cases::{cases, close, edited, folder, open, options};

/// The response of an engine without a cache.
fn fresh(model: &str, request: &RankRequest) -> RankResponse {
    open(model, EngineOptions { kv_size: None, remember_bytes: 0, ..options() }).rank(request).unwrap()
}

#[test]
fn an_edit_is_detected_at_any_event() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    for event in [0, 2, 3, 11, 22] {
        engine.rank(&case.whole(case.len())).unwrap();
        let mut request = case.whole(case.len());
        let rating = request.events.keys.get("rating").unwrap()[event];
        request.events.keys = edited(&request.events.keys, "rating", event, (rating + 1) % 5);
        let response = engine.rank(&request).unwrap();
        close(&response.scores, &fresh("gather", &request).scores, 1e-5);
        // Whole pages before the edit stay: two rows of the user, two of each event.
        let row = 2 + 2 * event as u64 + 1;
        assert_eq!(response.cached_rows, row / 8 * 8, "event {event}");
        // As it was before.
        case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len());
    }
}

#[test]
fn an_edited_time_is_detected() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    engine.rank(&case.whole(case.len())).unwrap();
    let mut request = case.whole(case.len());
    request.events.times[5] += 5 * 3600;
    let response = engine.rank(&request).unwrap();
    assert_eq!(response.cached_rows, 8);
    close(&response.scores, &fresh("gather", &request).scores, 1e-5);
}

#[test]
fn other_user_keys_mean_another_history() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    let last = case.len();
    engine.rank(&case.whole(last - 1)).unwrap();
    let mut request = case.request(last - 1, last);
    request.user_keys[0].1 = (request.user_keys[0].1 + 1) % 7;
    let response = engine.rank(&request).unwrap();
    assert_eq!(response.cached_rows, 0, "every row depends on the user keys");
    let mut whole = case.whole(last);
    whole.user_keys = request.user_keys.clone();
    close(&response.scores, &fresh("gather", &whole).scores, 1e-5);
    // Left out, they are unchanged.
    request = RankRequest { user_keys: Vec::new(), ..case.request(last, last) };
    let response = engine.rank(&request).unwrap();
    assert_eq!(response.computed_rows, 0);
    close(&response.scores, &fresh("gather", &whole).scores, 1e-5);
}

#[test]
fn delayed_and_repeated_requests_forget_nothing() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    let (half, last) = (case.len() / 2, case.len());
    engine.rank(&case.whole(half)).unwrap();
    engine.rank(&case.request(half, last)).unwrap();
    for _ in 0..2 {
        let again = engine.rank(&case.request(half, last)).unwrap();
        case.check(&again, last);
        assert_eq!(again.computed_rows, 0);
        let late = engine.rank(&case.whole(half)).unwrap();
        case.check(&late, half);
        let late = engine.rank(&case.request(half - 4, half)).unwrap();
        case.check(&late, half);
        assert_eq!(engine.rank(&case.request(last, last)).unwrap().computed_rows, 0);
    }
}

/// A page has eight rows, so a history of two events fills no page.
#[test]
fn a_delayed_request_with_other_user_keys_counts() {
    let case = &cases("gather")[0];
    let keys = |age: i64, town: i64| vec![("age".to_owned(), age), ("town".to_owned(), town)];
    let engine = open("gather", options());
    engine.rank(&RankRequest { user_keys: keys(1, 1), ..case.whole(22) }).unwrap();
    engine.rank(&RankRequest { user_keys: keys(5, 6), ..case.whole(2) }).unwrap();
    let got = engine.rank(&RankRequest { user_keys: keys(5, 6), ..case.request(22, 23) }).unwrap();
    let whole = RankRequest { user_keys: keys(5, 6), ..case.whole(23) };
    close(&got.scores, &fresh("gather", &whole).scores, 1e-5);
}

#[test]
fn a_short_history_with_an_edit_replaces_a_long_one() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    engine.rank(&case.whole(22)).unwrap();
    let mut short = case.whole(2);
    short.events.keys = edited(&short.events.keys, "item", 1, 39);
    engine.rank(&short).unwrap();
    let error = engine.rank(&case.request(22, 23)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("start")), "{error}");
    assert!(error.message().contains("events 2 to 21 "), "{error}");
}

#[test]
fn an_edit_beside_events_that_are_remembered_in_part() {
    let case = &cases("gather")[0];
    let here = Folder::new();
    let stored = || EngineOptions { store: Some(EngineStore::new(here.path())), ..options() };
    open("gather", stored()).rank(&case.whole(20)).unwrap();
    // Only the last events are remembered, and all are in the store.
    let engine = open("gather", stored());
    engine.rank(&RankRequest { user_keys: Vec::new(), ..case.request(20, 23) }).unwrap();
    // Rows 40 to 43 fill no page.
    let mut late = case.whole(21);
    late.events.keys = edited(&late.events.keys, "item", 20, 39);
    close(&engine.rank(&late).unwrap().scores, &fresh("gather", &late).scores, 1e-5);
    assert_eq!(engine.rank(&case.request(23, 23)).unwrap_err().status(), Status::NotFound);
}

#[test]
fn user_keys_that_can_not_be_compared_are_not_taken_as_equal() {
    let case = &cases("gather")[0];
    let engine = open("gather", EngineOptions { remember_bytes: 0, ..options() });
    engine.rank(&case.whole(22)).unwrap();
    let mut request = case.request(22, 23);
    request.user_keys[0].1 = (request.user_keys[0].1 + 1) % 7;
    assert_eq!(engine.rank(&request).unwrap_err().status(), Status::NotFound);
    let rest = RankRequest { user_keys: Vec::new(), ..case.request(22, 23) };
    case.check(&engine.rank(&rest).unwrap(), 23);
}

#[test]
fn an_edited_history_that_fits_is_answered() {
    let case = &cases("gather")[0];
    // The history takes six pages, and so does its replacement.
    let engine = open("gather", EngineOptions { kv_size: Some(KvSize::Pages(9)), ..options() });
    engine.rank(&case.whole(23)).unwrap();
    for (event, from) in [(1, 0), (2, 0), (5, 4)] {
        let mut request = case.whole(23);
        request.events.keys = edited(&request.events.keys, "item", event, 39);
        let expected = fresh("gather", &request).scores;
        let mut sent = case.request(from, 23);
        sent.events.keys = edited(&sent.events.keys, "item", event - from, 39);
        close(&engine.rank(&sent).unwrap().scores, &expected, 1e-5);
        close(&engine.rank(&case.request(23, 23)).unwrap().scores, &expected, 1e-5);
        case.check(&engine.rank(&case.whole(23)).unwrap(), 23);
    }
}

#[test]
fn events_that_are_sent_again_replace_the_earlier_ones() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    let (half, last) = (case.len() / 2, case.len());
    engine.rank(&case.whole(half)).unwrap();
    let mut other = case.request(half, last);
    other.events.keys = edited(&other.events.keys, "item", 0, 39);
    let first = engine.rank(&other).unwrap();
    let second = engine.rank(&case.request(half, last)).unwrap();
    case.check(&second, last);
    assert!(first.scores != second.scores);
    case.check(&engine.rank(&case.request(last, last)).unwrap(), last);
}

#[test]
fn a_gap_is_reported_and_the_whole_history_closes_it() {
    for model in ["gather", "uncached"] {
        let case = &cases(model)[0];
        let engine = open(model, options());
        let gap = |from: usize, text: &str| {
            let error = engine.rank(&case.request(from, case.len())).unwrap_err();
            assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("start")), "{error}");
            assert!(error.message().contains(text), "{error}");
        };
        gap(12, "events 0 to 11 of user 100 are not known here; send the whole history");
        engine.rank(&case.whole(7)).unwrap();
        gap(12, "events 7 to 11 ");
        case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len());
        case.check(&engine.rank(&case.request(12, case.len())).unwrap(), case.len());
    }
}

#[test]
fn events_that_are_neither_cached_nor_remembered_are_a_gap() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { kv_size: Some(KvSize::Pages(9)), remember_bytes: 0, ..options() });
    let first = &users[0];
    case_of_two(&engine, first);
    // While it is cached, no events need be remembered.
    let go_on = RankRequest { user_keys: Vec::new(), ..first.request(first.len(), first.len()) };
    first.check(&engine.rank(&go_on).unwrap(), first.len());
    // But user keys can not be compared.
    let error = engine.rank(&first.request(first.len(), first.len())).unwrap_err();
    assert_eq!(error.status(), Status::NotFound, "{error}");
    // Nor can events that are sent again be compared.
    let again = RankRequest { user_keys: Vec::new(), ..first.request(first.len() - 1, first.len()) };
    let error = engine.rank(&again).unwrap_err();
    assert_eq!(error.status(), Status::NotFound, "{error}");
    engine.rank(&users[5].whole(users[5].len())).unwrap();
    let error = engine.rank(&go_on).unwrap_err();
    assert_eq!(error.status(), Status::NotFound, "{error}");
    first.check(&engine.rank(&first.whole(first.len())).unwrap(), first.len());
}

fn case_of_two(engine: &pagoda::Engine, case: &crate::cases::Case) {
    engine.rank(&case.whole(case.len() - 1)).unwrap();
    let rest = RankRequest { user_keys: Vec::new(), ..case.request(case.len() - 1, case.len()) };
    case.check(&engine.rank(&rest).unwrap(), case.len());
}

#[test]
fn a_forgotten_user_is_unknown() {
    let case = &cases("gather")[0];
    let engine = open("gather", options());
    case_of_two(&engine, case);
    assert_eq!((engine.stats().remembered_users, engine.forget(&[case.user, 5]).unwrap()), (1, 1));
    assert_eq!((engine.stats().remembered_users, engine.kv_stats().unwrap().resident_owners), (0, 0));
    assert_eq!(engine.rank(&case.request(case.len(), case.len())).unwrap_err().status(), Status::NotFound);
    assert_eq!(engine.rank(&case.whole(case.len())).unwrap().cached_rows, 0);
}

#[test]
fn remembered_events_take_little_memory() {
    let users = cases("gather");
    let engine = open("gather", options());
    for case in &users {
        engine.rank(&case.whole(case.len())).unwrap();
    }
    let stats = engine.stats();
    let events: usize = users.iter().map(|case| case.len()).sum();
    assert_eq!(stats.remembered_users, users.len() as u64);
    // Three keys and a time each, and a little for each user.
    assert!(stats.remembered_bytes <= (events * 4 * 8 + users.len() * 256) as u64, "{stats:?}");
}

#[test]
fn evicted_histories_come_back_from_host_memory() {
    // Histories of at least one page.
    let all: Vec<_> = cases("gather").into_iter().filter(|case| case.len() > 5).collect();
    assert!(all.len() > 1);
    let engine = open("gather", EngineOptions { host_bytes: 1 << 20, remember_bytes: 0, ..options() });
    for case in &all {
        engine.rank(&case.whole(case.len() - 1)).unwrap();
    }
    let users: Vec<u64> = all.iter().map(|case| case.user).collect();
    assert_eq!((engine.unload(&users).unwrap(), engine.unload(&users).unwrap()), (users.len(), 0));
    for case in &all {
        let response = engine.rank(&case.whole(case.len())).unwrap();
        assert!(response.cached_rows > 0, "user {}", case.user);
        case.check(&response, case.len());
    }
    assert!(engine.kv_stats().unwrap().tokens_from_store > 0);
    let error = Engine::open(folder("gather"), EngineOptions { host_bytes: u64::MAX, ..options() }).err().unwrap();
    assert_eq!((error.status(), error.argument()), (Status::Capacity, Some("options.host_bytes")), "{error}");
}
