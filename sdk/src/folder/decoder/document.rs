//! The JSON files that lie beside a decoder.

use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::error::{Error, Result, Status};
use crate::json::{Field, Json};

/// A JSON file.
pub(super) struct Document {
    pub(super) name: &'static str,
    json: Json,
}

/// A value, and where it was found.
pub(super) struct Found<'a> {
    document: &'a Document,
    field: Field<'a>,
    json: &'a Json,
}

impl Document {
    /// Reads a file of a folder; `None` if it is not there.
    pub(super) fn read(folder: &Path, name: &'static str) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(folder.join(name)) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::new(Status::Io, format!("{name} can not be read: {error}"))),
        };
        Self::parse(name, &text).map(Some)
    }

    pub(super) fn parse(name: &'static str, text: &str) -> Result<Self> {
        match Json::parse(text) {
            Ok(json @ Json::Object(_)) => Ok(Self { name, json }),
            Ok(_) => Err(wrong(name, "expected an object")),
            Err(error) => Err(wrong(name, error.message())),
        }
    }

    /// The value at a path of keys; `None` if it is not there, or null.
    pub(super) fn at(&self, path: &[&str]) -> Option<Found<'_>> {
        let mut json = &self.json;
        for key in path {
            let Json::Object(members) = json else { return None };
            // Of two of the same name Python takes the last.
            json = &members.iter().rev().find(|(name, _)| name == key)?.1;
        }
        (*json != Json::Null).then(|| Found { document: self, field: Field::new(path.join("."), json), json })
    }

    /// The value of the first of these keys that has one: at the top, or in the part of a text model.
    pub(super) fn any_of(&self, keys: &[&str]) -> Option<Found<'_>> {
        keys.iter().find_map(|&key| self.at(&[key]).or_else(|| self.at(&["text_config", key])))
    }
}

impl<'a> Found<'a> {
    /// What error messages call it.
    pub(super) fn place(&self) -> String {
        format!("`{}` of {}", self.field.place(), self.document.name)
    }

    pub(super) fn json(&self) -> &'a Json {
        self.json
    }

    pub(super) fn whole(&self, range: RangeInclusive<u32>) -> Result<u32> {
        self.field.whole(range).map_err(|error| self.error(&error))
    }

    pub(super) fn real(&self, range: RangeInclusive<f64>) -> Result<f64> {
        self.field.real(range).map_err(|error| self.error(&error))
    }

    pub(super) fn flag(&self) -> Result<bool> {
        self.field.flag().map_err(|error| self.error(&error))
    }

    pub(super) fn text(&self) -> Result<&'a str> {
        self.field.text().map_err(|error| self.error(&error))
    }

    /// The values of a list.
    pub(super) fn list(&self) -> Option<Vec<Self>> {
        let Json::List(list) = self.json else { return None };
        let fields = self.field.maybe_list()?;
        Some(list.iter().zip(fields).map(|(json, field)| Self { document: self.document, field, json }).collect())
    }

    pub(super) fn expected(&self, what: &str) -> Error {
        self.error(&self.field.expected(what))
    }

    fn error(&self, error: &Error) -> Error {
        let place = error.argument().unwrap_or_default();
        wrong(self.document.name, format!("`{place}`: {}", error.message()))
    }
}

/// An error of a file.
pub(super) fn wrong(name: &str, message: impl std::fmt::Display) -> Error {
    Error::new(Status::Model, format!("{name}: {message}"))
}
