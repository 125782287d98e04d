//! Responses whose body is known.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use serde::Serialize;

/// A JSON object.
pub fn json(status: StatusCode, value: &impl Serialize) -> Response {
    // The server's own structs have no keys other than texts, which is all that could fail.
    let text = serde_json::to_vec(value).unwrap_or_else(|_| b"{}".to_vec());
    of(status, "application/json", text)
}

/// A body of a type.
pub fn of(status: StatusCode, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
