//! Where a request stands in a trace, by the header of W3C's Trace Context.

use axum::http::{HeaderMap, HeaderName};

use crate::unique::random;

const PARENT: HeaderName = HeaderName::from_static("traceparent");
/// The bit of the flags that says that the caller records the trace.
const SAMPLED: u8 = 1;

/// A span, by what names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The trace.
    pub trace: u128,
    /// The span.
    pub span: u64,
}

impl Context {
    /// One of a new trace.
    pub fn new() -> Self {
        Self { trace: u128::from(random()) << 64 | u128::from(random()), span: random() }
    }

    /// Another one of the same trace.
    pub fn child(self) -> Self {
        Self { span: random(), ..self }
    }

    /// The caller's, and whether that one is recorded. A header that is not as it should be counts for none, as the standard says.
    pub fn of_caller(headers: &HeaderMap) -> Option<(Self, bool)> {
        let value = headers.get(PARENT)?.to_str().ok()?;
        let mut parts = value.split('-');
        let mut next = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            let is_hex = part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
            u128::from_str_radix(part, 16).ok().filter(|_| is_hex)
        };
        let (version, trace, span, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        // Later versions may have more parts; the first has not.
        let is_known = version != 0xff && (version > 0 || parts.next().is_none());
        let context = Self { trace, span: span as u64 };
        (is_known && trace != 0 && span != 0).then_some((context, flags as u8 & SAMPLED != 0))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_header_of_the_caller_is_read() {
        let of = |value: &'static str| {
            Context::of_caller(&HeaderMap::from_iter([(PARENT, HeaderValue::from_static(value))]))
        };
        let context = Context { trace: 0x4bf92f3577b34da6a3ce929d0e0e4736, span: 0x00f067aa0ba902b7 };
        assert_eq!(of("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), Some((context, true)));
        assert_eq!(of("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02"), Some((context, false)));
        assert_eq!(of("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"), Some((context, true)));
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }
}
