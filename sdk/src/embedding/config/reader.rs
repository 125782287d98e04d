//! Reads JSON values with their places, so that every error can name the place.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, Status};
use crate::json::{Json, closest};

/// The keys that an object may have.
pub(super) struct Keys {
    /// The keys that are read.
    pub(super) known: &'static [&'static str],
    /// The keys that are refused by name, and what to do instead.
    pub(super) refused: &'static [(&'static str, &'static str)],
}

/// An object whose keys are all known and unique.
pub(super) struct Object<'a> {
    place: String,
    keys: &'static Keys,
    members: &'a [(String, Json)],
}

impl<'a> Object<'a> {
    /// The object of the whole configuration.
    pub(super) fn top(json: &'a Json, keys: &'static Keys) -> Result<Self> {
        Field::new("", json).object(keys).map_err(|error| match error.argument() {
            Some("") => error.about("configuration"),
            _ => error,
        })
    }

    /// The value of a key, if the object has it.
    pub(super) fn get(&self, key: &'static str) -> Option<Field<'a>> {
        debug_assert!(self.keys.known.contains(&key), "{key} is read but not known");
        let (_, value) = self.members.iter().find(|(name, _)| name == key)?;
        Some(Field { place: member(&self.place, key), value })
    }

    /// The value of a required key; `what` describes it in the error.
    pub(super) fn required(&self, key: &'static str, what: &str) -> Result<Field<'a>> {
        self.get(key).ok_or_else(|| Error::invalid(member(&self.place, key), format!("is missing: {what}")))
    }

    /// The boolean of a key; `default` if the object does not have it.
    pub(super) fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        self.get(key).map_or(Ok(default), |field| field.flag())
    }

    /// The whole number of a key; `default` if the object does not have it.
    pub(super) fn whole<T: Whole>(&self, key: &'static str, default: T, range: RangeInclusive<T>) -> Result<T> {
        self.get(key).map_or(Ok(default), |field| field.whole(range))
    }

    /// The number of a key; `default` if the object does not have it.
    pub(super) fn real(&self, key: &'static str, default: f64, range: RangeInclusive<f64>) -> Result<f64> {
        self.get(key).map_or(Ok(default), |field| field.real(range))
    }
}

/// A value and its place, for example `models[0].sparse_files[1]`.
#[derive(Clone)]
pub(super) struct Field<'a> {
    place: String,
    value: &'a Json,
}

impl<'a> Field<'a> {
    pub(super) fn new(place: impl Into<String>, value: &'a Json) -> Self {
        Self { place: place.into(), value }
    }

    pub(super) fn flag(&self) -> Result<bool> {
        match self.value {
            Json::Flag(flag) => Ok(*flag),
            _ => Err(self.expected("true or false")),
        }
    }

    /// A whole number in `range`. `1e6` is one too: Python writes large numbers this way.
    pub(super) fn whole<T: Whole>(&self, range: RangeInclusive<T>) -> Result<T> {
        // Beyond this not every whole number is an f64: the number in the text may have been another one.
        const EXACT: f64 = (1_u64 << 53) as f64;
        let number = match self.value {
            Json::Whole(number) => u64::try_from(*number).ok(),
            Json::Real(number) if number.fract() == 0.0 && (0.0..=EXACT).contains(number) => Some(*number as u64),
            _ => None,
        };
        let number = number.and_then(|number| T::try_from(number).ok()).filter(|number| range.contains(number));
        number.ok_or_else(|| match ((*range.start()).into(), (*range.end()).into()) {
            (first, u64::MAX) => self.expected(&format!("a whole number, {first} or more")),
            (first, last) => self.expected(&format!("a whole number from {first} to {last}")),
        })
    }

    pub(super) fn real(&self, range: RangeInclusive<f64>) -> Result<f64> {
        self.number().filter(|number| range.contains(number)).ok_or_else(|| match (*range.start(), *range.end()) {
            (first, f64::MAX) => self.expected(&format!("a number, {first} or more")),
            (first, last) => self.expected(&format!("a number from {first} to {last}")),
        })
    }

    /// A number of a row.
    pub(super) fn row_number(&self) -> Result<f32> {
        let number = self.number().map(|number| number as f32).filter(|number| number.is_finite());
        number.ok_or_else(|| self.expected("a number that an f32 can hold"))
    }

    fn number(&self) -> Option<f64> {
        match self.value {
            Json::Whole(number) => Some(*number as f64),
            Json::Real(number) => Some(*number),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) => Ok(text),
            _ => Err(self.expected("a text")),
        }
    }

    /// A text that is not empty.
    pub(super) fn name(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) if !text.is_empty() => Ok(text),
            _ => Err(self.expected("a text that is not empty")),
        }
    }

    /// A text that errors do not show.
    pub(super) fn secret(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) => Ok(text),
            _ => Err(self.error("expected a text; what was found is not shown, it may be a secret")),
        }
    }

    /// A file or a folder on this machine. A relative path is relative to `folder`.
    pub(super) fn path(&self, folder: Option<&Path>) -> Result<PathBuf> {
        let text = self.name()?;
        if text.contains("://") {
            let message = format!("{} is on another machine, which is not read from: copy it here", self.value);
            return Err(self.unsupported(&message));
        }
        Ok(folder.map_or_else(|| PathBuf::from(text), |folder| folder.join(text)))
    }

    /// One of a few words. Several words may have the same meaning; errors name the first of them.
    pub(super) fn choice<T: Copy>(&self, meanings: &[(&[&'static str], T)]) -> Result<T> {
        let expected = one_of(meanings.iter().map(|(words, _)| words[0]));
        let Json::Text(text) = self.value else { return Err(self.expected(&expected)) };
        let meant = meanings.iter().find(|(words, _)| words.contains(&text.as_str()));
        meant.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let hint = match closest(text, meanings.iter().flat_map(|(words, _)| words.iter().copied())) {
                Some(word) => format!("; did you mean {word:?}?"),
                None => String::new(),
            };
            self.error(&format!("expected {expected}, found {}{hint}", self.value))
        })
    }

    /// The values of a list; `None` if it is not a list.
    pub(super) fn maybe_list(&self) -> Option<Vec<Self>> {
        let Json::List(list) = self.value else { return None };
        let places = (0..).map(|index| format!("{}[{index}]", self.place));
        Some(list.iter().zip(places).map(|(value, place)| Self { place, value }).collect())
    }

    /// The values of a list; `what` names them in the error.
    pub(super) fn list(&self, what: &str) -> Result<Vec<Self>> {
        self.maybe_list().ok_or_else(|| self.expected(&format!("a list of {what}")))
    }

    /// An object with these keys and no others.
    pub(super) fn object(&self, keys: &'static Keys) -> Result<Object<'a>> {
        let Json::Object(members) = self.value else { return Err(self.expected("an object")) };
        for (index, (key, _)) in members.iter().enumerate() {
            let place = member(&self.place, key);
            if let Some((_, reason)) = keys.refused.iter().find(|(refused, _)| refused == key) {
                return Err(Error::new(Status::Unsupported, format!("is not supported: {reason}")).about(place));
            }
            if !keys.known.contains(&key.as_str()) {
                return Err(Error::invalid(place, unknown(key, keys)));
            }
            if members[..index].iter().any(|(before, _)| before == key) {
                return Err(Error::invalid(place, "is there twice; keep one"));
            }
        }
        Ok(Object { place: self.place.clone(), keys, members })
    }

    /// An error about this place.
    pub(super) fn error(&self, message: &str) -> Error {
        Error::invalid(&self.place, message)
    }

    /// An error about a feature that is not supported.
    pub(super) fn unsupported(&self, message: &str) -> Error {
        Error::new(Status::Unsupported, message).about(&self.place)
    }

    pub(super) fn expected(&self, what: &str) -> Error {
        self.error(&format!("expected {what}, found {}", self.value))
    }

    /// Its place.
    pub(super) fn place(&self) -> &str {
        &self.place
    }
}

/// A type of whole numbers, `u32` or `u64`.
pub(super) trait Whole: Copy + PartialOrd + TryFrom<u64> + Into<u64> {}

impl<T: Copy + PartialOrd + TryFrom<u64> + Into<u64>> Whole for T {}

fn member(place: &str, key: &str) -> String {
    if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") }
}

fn unknown(key: &str, keys: &Keys) -> String {
    match closest(key, keys.known.iter().copied()) {
        Some(known) => format!("unknown key; did you mean `{known}`?"),
        None => format!("unknown key; known here are {}", keys.known.join(", ")),
    }
}

fn one_of(words: impl Iterator<Item = &'static str>) -> String {
    let words: Vec<_> = words.map(|word| format!("{word:?}")).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(value: &Json) -> Field<'_> {
        Field::new("x", value)
    }

    #[test]
    fn whole_numbers_are_exact() {
        let read = |value| field(&value).whole::<u64>(0..=u64::MAX).ok();
        assert_eq!(read(Json::Whole(u64::MAX.into())), Some(u64::MAX));
        assert_eq!(read(Json::Real(1e6)), Some(1_000_000));
        for wrong in [Json::Whole(-1), Json::Real(0.5), Json::Real(-1.0), Json::Real(1e17), Json::Text("1".into())] {
            assert_eq!(read(wrong), None);
        }
    }

    #[test]
    fn numbers_of_rows_are_f32() {
        assert_eq!(field(&Json::Real(0.1)).row_number(), Ok(0.1));
        assert!(field(&Json::Real(1e39)).row_number().is_err());
    }
}
