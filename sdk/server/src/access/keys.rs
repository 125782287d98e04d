//! API keys: who may ask.

use std::hint::black_box;
use std::path::Path;

use axum::http::header::{AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use pagoda::{Error, Result, Status};
use ring::digest::{SHA256, digest};

use super::rates::Caller;
use crate::failure::Failure;

const SCHEME: &str = "bearer ";

/// The keys of a server. It has their hashes only, so that comparing takes the same time whatever is sent.
#[derive(Clone)]
pub struct Keys {
    hashes: Vec<[u8; 32]>,
}

impl Keys {
    /// Reads a file with a key on each line. Empty lines and those that begin with `#` are skipped.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            Error::new(status, format!("{} can not be read: {error}", path.display())).about("keys_file")
        })?;
        Self::new("keys_file", &path.display().to_string(), text.lines())
    }

    /// Reads a variable of the environment with keys that commas part.
    pub fn from_variable(name: &str) -> Result<Self> {
        let text = std::env::var(name).map_err(|error| {
            let what = if error == std::env::VarError::NotPresent { "is not set" } else { "is not UTF-8" };
            Error::invalid("keys_variable", format!("the variable {name} {what}"))
        })?;
        Self::new("keys_variable", &format!("the variable {name}"), text.split(','))
    }

    /// Errors name the source, and never a key.
    fn new<'a>(argument: &str, source: &str, keys: impl Iterator<Item = &'a str>) -> Result<Self> {
        let keys: Vec<&str> = keys.map(str::trim).filter(|key| !key.is_empty() && !key.starts_with('#')).collect();
        if keys.is_empty() {
            let message = format!("{source} has no key: all requests would be refused");
            return Err(Error::invalid(argument, message));
        }
        if let Some(at) = keys.iter().position(|key| !key.bytes().all(|byte| byte.is_ascii_graphic())) {
            let message = format!("key {} of {source} has characters that no header can have", at + 1);
            return Err(Error::invalid(argument, message));
        }
        if let Some(at) = (1..keys.len()).find(|&at| keys[..at].contains(&keys[at])) {
            return Err(Error::invalid(argument, format!("key {} of {source} is there twice", at + 1)));
        }
        Ok(Self { hashes: keys.iter().map(|key| hash(key.as_bytes())).collect() })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Which of the keys a request has; `None`: none of them.
    pub fn admit(&self, headers: &HeaderMap) -> Option<Caller> {
        let value = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
        let key = match value.split_at_checked(SCHEME.len()) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) => key.trim_ascii(),
            _ => b"",
        };
        let given = hash(key);
        // No early end: the time tells nothing about which key is near.
        let all = self.hashes.iter().enumerate();
        let found = all.fold(0, |found, (at, hash)| black_box(found | ((at + 1) * usize::from(equal(hash, &given)))));
        found.checked_sub(1).map(Caller::with_key)
    }
}

/// The answer to a request without a key: nothing about what is served.
pub fn unauthorized() -> Response {
    let message = "a key is needed: send it in the header `Authorization: Bearer KEY`";
    let mut response = Failure::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn hash(key: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, key).as_ref());
    hash
}

fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    black_box(a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<Keys> {
        Keys::new("keys_file", "keys", text.lines())
    }

    #[test]
    fn a_request_needs_one_of_the_keys() {
        let keys = keys("# ours\nsk-one\n\n  sk-two  \n").unwrap();
        let admit = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            value.map(|value| headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
            keys.admit(&headers).map(|caller| caller.key)
        };
        assert_eq!((admit(Some("Bearer sk-one")), admit(Some("bearer  sk-two"))), (Some(0), Some(1)));
        for refused in [None, Some(""), Some("Bearer"), Some("Bearer "), Some("sk-one"), Some("Basic sk-one")] {
            assert_eq!(admit(refused), None, "{refused:?}");
        }
        for refused in ["Bearer sk-on", "Bearer sk-one2", "Bearer # ours"] {
            assert_eq!(admit(Some(refused)), None, "{refused}");
        }
    }

    #[test]
    fn errors_name_no_key() {
        let error = |text: &str| keys(text).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error("\n#\n"), "keys_file: keys has no key: all requests would be refused");
        assert_eq!(error("a\nb\na"), "keys_file: key 3 of keys is there twice");
        assert_eq!(error("good\nb d"), "keys_file: key 2 of keys has characters that no header can have");
    }
}
