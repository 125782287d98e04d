//! Reads the fields of a request from JSON. Errors name the place and what was found there.

use std::fmt::{self, Display, Formatter};

use pagoda::json::Json;
use pagoda::{Error, Result};
use serde_json::{Map, Number, Value};

/// The members of the object on a line.
pub fn object(text: &str, example: &str) -> Result<Vec<(String, Json)>> {
    let json: Json = serde_json::from_str(text).map_err(|error| {
        // The caller knows the number of the line.
        let what = error.to_string().replace(" at line 1 column ", " at column ");
        Error::invalid("request", format!("not JSON: {what}"))
    })?;
    match json {
        Json::Object(members) => Ok(members),
        json => Err(Error::invalid("request", format!("{json} is not an object such as {example}"))),
    }
}

/// Records a name. A repeated name is an error.
pub fn once<'a>(seen: &mut Vec<&'a str>, name: &'a str, path: &str) -> Result<()> {
    if seen.contains(&name) {
        return Err(Error::invalid(path, "is there twice"));
    }
    seen.push(name);
    Ok(())
}

/// The place of an item of a list. It becomes a text only if there is something wrong there: lists may have thousands of items.
pub struct At<'a>(pub &'a str, pub usize);

impl Display for At<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.0, self.1)
    }
}

fn wrong(path: impl Display, message: String) -> Error {
    Error::invalid(path.to_string(), message)
}

/// One number.
pub fn whole<T: TryFrom<i128> + Bounds>(path: impl Display, value: &Json) -> Result<T> {
    let number = if let Json::Whole(number) = value { T::try_from(*number).ok() } else { None };
    number.ok_or_else(|| wrong(path, format!("{value} is not a whole number from {} to {}", T::LEAST, T::MOST)))
}

/// A list of numbers.
pub fn wholes<T: TryFrom<i128> + Bounds>(path: &str, value: &Json, what: &str) -> Result<Vec<T>> {
    list(path, value, what)?.iter().enumerate().map(|(at, value)| whole(At(path, at), value)).collect()
}

/// The minimum and the maximum of a type.
pub trait Bounds {
    /// The minimum.
    const LEAST: i128;
    /// The maximum.
    const MOST: i128;
}

impl Bounds for u32 {
    const LEAST: i128 = 0;
    const MOST: i128 = Self::MAX as i128;
}

impl Bounds for u64 {
    const LEAST: i128 = 0;
    const MOST: i128 = Self::MAX as i128;
}

impl Bounds for i32 {
    const LEAST: i128 = Self::MIN as i128;
    const MOST: i128 = Self::MAX as i128;
}

impl Bounds for i64 {
    const LEAST: i128 = Self::MIN as i128;
    const MOST: i128 = Self::MAX as i128;
}

/// A number with or without a fraction.
pub fn real(path: impl Display, value: &Json) -> Result<f64> {
    match value {
        Json::Whole(number) => Ok(*number as f64),
        Json::Real(number) => Ok(*number),
        _ => Err(wrong(path, format!("{value} is not a number"))),
    }
}

/// `true` or `false`.
pub fn flag(path: impl Display, value: &Json) -> Result<bool> {
    match value {
        Json::Flag(flag) => Ok(*flag),
        _ => Err(wrong(path, format!("{value} is neither true nor false"))),
    }
}

/// A text.
pub fn text(path: impl Display, value: &Json) -> Result<String> {
    match value {
        Json::Text(text) => Ok(text.clone()),
        _ => Err(wrong(path, format!("{value} is not a text"))),
    }
}

/// A list, each of whose items `read` reads.
pub fn items<T>(path: &str, value: &Json, what: &str, read: impl Fn(&str, &Json) -> Result<T>) -> Result<Vec<T>> {
    list(path, value, what)?.iter().enumerate().map(|(at, value)| read(&format!("{path}[{at}]"), value)).collect()
}

fn list<'a>(path: &str, value: &'a Json, what: &str) -> Result<&'a [Json]> {
    match value {
        Json::List(list) => Ok(list),
        _ => Err(Error::invalid(path, format!("{value} is not a list of {what}"))),
    }
}

/// The same value for serde. A name that an object has twice is an error.
pub fn plain(path: &str, value: &Json) -> Result<Value> {
    Ok(match value {
        Json::Null => Value::Null,
        Json::Flag(flag) => Value::Bool(*flag),
        // JSON's own reader gives no other whole numbers than these.
        Json::Whole(number) => match (i64::try_from(*number), u64::try_from(*number)) {
            (Ok(number), _) => number.into(),
            (_, Ok(number)) => number.into(),
            _ => return Err(Error::invalid(path, format!("{number} is beyond 64 bits"))),
        },
        Json::Real(number) => Number::from_f64(*number).map_or(Value::Null, Value::Number),
        Json::Text(text) => Value::String(text.clone()),
        Json::List(_) => Value::Array(items(path, value, "values", plain)?),
        Json::Object(members) => {
            let (mut seen, mut object) = (Vec::new(), Map::new());
            for (name, value) in members {
                let inner = format!("{path}.{name}");
                once(&mut seen, name, &inner)?;
                object.insert(name.clone(), plain(&inner, value)?);
            }
            Value::Object(object)
        }
    })
}
