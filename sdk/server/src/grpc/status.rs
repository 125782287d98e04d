//! The status of a call, in its own numbers.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use axum::http::{StatusCode, header};
use axum::response::Response;

use crate::failure::Failure;

/// What messages are.
pub const GRPC: &str = "application/grpc";
/// The number of the status.
pub const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The longest message that a client gets: headers have a limit.
const LONGEST: usize = 2048;

/// Whether a request is a call.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let rest = value.strip_prefix(GRPC);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['+', ';']))
}

/// The same response as a call has it, if it is a failure: its status is in a header, and that of HTTP is 200.
pub fn in_grpcs_shape(response: Response) -> Response {
    let Some(failure) = response.extensions().get::<Failure>() else { return response };
    let mut shaped = Response::new(Body::empty());
    let headers = shaped.headers_mut();
    for (name, value) in response.headers() {
        if !matches!(*name, CONTENT_TYPE | header::CONTENT_LENGTH | header::ALLOW | header::WWW_AUTHENTICATE) {
            headers.append(name, value.clone());
        }
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
    headers.insert(STATUS, HeaderValue::from(number(failure)));
    headers.insert(MESSAGE, escaped(&failure.message));
    shaped
}

/// The trailers of a call that has succeeded, or failed after its response began.
pub fn trailers(failure: Option<&Failure>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(STATUS, HeaderValue::from(failure.map_or(0, number)));
    if let Some(failure) = failure {
        trailers.insert(MESSAGE, escaped(&failure.message));
    }
    trailers
}

fn number(failure: &Failure) -> u16 {
    match failure.status {
        // No such method.
        StatusCode::NOT_FOUND if failure.code == "unknown_path" => 12,
        StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => 12,
        StatusCode::NOT_FOUND => 5,
        StatusCode::UNAUTHORIZED => 16,
        StatusCode::FORBIDDEN => 7,
        StatusCode::REQUEST_TIMEOUT => 4,
        StatusCode::PAYLOAD_TOO_LARGE | StatusCode::TOO_MANY_REQUESTS => 8,
        StatusCode::SERVICE_UNAVAILABLE => 14,
        status if status.is_server_error() => 13,
        _ => 3,
    }
}

/// Bytes that are no plain text are `%xx`.
fn escaped(message: &str) -> HeaderValue {
    let mut escaped = String::new();
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => escaped.push(byte.into()),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
        if escaped.len() >= LONGEST {
            break;
        }
    }
    HeaderValue::from_str(&escaped).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    #[test]
    fn failures_have_the_number_that_tells_what_to_do() {
        let of = |status: u16, code| {
            let failure = Failure::new(StatusCode::from_u16(status).unwrap(), code, "x");
            number(&failure)
        };
        let expected =
            [(400, 3), (401, 16), (403, 7), (404, 5), (405, 12), (408, 4), (413, 8), (429, 8), (500, 13), (503, 14)];
        for (status, number) in expected {
            assert_eq!(of(status, "x"), number, "{status}");
        }
        assert_eq!(of(404, "unknown_path"), 12);
    }

    #[test]
    fn a_failure_is_a_status_in_headers() {
        let response = in_grpcs_shape(Failure::busy("100 % of é").into_response());
        let header = |name: &str| response.headers()[name].to_str().unwrap();
        assert_eq!((response.status().as_u16(), header("grpc-status"), header("retry-after")), (200, "8", "1"));
        assert_eq!((header("grpc-message"), header("content-type")), ("100 %25 of %C3%A9", "application/grpc"));
        let long = in_grpcs_shape(Failure::busy("é".repeat(5000)).into_response());
        assert!(long.headers()["grpc-message"].len() <= LONGEST + 2);
    }

    #[test]
    fn calls_are_known_by_their_type() {
        let is = |value: &'static str| {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(value))]);
            is_grpc(&headers)
        };
        assert!(is("application/grpc") && is("application/grpc+proto") && is("application/grpc;x=y"));
        assert!(!is("application/grpc-web") && !is("application/json") && !is_grpc(&HeaderMap::new()));
    }
}
