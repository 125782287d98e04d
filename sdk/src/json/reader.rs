//! Reads typed values out of JSON. Each value knows its place in the document, such as `models[0].sparse_files[1]`;
//! errors are INVALID_ARGUMENT about that place.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::{Json, closest};
use crate::error::{Error, Result, Status};

/// Which keys an object may have.
pub(crate) struct Keys {
    /// Those that are read.
    pub(crate) known: &'static [&'static str],
    /// Those that are refused by name, and what to do instead.
    pub(crate) refused: &'static [(&'static str, &'static str)],
}

/// An object in which no key is there twice.
pub(crate) struct Object<'a> {
    place: String,
    /// The keys that it may have; `None`: any.
    keys: Option<&'static Keys>,
    members: &'a [(String, Json)],
}

impl<'a> Object<'a> {
    /// The object that is a whole configuration.
    pub(crate) fn top(json: &'a Json, keys: &'static Keys) -> Result<Self> {
        Field::new("", json).object(keys).map_err(|error| match error.argument() {
            Some("") => error.about("configuration"),
            _ => error,
        })
    }

    /// The value of a key, if it is there.
    pub(crate) fn get(&self, key: &'static str) -> Option<Field<'a>> {
        debug_assert!(self.keys.is_none_or(|keys| keys.known.contains(&key)), "{key} is read but not known");
        let (_, value) = self.members.iter().find(|(name, _)| name == key)?;
        Some(Field { place: member(&self.place, key), value })
    }

    /// The value of a key that must be there; `what` says what it is for.
    pub(crate) fn required(&self, key: &'static str, what: &str) -> Result<Field<'a>> {
        self.get(key).ok_or_else(|| Error::invalid(member(&self.place, key), format!("is missing: {what}")))
    }

    /// The value of a key that must be there; it may be null.
    pub(crate) fn value(&self, key: &'static str) -> Result<Field<'a>> {
        self.get(key).ok_or_else(|| Error::invalid(member(&self.place, key), "is missing"))
    }

    /// The value of a key that must be there, or `None` if it is null.
    pub(crate) fn nullable(&self, key: &'static str) -> Result<Option<Field<'a>>> {
        Ok(Some(self.value(key)?).filter(|field| *field.value != Json::Null))
    }

    /// Every key with its value, in their order.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&'a str, Field<'a>)> {
        self.members.iter().map(|(key, value)| (key.as_str(), Field { place: member(&self.place, key), value }))
    }

    /// The flag of a key; `default` if it is not there.
    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        self.get(key).map_or(Ok(default), |field| field.flag())
    }

    /// The whole number of a key; `default` if it is not there.
    pub(crate) fn whole<T: Whole>(&self, key: &'static str, default: T, range: RangeInclusive<T>) -> Result<T> {
        self.get(key).map_or(Ok(default), |field| field.whole(range))
    }

    /// The number of a key; `default` if it is not there.
    pub(crate) fn real(&self, key: &'static str, default: f64, range: RangeInclusive<f64>) -> Result<f64> {
        self.get(key).map_or(Ok(default), |field| field.real(range))
    }
}

/// A value and its place, e.g. `models[0].sparse_files[1]`.
#[derive(Clone)]
pub(crate) struct Field<'a> {
    place: String,
    value: &'a Json,
}

impl<'a> Field<'a> {
    pub(crate) fn new(place: impl Into<String>, value: &'a Json) -> Self {
        Self { place: place.into(), value }
    }

    pub(crate) fn flag(&self) -> Result<bool> {
        match self.value {
            Json::Flag(flag) => Ok(*flag),
            _ => Err(self.expected("true or false")),
        }
    }

    /// A whole number in `range`. `1e6` is one too: Python writes large numbers like that.
    pub(crate) fn whole<T: Whole>(&self, range: RangeInclusive<T>) -> Result<T> {
        // Beyond it f64 skips whole numbers, and the document may have had another one.
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

    pub(crate) fn real(&self, range: RangeInclusive<f64>) -> Result<f64> {
        self.number().filter(|number| range.contains(number)).ok_or_else(|| match (*range.start(), *range.end()) {
            (first, f64::MAX) => self.expected(&format!("a number, {first} or more")),
            (first, last) => self.expected(&format!("a number from {first} to {last}")),
        })
    }

    /// A number that a row can hold.
    pub(crate) fn row_number(&self) -> Result<f32> {
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

    /// A number of 64 bits with a sign, exactly as written.
    pub(crate) fn i64(&self) -> Result<i64> {
        match self.value {
            Json::Whole(number) => i64::try_from(*number).ok(),
            _ => None,
        }
        .ok_or_else(|| self.expected("a whole number of 64 bits"))
    }

    pub(crate) fn text(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) => Ok(text),
            _ => Err(self.expected("a text")),
        }
    }

    /// A text that is not empty.
    pub(crate) fn name(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) if !text.is_empty() => Ok(text),
            _ => Err(self.expected("a text that is not empty")),
        }
    }

    /// A text that errors do not show.
    pub(crate) fn secret(&self) -> Result<&'a str> {
        match self.value {
            Json::Text(text) => Ok(text),
            _ => Err(self.error("expected a text; what was found is not shown, it may be a secret")),
        }
    }

    /// A file or a folder on this machine; a relative path starts at `folder`.
    pub(crate) fn path(&self, folder: Option<&Path>) -> Result<PathBuf> {
        let text = self.name()?;
        if text.contains("://") {
            let message = format!("{} is on another machine, which is not read from: copy it here", self.value);
            return Err(self.unsupported(&message));
        }
        Ok(folder.map_or_else(|| PathBuf::from(text), |folder| folder.join(text)))
    }

    /// One of a few words. Several words may have one meaning; errors name the first of them.
    pub(crate) fn choice<T: Copy>(&self, meanings: &[(&[&'static str], T)]) -> Result<T> {
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

    /// The values of a list, or `None` if it is no list.
    pub(crate) fn maybe_list(&self) -> Option<Vec<Self>> {
        let Json::List(list) = self.value else { return None };
        let places = (0..).map(|index| format!("{}[{index}]", self.place));
        Some(list.iter().zip(places).map(|(value, place)| Self { place, value }).collect())
    }

    /// The values of a list; `what` names its elements, for the error.
    pub(crate) fn list(&self, what: &str) -> Result<Vec<Self>> {
        self.maybe_list().ok_or_else(|| self.expected(&format!("a list of {what}")))
    }

    /// An object with these keys and no others.
    pub(crate) fn object(&self, keys: &'static Keys) -> Result<Object<'a>> {
        let Json::Object(members) = self.value else { return Err(self.expected("an object")) };
        for (key, _) in members {
            let place = member(&self.place, key);
            if let Some((_, reason)) = keys.refused.iter().find(|(refused, _)| refused == key) {
                return Err(Error::new(Status::Unsupported, format!("is not supported: {reason}")).about(place));
            }
            if !keys.known.contains(&key.as_str()) {
                return Err(Error::invalid(place, unknown(key, keys)));
            }
        }
        Ok(Object { keys: Some(keys), ..self.open_object()? })
    }

    /// An object with any keys.
    pub(crate) fn open_object(&self) -> Result<Object<'a>> {
        let Json::Object(members) = self.value else { return Err(self.expected("an object")) };
        for (index, (key, _)) in members.iter().enumerate() {
            if members[..index].iter().any(|(before, _)| before == key) {
                return Err(Error::invalid(member(&self.place, key), "is there twice; keep one"));
            }
        }
        Ok(Object { place: self.place.clone(), keys: None, members })
    }

    /// An error about this place.
    pub(crate) fn error(&self, message: &str) -> Error {
        Error::invalid(&self.place, message)
    }

    /// An error about something that Pagoda does not have.
    pub(crate) fn unsupported(&self, message: &str) -> Error {
        Error::new(Status::Unsupported, message).about(&self.place)
    }

    pub(crate) fn expected(&self, what: &str) -> Error {
        self.error(&format!("expected {what}, found {}", self.value))
    }

    /// Its place in the document.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }
}

/// A type of whole numbers, `u32` or `u64`.
pub(crate) trait Whole: Copy + PartialOrd + TryFrom<u64> + Into<u64> {}

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
    fn objects_with_any_keys_still_have_each_once() {
        let json = Json::parse(r#"{"a": null, "b": -1}"#).unwrap();
        let object = field(&json).open_object().unwrap();
        assert!(object.nullable("a").unwrap().is_none() && object.get("c").is_none());
        assert_eq!(object.value("b").unwrap().i64(), Ok(-1));
        assert_eq!(object.value("c").err(), Some(Error::invalid("x.c", "is missing")));
        assert_eq!(object.members().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "b"]);
        let twice = Json::parse(r#"{"a": 1, "b": 2, "a": 3}"#).unwrap();
        assert_eq!(field(&twice).open_object().err(), Some(Error::invalid("x.a", "is there twice; keep one")));
        assert!(field(&Json::Null).open_object().is_err());
    }

    #[test]
    fn numbers_of_rows_are_f32() {
        assert_eq!(field(&Json::Real(0.1)).row_number(), Ok(0.1));
        assert!(field(&Json::Real(1e39)).row_number().is_err());
    }
}
