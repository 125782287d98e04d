//! Frames: a byte that says whether a message is compressed, its length in 4 bytes, and the message.

use axum::http::StatusCode;

use crate::failure::Failure;

/// The bytes before a message.
pub const HEAD: usize = 5;

/// The length of the message that a frame begins with; `None` if there is too little to know.
pub fn length(bytes: &[u8]) -> Result<Option<usize>, Failure> {
    let Some(([compressed, length @ ..], _)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    if *compressed != 0 {
        let message = "the message is compressed, which this server does not read: send it as it is";
        return Err(Failure::new(StatusCode::NOT_IMPLEMENTED, "compressed", message));
    }
    Ok(Some(u32::from_be_bytes(*length) as usize))
}

/// What comes before a message of a length. A message that has more bytes than 32 bits count is refused.
pub fn head(length: usize) -> Result<[u8; HEAD], Failure> {
    let length = u32::try_from(length).map_err(|_| {
        let message = format!("the response has {length} bytes, more than a message can have: ask for fewer outputs");
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "response_too_large", message)
    })?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([0, a, b, c, d])
}
