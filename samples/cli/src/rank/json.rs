//! A line of JSON as it was written: with every member of an object, also one that is there twice.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// One value. `serde_json::Value` would keep only the last of two members of the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// A whole number.
    Whole(i128),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
    /// Anything else, in an error's words: no request has a place for it.
    Other(String),
}

/// The value in an error's words.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => write!(f, "{number}"),
            Self::List(list) => write!(f, "a list of {}", list.len()),
            Self::Object(_) => f.write_str("an object"),
            Self::Other(words) => f.write_str(words),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Other("null".to_owned()))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Json, E> {
        Ok(Json::Other(flag.to_string()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Whole(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Whole(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Other(format!("{number:?}")))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        // Longer than any name that one would recognise by its end.
        const SHOWN: usize = 40;
        let begins: String = text.chars().take(SHOWN).collect();
        let more = if begins.len() < text.len() { "…" } else { "" };
        Ok(Json::Other(format!("{begins:?}{more}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = sequence.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_as_they_were_written() {
        let read = |text| serde_json::from_str::<Json>(text).unwrap();
        assert_eq!(read("18446744073709551615"), Json::Whole(u64::MAX.into()));
        assert_eq!(read("-1"), Json::Whole(-1));
        let twice = r#"{"a": 1, "a": [2, {}]}"#;
        let list = Json::List(vec![Json::Whole(2), Json::Object(Vec::new())]);
        assert_eq!(read(twice), Json::Object(vec![("a".into(), Json::Whole(1)), ("a".into(), list)]));
        let long = format!("{:?}", "x".repeat(41));
        let words =
            [("null", "null"), ("true", "true"), ("1.50", "1.5"), (r#""7""#, r#""7""#), ("[1, 2]", "a list of 2")];
        for (text, words) in words {
            assert_eq!(read(text).to_string(), words);
        }
        assert_eq!(read(&long).to_string(), format!("{:?}…", "x".repeat(40)));
    }
}
