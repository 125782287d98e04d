//! The web page at `/`: what is served and how it does, a chat, a ranking. Its files are inside of the binary.

mod history;
mod status;

use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::response::Response;

pub use history::{History, watch};
pub use status::status;

use crate::reply;

/// The files of the page. They tell nothing about what is served, and need no key.
pub const PATHS: [&str; 6] = ["/", "/page/style.css", "/page/page.js", "/page/api", "/page/api.js", "/v1/openapi.json"];

/// The page asks this server alone, whatever is in an answer that it shows.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'";

/// `/`.
pub async fn index() -> Response {
    file("text/html; charset=utf-8", include_str!("files/index.html"))
}

/// `/page/style.css`.
pub async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("files/style.css"))
}

/// `/page/page.js`.
pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("files/page.js"))
}

/// `/page/api`: what `/v1/openapi.json` says, for people.
pub async fn api() -> Response {
    file("text/html; charset=utf-8", include_str!("files/api.html"))
}

/// `/page/api.js`.
pub async fn api_script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("files/api.js"))
}

/// `/v1/openapi.json`: the paths, and what they take and give. It is the same whatever is served.
pub async fn openapi() -> Response {
    let text = include_str!("files/openapi.json").replacen("VERSION", env!("CARGO_PKG_VERSION"), 1);
    reply::of(StatusCode::OK, "application/json", text)
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    let mut response = reply::of(StatusCode::OK, content_type, text);
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
