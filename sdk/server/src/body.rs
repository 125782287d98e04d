//! The body of a request, within its limits.

use axum::extract::Request;
use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::config::Limits;
use crate::failure::Failure;

/// Reads the body.
pub async fn read(request: Request, limits: &Limits) -> Result<Bytes, Failure> {
    let most = usize::try_from(limits.body).unwrap_or(usize::MAX);
    let collected = Limited::new(request.into_body(), most).collect();
    match tokio::time::timeout(limits.body_timeout, collected).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(limits.body)),
        Ok(Err(error)) => Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "invalid_body",
            format!("the body of the request can not be read: {error}"),
        )),
        Err(_) => Err(Failure::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_timeout",
            format!("the body of the request did not come within {} s", limits.body_timeout.as_secs_f64()),
        )),
    }
}

/// Reads a body that has to be text.
pub async fn read_text(request: Request, limits: &Limits) -> Result<String, Failure> {
    let bytes = read(request, limits).await?;
    String::from_utf8(bytes.into()).map_err(|error| {
        let message = format!("the body of the request is not UTF-8: {}", error.utf8_error());
        Failure::new(StatusCode::BAD_REQUEST, "invalid_body", message)
    })
}

fn too_large(most: u64) -> Failure {
    let message = format!("the body of the request has more than the {most} bytes that this server takes");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}
