//! Cross-origin requests of browsers: from no origin, unless the configuration names it.
//!
//! Without CORS a page of another origin can read no answer, but it can send a request, such as one that unloads a model: browsers
//! ask before only for some of them. So a request that changes or computes something is refused if a browser says that it comes from
//! elsewhere.

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderName,
    HeaderValue, ORIGIN, VARY,
};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use crate::failure::Failure;

/// What browsers say about where a request comes from, as scripts can not.
const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

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

/// Whether a browser sends a request that does something from a page of another origin.
pub fn is_foreign(method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
    if method.is_safe() {
        return false;
    }
    match (headers.get(SITE), headers.get(ORIGIN)) {
        (Some(site), _) => site == "cross-site" || site == "same-site",
        // Older browsers, and plain HTTP to another machine.
        (None, Some(origin)) => {
            let host = headers.get(HOST).map(HeaderValue::as_bytes);
            let host = host.or(uri.authority().map(|authority| authority.as_str().as_bytes()));
            let origin = origin.as_bytes();
            host.is_none_or(|host| origin.strip_suffix(host).is_none_or(|scheme| !scheme.ends_with(b"://")))
        }
        (None, None) => false,
    }
}

/// The answer to such a request.
pub fn refused() -> Response {
    let message = "a page of another origin asks: a server takes requests of those that `cors` names";
    Failure::new(StatusCode::FORBIDDEN, "origin_not_allowed", message).into_response()
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

    #[test]
    fn requests_that_do_something_come_from_no_other_page() {
        let foreign = |method: Method, fields: &[(&'static str, &'static str)]| {
            let header = |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
            is_foreign(&method, &Uri::from_static("/v1/rank"), &fields.iter().map(header).collect())
        };
        for (fields, expected) in [
            (&[("host", "a:80")][..], false),
            (&[("host", "a:80"), ("origin", "http://a:80")], false),
            (&[("host", "a:80"), ("origin", "https://a:80")], false),
            (&[("host", "a:80"), ("origin", "http://b:80")], true),
            (&[("host", "a:80"), ("origin", "http://ba:80")], true),
            (&[("host", "a:80"), ("origin", "null")], true),
            (&[("host", "a:80"), ("origin", "https://public"), ("sec-fetch-site", "same-origin")], false),
            (&[("host", "a:80"), ("sec-fetch-site", "none")], false),
            (&[("host", "a:80"), ("sec-fetch-site", "cross-site")], true),
            (&[("host", "a:80"), ("origin", "http://a:81"), ("sec-fetch-site", "same-site")], true),
        ] {
            assert_eq!(foreign(Method::POST, fields), expected, "{fields:?}");
            assert!(!foreign(Method::GET, fields), "{fields:?}");
        }
    }
}
