//! JSON documents with good error messages: values keep their order, duplicate keys are seen, every error names the
//! place in the document, and misspelt words get a suggestion. The `pagoda` command uses it too; it is not part of the
//! interface.

mod reader;

use std::fmt;

use serde_core::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};

pub(crate) use reader::{Field, Keys, Object};

/// One value. Unlike `serde_json::Value` it keeps all members of an object, also two of the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// A whole number.
    Whole(i128),
    /// Any other number.
    Real(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Self>),
    /// An object.
    Object(Vec<(String, Self)>),
}

impl Json {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| Error::invalid("configuration", format!("not JSON: {error}")))
    }
}

/// The value as an error message shows it.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Longer texts are cut: an error message is one line.
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

/// The nearest word, for "did you mean ...?": at most two letters are wrong, missing, too many or swapped.
pub fn closest<'a>(found: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let found: Vec<char> = found.chars().collect();
    let near = words.map(|word| (distance(&found, &word.chars().collect::<Vec<_>>()), word));
    near.filter(|(distance, _)| *distance <= 2 && *distance < found.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|near| near.1)
}

/// The Damerau-Levenshtein distance: how many letters to insert, delete, replace or swap with the next.
fn distance(one: &[char], other: &[char]) -> usize {
    // Too far apart for `closest` in any case; a found word may be of any length.
    if one.len().abs_diff(other.len()) > 2 {
        return usize::MAX;
    }
    let mut rows: Vec<Vec<usize>> = vec![(0..=other.len()).collect()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
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

    #[test]
    fn the_nearest_word_is_found() {
        let words = ["persistent_db", "volatile_db", "models", "type"];
        let near = |found| closest(found, words.into_iter());
        assert_eq!(near("peristent_db"), Some("persistent_db"));
        assert_eq!(near("vloatile_dbs"), Some("volatile_db"));
        assert_eq!(near("tpye"), Some("type"));
        assert_eq!(near("mod"), None);
        assert_eq!(near("ty"), None);
        assert_eq!(near(""), None);
    }

    #[test]
    fn distances_count_what_was_typed_wrong() {
        let between = |one: &str, other: &str| distance(&Vec::from_iter(one.chars()), &Vec::from_iter(other.chars()));
        assert_eq!(between("abc", "abc"), 0);
        assert_eq!(between("abc", "acb"), 1);
        assert_eq!(between("abc", "bc"), 1);
        assert_eq!(between("abc", "axcd"), 2);
        assert_eq!(between("", "ab"), 2);
        assert_eq!(between("abc", ""), usize::MAX);
    }
}
