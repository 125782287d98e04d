//! Reads keys by feature from JSON. Errors name the place and what was found there.

use pagoda::json::Json;
use pagoda::{Error, Result};

use crate::fields::{once, whole, wholes};
use crate::words::{did_you_mean, list};

/// Keys, feature by feature.
pub type Columns = Vec<(String, Vec<i64>)>;

/// An object with something for each feature.
pub fn columns<T>(
    path: &str,
    value: &Json,
    known: &[String],
    read: impl Fn(&str, &Json) -> Result<T>,
) -> Result<Vec<(String, T)>> {
    let Json::Object(members) = value else {
        let names: Vec<&str> = known.iter().map(String::as_str).collect();
        return Err(Error::invalid(path, format!("{value} is not an object with {}", list(&names))));
    };
    let (mut seen, mut made) = (Vec::new(), Vec::new());
    for (name, value) in members {
        let inner = format!("{path}.{name}");
        once(&mut seen, name, &inner)?;
        exists(&inner, name, known)?;
        made.push((name.clone(), read(&inner, value)?));
    }
    Ok(made)
}

/// The same from a list with an object for each event or candidate.
pub fn from_rows(path: &str, rows: &[Json], known: &[String]) -> Result<Columns> {
    let mut made: Columns = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let keys = columns(&path, row, known, |path, value| whole(path, value))?;
        if at == 0 {
            made = keys.iter().map(|(name, _)| (name.clone(), Vec::with_capacity(rows.len()))).collect();
        }
        for (name, column) in &mut made {
            let key = keys.iter().find(|(other, _)| other == name);
            let key = key.ok_or_else(|| Error::invalid(&path, format!("`{name}` is missing, and the first has it")))?;
            column.push(key.1);
        }
        if let Some((name, _)) = keys.iter().find(|(name, _)| !made.iter().any(|(other, _)| other == name)) {
            return Err(Error::invalid(
                path,
                format!("has `{name}`, and the first does not: give it to all or to none"),
            ));
        }
    }
    Ok(made)
}

/// A list of keys.
pub fn numbers(path: &str, value: &Json) -> Result<Vec<i64>> {
    wholes(path, value, "whole numbers")
}

fn exists(path: &str, name: &str, known: &[String]) -> Result<()> {
    if known.iter().any(|other| other == name) {
        return Ok(());
    }
    let words: Vec<&str> = known.iter().map(String::as_str).collect();
    Err(Error::invalid(path, format!("no such feature here{}", did_you_mean(name, &words))))
}

/// Every feature must be present.
pub fn complete<T>(path: &str, made: &[(String, T)], known: &[String]) -> Result<()> {
    match known.iter().find(|name| !made.iter().any(|(other, _)| &other == name)) {
        Some(name) => Err(Error::invalid(format!("{path}.{name}"), "missing: the model has this feature")),
        None => Ok(()),
    }
}

/// All columns must have the same length.
pub fn same_length<'a>(path: &str, mut columns: impl Iterator<Item = (&'a str, usize)>) -> Result<()> {
    let Some((first, length)) = columns.next() else { return Ok(()) };
    match columns.find(|(_, other)| *other != length) {
        Some((name, other)) => {
            Err(Error::invalid(format!("{path}.{name}"), format!("has {other} entries, and `{first}` has {length}")))
        }
        None => Ok(()),
    }
}
