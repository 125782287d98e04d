//! What templates expect of Python: how it prints values, methods of its types, and the functions that transformers adds.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::source::{ITERATE, SLICE};

/// How deep values that are printed may be nested. JSON that is read has up to 128 levels.
const MAX_DEPTH: usize = 200;

/// Adds the functions, filters, tests and methods.
pub(super) fn environment(mut environment: Environment<'static>) -> Environment<'static> {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|output, _, value| match value.as_str() {
        Some(text) => output.write_str(text).map_err(Error::from),
        None => output.write_str(&str(value)?).map_err(Error::from),
    });
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(str(message)?)))
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| str(value));
    environment.add_filter("trim", |value: &Value, characters: Option<&str>| -> Result<String, Error> {
        let text = str(value)?;
        Ok(match characters {
            Some(characters) => text.trim_matches(|character| characters.contains(character)).to_owned(),
            None => strip(&text).to_owned(),
        })
    });
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("indent", indent);
    environment.add_filter(ITERATE, |value: &Value| match value.kind() {
        kind @ (ValueKind::None | ValueKind::Bool | ValueKind::Number) => {
            Err(Error::new(ErrorKind::InvalidOperation, format!("a value that is {kind} can not be iterated")))
        }
        ValueKind::String => Ok(value.as_str().unwrap_or_default().chars().map(Value::from).collect()),
        _ => Ok(value.clone()),
    });
    // Python: whatever has a length and can be indexed, and whatever can be iterated.
    let sequence = [ValueKind::Undefined, ValueKind::String, ValueKind::Seq, ValueKind::Map, ValueKind::Iterable];
    environment.add_test("sequence", move |value: &Value| sequence.contains(&value.kind()));
    environment.add_test("iterable", move |value: &Value| sequence.contains(&value.kind()));
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment
}

/// The message with which a template raised an error itself.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = Some(error as &(dyn std::error::Error + 'static));
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// A value of a message, with the keys of objects in their order.
pub(super) fn from_json(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => {
            let whole = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
            whole.unwrap_or_else(|| Value::from(number.as_f64().unwrap_or(f64::NAN)))
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(list) => list.iter().map(from_json).collect(),
        serde_json::Value::Object(object) => {
            Value::from_pairs(object.iter().map(|(key, value)| (key.as_str(), from_json(value))))
        }
    }
}

/// Without the characters at both ends that Python takes for spaces.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

pub(super) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// `str(value)`.
fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut text = String::new();
            repr(value, 0, &mut text)?;
            Ok(text)
        }
    }
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let what = format!("a value is nested deeper than {MAX_DEPTH} levels");
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    Ok(())
}

/// `repr(value)`.
fn repr(value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => text.push_str(&float(value)),
        ValueKind::String => repr_of_text(value.as_str().unwrap_or_default(), text),
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.is_tuple();
            text.push(if is_tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                text.push_str(if count == 0 { "" } else { ", " });
                repr(&item, depth + 1, text)?;
                count += 1;
            }
            text.push_str(match is_tuple {
                true if count == 1 => ",)",
                true => ")",
                false => "]",
            });
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index == 0 { "" } else { ", " });
                repr(&key, depth + 1, text)?;
                text.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, text)?;
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_of_text(value: &str, text: &mut String) {
    let quote = if value.contains('\'') && !value.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in value.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            _ if character == quote => text.extend(['\\', quote]),
            _ if is_printable(character) => text.push(character),
            _ => {
                let code = character as u32;
                let _ = match code {
                    0..=0xff => write!(text, "\\x{code:02x}"),
                    0x100..=0xffff => write!(text, "\\u{code:04x}"),
                    _ => write!(text, "\\U{code:08x}"),
                };
            }
        }
    }
    text.push(quote);
}

fn is_printable(character: char) -> bool {
    // Behind a letter only what is not printable is escaped, and no combining mark; quotes and the backslash always are.
    let escaped: usize = ['a', character].iter().collect::<String>().escape_debug().count();
    escaped == 2 || matches!(character, '\'' | '"' | '\\')
}

/// `repr` of a float: the shortest digits, with an exponent from 1e16 on and below 1e-4.
fn float(value: &Value) -> String {
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent @ (..-4 | 16..)) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ if number.fract() == 0.0 => format!("{number:.1}"),
        _ => number.to_string(),
    }
}

/// The filter `default`, for undefined values and, with `boolean`, for all that count as false.
fn default(value: &Value, other: Option<Value>, boolean: Option<bool>, named: Kwargs) -> Result<Value, Error> {
    let other = other.or(named.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let boolean = boolean.or(named.get("boolean")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || (boolean && !value.is_true()) { other } else { value.clone() })
}

/// The filter `length`. Nothing that is undefined has any, and iterators are counted.
fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        kind => value
            .len()
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("a value that is {kind} has no length"))),
    }
}

/// The filter `indent`: all lines but the first, and empty ones, unless asked for.
fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = width.or(named.get("width")?).unwrap_or(Value::from(4));
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let space = match width.as_str() {
        Some(space) => space.to_owned(),
        None => " ".repeat(usize::try_from(width)?),
    };
    let value = str(value)? + "\n";
    let mut text = String::new();
    for (index, line) in lines(&value, false).into_iter().enumerate() {
        text.push_str(if index == 0 { "" } else { "\n" });
        if if index == 0 { first } else { blank || !line.is_empty() } {
            text.push_str(&space);
        }
        text.push_str(line);
    }
    Ok(text)
}

/// `splitlines` of Python, which knows more ends of lines than others.
fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ENDS) {
        let width =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(if keep_ends { &rest[..at + width] } else { &rest[..at] });
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// The filter `tojson` of transformers: `json.dumps` of Python.
fn to_json(value: &Value, positional: Rest<Value>, arguments: Kwargs) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > NAMES.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let argument = |index: usize| -> Result<Value, Error> {
        match positional.get(index) {
            Some(value) => Ok(value.clone()),
            None => Ok(arguments.get::<Option<Value>>(NAMES[index])?.unwrap_or_default()),
        }
    };
    let indent = argument(1)?;
    let indent = match indent.as_str() {
        Some(text) => Some(text.to_owned()),
        None if indent.is_none() || indent.is_undefined() => None,
        None => Some(" ".repeat(usize::try_from(i64::try_from(indent)?.max(0)).unwrap_or(0))),
    };
    let separators = argument(2)?;
    let (between, colon) = if separators.is_none() || separators.is_undefined() {
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned())
    } else {
        (str(&separators.get_item_by_index(0)?)?, str(&separators.get_item_by_index(1)?)?)
    };
    let mut json = Json {
        ascii: argument(0)?.is_true(),
        indent,
        between,
        colon,
        sort: argument(3)?.is_true(),
        text: String::new(),
    };
    arguments.assert_all_used()?;
    json.write(value, 0)?;
    Ok(json.text)
}

struct Json {
    ascii: bool,
    indent: Option<String>,
    between: String,
    colon: String,
    sort: bool,
    text: String,
}

impl Json {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&Self::number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.next(depth, std::mem::replace(&mut empty, false));
                    self.write(&item, depth + 1)?;
                }
                self.close(depth, empty, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.text.push('{');
                for (index, key) in keys.iter().enumerate() {
                    self.next(depth, index == 0);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                        ValueKind::None => self.string("null"),
                        ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
                        _ => self.string(&Self::number(key)),
                    }
                    self.text.push_str(&self.colon);
                    self.write(&value.get_item(key)?, depth + 1)?;
                }
                self.close(depth, keys.is_empty(), '}');
            }
            kind => {
                let what = format!("tojson: a value that is {kind} has no JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        }
        Ok(())
    }

    fn number(value: &Value) -> String {
        if value.is_integer() {
            return value.to_string();
        }
        match float(value).as_str() {
            "nan" => "NaN".to_owned(),
            "inf" => "Infinity".to_owned(),
            "-inf" => "-Infinity".to_owned(),
            number => number.to_owned(),
        }
    }

    fn next(&mut self, depth: usize, first: bool) {
        if !first {
            self.text.push_str(&self.between);
        }
        self.line(depth + 1);
    }

    fn close(&mut self, depth: usize, empty: bool, bracket: char) {
        if !empty {
            self.line(depth);
        }
        self.text.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            (0..depth).for_each(|_| self.text.push_str(indent));
        }
    }

    fn string(&mut self, value: &str) {
        self.text.push('"');
        for character in value.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(character),
                ' '..='~' => self.text.push(character),
                _ if self.ascii => self.escape(character),
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(self.text, "\\u{unit:04x}");
        }
    }
}

/// A method of a Python type.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if name == SLICE {
        return slice(value, arguments);
    }
    match value.as_str() {
        Some(text) => method_of_text(text, name, arguments)
            .unwrap_or_else(|| minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// The methods of `str` that the crate does not have, or not as Python does.
fn method_of_text(text: &str, name: &str, arguments: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" | "lstrip" | "rstrip" => from_args(arguments).map(|(characters,): (Option<&str>,)| {
            let cut = |character: char| match characters {
                Some(characters) => characters.contains(character),
                None => is_space(character),
            };
            Value::from(match name {
                "strip" => text.trim_matches(cut),
                "lstrip" => text.trim_start_matches(cut),
                _ => text.trim_end_matches(cut),
            })
        }),
        "split" | "rsplit" => split(text, name == "rsplit", arguments),
        "splitlines" => from_args(arguments).map(|(keep_ends,): (Option<bool>,)| {
            lines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect()
        }),
        "removeprefix" => {
            from_args(arguments).map(|(prefix,): (&str,)| Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            from_args(arguments).map(|(suffix,): (&str,)| Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => from_args(arguments).map(|(separator,): (&str,)| match text.split_once(separator) {
            Some((before, after)) => tuple([before, separator, after]),
            None => tuple([text, "", ""]),
        }),
        "rpartition" => from_args(arguments).map(|(separator,): (&str,)| match text.rsplit_once(separator) {
            Some((before, after)) => tuple([before, separator, after]),
            None => tuple(["", "", text]),
        }),
        _ => return None,
    })
}

fn tuple(texts: [&str; 3]) -> Value {
    Value::from(Tuple::from(texts.map(Value::from).to_vec()))
}

fn split(text: &str, from_the_right: bool, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = match separator {
        Some(separator) => separator,
        None => named.get::<Option<Value>>("sep")?.unwrap_or_default(),
    };
    let most = match most {
        Some(most) => most,
        None => named.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
    };
    named.assert_all_used()?;
    let pieces = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let parts: Vec<&str> = match separator.as_str() {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "split: empty separator")),
        Some(separator) if from_the_right => {
            let mut parts: Vec<&str> = text.rsplitn(pieces, separator).collect();
            parts.reverse();
            parts
        }
        Some(separator) => text.splitn(pieces, separator).collect(),
        None => split_at_spaces(text, pieces, from_the_right),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Words, at most `pieces` of them; the last one has the rest with its spaces.
fn split_at_spaces(text: &str, pieces: usize, from_the_right: bool) -> Vec<&str> {
    let mut rest = strip(text);
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let space = if from_the_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = space.filter(|_| parts.len() + 1 < pieces) else {
            parts.push(rest);
            break;
        };
        if from_the_right {
            let width = rest[at..].chars().next().map_or(1, char::len_utf8);
            parts.push(&rest[at + width..]);
            rest = strip_end(&rest[..at]);
        } else {
            parts.push(&rest[..at]);
            rest = rest[at..].trim_start_matches(is_space);
        }
    }
    if from_the_right {
        parts.reverse();
    }
    parts
}

/// `value[start:stop:step]`.
fn slice(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(arguments)?;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "slice step cannot be zero"));
    }
    match value.kind() {
        ValueKind::String => {
            let characters: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let taken = indices(characters.len(), start, stop, step).map(|index| characters[index]);
            Ok(Value::from(taken.collect::<String>()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let taken: Vec<Value> = indices(items.len(), start, stop, step).map(|index| items[index].clone()).collect();
            Ok(if value.is_tuple() { Value::from(Tuple::from(taken)) } else { Value::from(taken) })
        }
        ValueKind::Undefined => Err(Error::new(ErrorKind::UndefinedError, "an undefined value can not be sliced")),
        _ => Ok(Value::UNDEFINED),
    }
}

/// The indices that a slice of `length` items takes.
fn indices(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let length = length as i64;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |index: Option<i64>, default: i64| match index {
        None => default,
        Some(index) if index < 0 => index.saturating_add(length).max(low),
        Some(index) => index.min(high),
    };
    let start = place(start, if step > 0 { low } else { high });
    let stop = place(stop, if step > 0 { high } else { low });
    let next = move |index: &i64| index.checked_add(step);
    std::iter::successors(Some(start), next)
        .take_while(move |&index| if step > 0 { index < stop } else { index > stop })
        .map(|index| index as usize)
}
