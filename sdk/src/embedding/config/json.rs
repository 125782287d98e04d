//! JSON as it was written: in order, and with every member of an object, also one that is there twice.

use std::fmt;

use serde_core::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};

/// One value. `serde_json::Value` would keep only the last of two members of the same name.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Flag(bool),
    Whole(i128),
    Real(f64),
    Text(String),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
}

impl Json {
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| Error::invalid("configuration", format!("not JSON: {error}")))
    }
}

/// The value in an error's words.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Longer than any name or path that one would recognise by its end.
        const SHOWN: usize = 80;
        match self {
            Self::Null => f.write_str("null"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Whole(number) => write!(f, "{number}"),
            Self::Real(number) => write!(f, "{number:?}"),
            Self::Text(text) if text.chars().count() > SHOWN => {
                write!(f, "{:?}…", text.chars().take(SHOWN).collect::<String>())
            }
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(list) => write!(f, "a list of {}", list.len()),
            Self::Object(_) => f.write_str("an object"),
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
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Json, E> {
        Ok(Json::Flag(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Whole(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Whole(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Real(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Json, A::Error> {
        let mut object = Vec::new();
        while let Some(member) = members.next_entry()? {
            object.push(member);
        }
        Ok(Json::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_value_is_read_as_written() {
        let json =
            Json::parse(r#"{"b": [null, true, -1, 18446744073709551615, 0.5, "ä\n"], "a": {}, "b": 1e3}"#).unwrap();
        let list = vec![
            Json::Null,
            Json::Flag(true),
            Json::Whole(-1),
            Json::Whole(u64::MAX.into()),
            Json::Real(0.5),
            Json::Text("ä\n".into()),
        ];
        let members = [("b", Json::List(list)), ("a", Json::Object(vec![])), ("b", Json::Real(1000.0))];
        assert_eq!(json, Json::Object(members.map(|(key, value)| (key.to_owned(), value)).into()));
    }

    #[test]
    fn what_is_not_json_is_refused_with_its_place() {
        let error = Json::parse("{\n  \"models\": [,]\n}").unwrap_err();
        assert_eq!(error.to_string(), "configuration: not JSON: expected value at line 2 column 14");
        assert!(Json::parse(&"[".repeat(100_000)).is_err());
        assert!(Json::parse("{} {}").is_err());
    }

    #[test]
    fn a_long_text_is_shown_by_its_beginning() {
        assert_eq!(Json::Text("a".repeat(81)).to_string(), format!("\"{}\"…", "a".repeat(80)));
        assert_eq!(Json::Text("a\"".into()).to_string(), r#""a\"""#);
    }
}
