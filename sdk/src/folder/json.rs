//! Values of pagoda.json, each with its place in the file, which errors name.

use serde_json::Value;

use crate::error::{Error, Result, Status};

/// A value and where it stands.
pub(super) struct At<'a> {
    place: String,
    value: &'a Value,
}

impl<'a> At<'a> {
    /// All of the file.
    pub(super) fn top(value: &'a Value) -> Self {
        Self { place: String::new(), value }
    }

    /// What stands under a key, which must be there; it may be null.
    pub(super) fn get(&self, key: &str) -> Result<Self> {
        let place = if self.place.is_empty() { key.to_owned() } else { format!("{}.{key}", self.place) };
        let Some(object) = self.value.as_object() else { return Err(self.expected("an object")) };
        let value = object.get(key).ok_or_else(|| damaged(format!("`{place}` is missing")))?;
        Ok(Self { place, value })
    }

    /// What stands under a key that folders of older versions do not have.
    pub(super) fn find(&self, key: &str) -> Result<Option<Self>> {
        let known = self.value.as_object().is_some_and(|object| object.contains_key(key));
        known.then(|| self.get(key)).transpose()
    }

    /// The same, unless it is null.
    pub(super) fn given(self) -> Option<Self> {
        (!self.value.is_null()).then_some(self)
    }

    pub(super) fn text(&self) -> Result<&'a str> {
        self.value.as_str().ok_or_else(|| self.expected("a text"))
    }

    pub(super) fn flag(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.expected("true or false"))
    }

    pub(super) fn key(&self) -> Result<i64> {
        self.value.as_i64().ok_or_else(|| self.expected("a whole number of 64 bits"))
    }

    pub(super) fn count<T: TryFrom<u64>>(&self) -> Result<T> {
        let number = self.value.as_u64().and_then(|number| number.try_into().ok());
        number.ok_or_else(|| self.expected("a whole number that is not negative and not too large"))
    }

    pub(super) fn list(&self) -> Result<Vec<Self>> {
        let list = self.value.as_array().ok_or_else(|| self.expected("a list"))?;
        let at = |(index, value)| Self { place: format!("{}[{index}]", self.place), value };
        Ok(list.iter().enumerate().map(at).collect())
    }

    pub(super) fn texts(&self) -> Result<Vec<String>> {
        self.list()?.iter().map(|at| at.text().map(str::to_owned)).collect()
    }

    /// The members of an object.
    pub(super) fn members(&self) -> Result<Vec<(&'a str, Self)>> {
        let object = self.value.as_object().ok_or_else(|| self.expected("an object"))?;
        let at = |(key, value): (&'a String, &'a Value)| {
            (key.as_str(), Self { place: format!("{}.{key}", self.place), value })
        };
        Ok(object.iter().map(at).collect())
    }

    /// One of several words.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T> {
        let text = self.text()?;
        let found = choices.iter().find(|(word, _)| *word == text).map(|&(_, meaning)| meaning);
        found.ok_or_else(|| self.expected(&choices.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(" or ")))
    }

    /// The error that this value is not what it should be.
    pub(super) fn expected(&self, what: &str) -> Error {
        let mut found = self.value.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(60).chain(['…']).collect();
        }
        damaged(format!("`{}`: expected {what}, found {found}", self.place))
    }
}

/// What is wrong with pagoda.json.
pub(super) fn damaged(message: impl std::fmt::Display) -> Error {
    Error::new(Status::Model, format!("pagoda.json: {message}"))
}
