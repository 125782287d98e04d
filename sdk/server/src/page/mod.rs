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
pub const PATHS: [&str; 3] = ["/", "/page/style.css", "/page/page.js"];

/// The page asks this server alone, whatever is in an answer that it shows.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'";

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

fn file(content_type: &'static str, text: &'static str) -> Response {
    let mut response = reply::of(StatusCode::OK, content_type, text);
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
