//! Configurations with something wrong in them, by chance: none panics, none shows the password, and those that are
//! accepted keep what the fields promise.

use pagoda_test_support::times;

use super::*;

/// Numbers that look random and are the same in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }

    fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

#[test]
fn wrong_letters_do_no_harm() {
    let mut random = Random(1);
    let (mut accepted, tried) = (0, times(1_500, 5_000));
    for _ in 0..tried {
        let mut text = FULL.as_bytes().to_vec();
        for _ in 0..=random.below(3) {
            let at = random.below(text.len());
            match random.below(3) {
                0 => text[at] = *random.choose(b"\"{}[]:,0-.eEtn\\ \x00a"),
                1 if text.len() > 1 => drop(text.remove(at)),
                _ => text.truncate(at + 1),
            }
        }
        accepted += usize::from(check(&String::from_utf8(text).unwrap()));
    }
    // Some changes are in places where they change nothing, such as between two values.
    assert!((tried / 50..tried / 10 * 9).contains(&accepted), "{accepted}");
}

#[test]
fn wrong_values_do_no_harm() {
    let values: Vec<Json> = [
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "2",
        "0.5",
        "-0.0",
        "1e3",
        "1e308",
        "-1e308",
        "18446744073709551615",
        "9223372036854775808",
        "\"\"",
        "\"a\"",
        "\"hash_map\"",
        "\"disabled\"",
        "\"a:1,b:2\"",
        "\"\\u0000/..\"",
        "[]",
        "[[]]",
        "[1]",
        "[1, 2]",
        "[\"a\", \"b\"]",
        "{}",
        "{\"type\": \"disabled\"}",
        "[{\"type\": \"redis\"}]",
    ]
    .map(|text| Json::parse(text).unwrap())
    .into();
    let mut random = Random(2);
    let (mut accepted, tried) = (0, times(1_500, 5_000));
    for _ in 0..tried {
        let mut json = Json::parse(FULL).unwrap();
        for _ in 0..=random.below(3) {
            change(&mut json, &values, &mut random);
        }
        accepted += usize::from(check(&written(&json)));
    }
    assert!((tried / 50..tried / 10 * 9).contains(&accepted), "{accepted}");
}

/// Goes down to some value and changes, doubles or removes it.
fn change(json: &mut Json, values: &[Json], random: &mut Random) {
    match json {
        Json::Object(members) if !members.is_empty() && random.below(12) > 0 => {
            let at = random.below(members.len());
            match random.below(12) {
                0 => drop(members.remove(at)),
                1 => members.push(members[at].clone()),
                _ => change(&mut members[at].1, values, random),
            }
        }
        Json::List(list) if !list.is_empty() && random.below(4) > 0 => {
            let at = random.below(list.len());
            match random.below(8) {
                0 => drop(list.remove(at)),
                1 => list.push(list[at].clone()),
                _ => change(&mut list[at], values, random),
            }
        }
        _ => *json = random.choose(values).clone(),
    }
}

fn written(json: &Json) -> String {
    match json {
        Json::List(list) => format!("[{}]", list.iter().map(written).collect::<Vec<_>>().join(",")),
        Json::Object(members) => {
            let members = members.iter().map(|(key, value)| format!("\"{key}\":{}", written(value)));
            format!("{{{}}}", members.collect::<Vec<_>>().join(","))
        }
        Json::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        other => other.to_string(),
    }
}

/// Whether a configuration is accepted.
fn check(text: &str) -> bool {
    let config = match PsJson::from_json(text, Some(Path::new("folder"))) {
        Ok(config) => config,
        Err(error) => {
            assert!(!error.to_string().contains("hunter2"), "{error}\n{text}");
            assert!(error.argument().is_some_and(|place| !place.is_empty()) && !error.message().is_empty());
            return false;
        }
    };
    assert!(!format!("{config:?}").contains("hunter2"), "{text}");
    let options = config.options;
    for model in &options.models {
        assert!(!model.name.is_empty() && !model.tables.is_empty());
        for table in &model.tables {
            assert_eq!(table.default_row.len(), table.dim as usize);
            assert!(table.dim > 0 && table.default_row.iter().all(|number| number.is_finite()));
        }
        if let Some(CacheOptions { size: CacheSize::Share(share), refresh_interval, .. }) = model.cache {
            assert!(share > 0.0 && share <= 1.0 && refresh_interval <= Duration::from_secs(1 << 30));
        }
    }
    let TierOptions { memory, redis, .. } = options.tiers;
    let overflows = [memory.map(|memory| memory.overflow), redis.map(|redis| redis.overflow)];
    for overflow in overflows.into_iter().flatten() {
        assert!(overflow.keep > 0.0 && overflow.keep < 1.0 && overflow.max_rows != Some(0));
    }
    true
}
