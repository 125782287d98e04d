//! The id of a request, which its log lines and its response have.

use axum::http::{HeaderMap, HeaderValue};

use super::ID;
use crate::unique::unique;

/// The longest id that is taken over from a client.
const LONGEST: usize = 128;

/// The id of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestId(String);

impl RequestId {
    /// The client's own, if it can stand in a log; otherwise a new one.
    pub fn of(headers: &HeaderMap) -> Self {
        let own = headers.get(ID).and_then(|value| value.to_str().ok());
        let is_plain = |id: &&str| !id.is_empty() && id.len() <= LONGEST && id.bytes().all(|b| b.is_ascii_graphic());
        own.filter(is_plain).map_or_else(|| Self(format!("req-{}", unique())), |id| Self(id.to_owned()))
    }

    /// As a text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As a header.
    pub fn header(&self) -> HeaderValue {
        HeaderValue::from_str(&self.0).unwrap_or(HeaderValue::from_static("req"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_the_client_is_kept_if_a_log_can_have_it() {
        let of = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(ID, HeaderValue::from_bytes(value).unwrap());
            RequestId::of(&headers).0
        };
        assert_eq!(of(b"abc-1"), "abc-1");
        for bad in [&b""[..], b"a b", b"a\xffb", &[b'a'; 129]] {
            assert!(of(bad).starts_with("req-"));
        }
        assert_ne!(RequestId::of(&HeaderMap::new()), RequestId::of(&HeaderMap::new()));
    }
}
