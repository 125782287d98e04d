//! Cross-origin requests of browsers: from no origin, unless the configuration names it.

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN, VARY,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;

/// The origins that may ask.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    named: Vec<String>,
    any: bool,
}

impl Origins {
    /// Those of a list such as `https://app.example`; `*` stands for all.
    pub fn new(named: Vec<String>) -> Self {
        Self { any: named.iter().any(|origin| origin == "*"), named }
    }

    /// The origin of a request, if it may ask.
    pub fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        let is_named = || origin.to_str().is_ok_and(|origin| self.named.iter().any(|named| named == origin));
        (self.any || is_named()).then(|| origin.clone())
    }
}

/// Whether a browser asks what it may send.
pub fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(ORIGIN) && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to that question.
pub fn preflight(origin: &HeaderValue) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(
        ACCESS_CONTROL_ALLOW_HEADERS,
        HeaderValue::from_static("authorization, content-type, inference-header-content-length, x-request-id"),
    );
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    allow(headers, origin);
    response
}

/// Lets the browser give the response to a page of this origin.
pub fn allow(headers: &mut HeaderMap, origin: &HeaderValue) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    headers.append(VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_origins_may_ask() {
        let allowed = |named: &[&str], origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            origin.map(|origin| headers.insert(ORIGIN, HeaderValue::from_static(origin)));
            Origins::new(named.iter().map(|&name| name.to_owned()).collect()).allowed(&headers).is_some()
        };
        assert!(allowed(&["https://a"], Some("https://a")) && allowed(&["*"], Some("https://b")));
        assert!(!allowed(&[], Some("https://a")) && !allowed(&["https://a"], Some("https://a.b")));
        assert!(!allowed(&["*"], None));
    }
}
