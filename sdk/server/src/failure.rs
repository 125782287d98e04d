//! What went wrong with a request: the status of HTTP, and what OpenAI's clients read.

use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use pagoda::{Error, Status};
use serde::Serialize;
use serde_json::json;

use crate::reply;

/// Seconds after which a request that found a full queue may come again.
const AGAIN_AFTER: u32 = 1;

/// The error that a client gets.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The status of HTTP.
    pub status: StatusCode,
    /// What was wrong, with which value, and what to do.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// A word that programs can compare.
    pub code: &'static str,
    /// Seconds after which the same request may succeed.
    pub retry_after: Option<u32>,
}

/// In OpenAI's shape.
#[derive(Serialize)]
pub struct ErrorObject<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl Failure {
    /// A failure of this status.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after: None }
    }

    /// No model of this name.
    pub fn no_model(name: &str, names: &[&str]) -> Self {
        let near = pagoda_requests::words::did_you_mean(name, names);
        let message = format!("no model is named {name:?}{near}");
        Self { param: Some("model".into()), ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message) }
    }

    /// Too much at once; the client may come again.
    pub fn busy(message: impl Into<String>) -> Self {
        let failure = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
        Self { retry_after: Some(AGAIN_AFTER), ..failure }
    }

    /// As OpenAI's clients read it.
    pub fn object(&self) -> ErrorObject<'_> {
        let r#type = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (message, param) = (self.message.as_str(), self.param.as_deref());
        ErrorObject { error: Inner { message, r#type, param, code: self.code } }
    }
}

/// The same response in KServe's shape, if it is a failure.
pub fn in_kserves_shape(response: Response) -> Response {
    let Some(failure) = response.extensions().get::<Failure>() else { return response };
    let mut shaped = reply::json(failure.status, &json!({"error": failure.message}));
    for (name, value) in response.headers().iter().filter(|(name, _)| *name != CONTENT_TYPE) {
        shaped.headers_mut().append(name, value.clone());
    }
    shaped
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (status, code) = match error.status() {
            Status::InvalidArgument => (StatusCode::BAD_REQUEST, "invalid_value"),
            Status::Unsupported => (StatusCode::BAD_REQUEST, "unsupported_value"),
            // About an argument: it can never fit. Otherwise: it does not fit now.
            Status::Capacity if error.argument().is_some() => (StatusCode::BAD_REQUEST, "too_large"),
            Status::Capacity => return Self::busy(error.to_string()),
            // About an argument: the request names something that the model does not have.
            Status::NotFound if error.argument().is_some() => (StatusCode::BAD_REQUEST, "invalid_value"),
            Status::NotFound => (StatusCode::NOT_FOUND, "not_found"),
            Status::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Status::Cancelled => (StatusCode::SERVICE_UNAVAILABLE, "cancelled"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        let retry_after = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(AGAIN_AFTER);
        let param = error.argument().filter(|_| status == StatusCode::BAD_REQUEST).map(str::to_owned);
        Self { status, message: error.to_string(), param, code, retry_after }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = reply::json(self.status, &self.object());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        // Another protocol says it in its own shape, see `in_kserves_shape`.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_status_that_tells_what_to_do() {
        let of = |error: Error| {
            let failure = Failure::from(error);
            (failure.status.as_u16(), failure.code, failure.param, failure.retry_after)
        };
        assert_eq!(of(Error::invalid("n", "0")), (400, "invalid_value", Some("n".into()), None));
        assert_eq!(of(Error::new(Status::Capacity, "full")), (429, "rate_limit_exceeded", None, Some(1)));
        let never = Error::new(Status::Capacity, "large").about("max_new_tokens");
        assert_eq!(of(never), (400, "too_large", Some("max_new_tokens".into()), None));
        assert_eq!(of(Error::new(Status::Runtime, "broken")), (500, "internal_error", None, None));
        assert_eq!(of(Error::new(Status::Busy, "later")), (503, "busy", None, Some(1)));
    }

    #[test]
    fn clients_of_openai_can_read_them() {
        let failure = Failure::no_model("smal", &["smol", "net"]);
        let text = serde_json::to_string(&failure.object()).unwrap();
        let expected = concat!(
            r#"{"error":{"message":"no model is named \"smal\"; did you mean `smol`?","type":"not_found_error","#,
            r#""param":"model","code":"model_not_found"}}"#
        );
        assert_eq!(text, expected);
    }
}
