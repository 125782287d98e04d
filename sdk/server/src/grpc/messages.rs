//! The messages of a call: one, or a stream of them.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use tokio::time::Instant;

use super::frame::{HEAD, length};
use super::status::is_grpc;
use crate::body;
use crate::config::Limits;
use crate::failure::Failure;

/// The most fields that a message may have at its top: an empty one has two bytes, and takes a hundred in memory.
const MOST_FIELDS: usize = 16 << 10;

/// Reads the only message of a call.
pub async fn read<M: Message + Default>(request: Request, limits: &Limits) -> Result<M, Failure> {
    check_type(&request)?;
    let mut body = body::read(request, limits).await?;
    match length(&body)? {
        Some(length) if length == body.len() - HEAD => decode(body.split_off(HEAD)),
        _ => Err(wrong(format!("{} bytes are not one message with its length before it", body.len()))),
    }
}

/// Reads a message.
pub fn decode<M: Message + Default>(bytes: Bytes) -> Result<M, Failure> {
    count_fields(&bytes)?;
    M::decode(bytes).map_err(|error| wrong(format!("not a message of this method: {error}")))
}

fn count_fields(mut bytes: &[u8]) -> Result<(), Failure> {
    let mut fields = 0;
    while bytes.has_remaining() {
        let skipped =
            decode_key(&mut bytes).and_then(|(tag, wire)| skip_field(wire, tag, &mut bytes, DecodeContext::default()));
        // What is wrong with it is said by reading it.
        if skipped.is_err() {
            break;
        }
        fields += 1;
        if fields > MOST_FIELDS {
            return Err(wrong(format!("a message of more than {MOST_FIELDS} fields")));
        }
    }
    Ok(())
}

/// The messages of a stream, one after the other.
pub struct Messages {
    body: Body,
    buffer: BytesMut,
    most: usize,
    timeout: Duration,
}

impl Messages {
    /// Those of a request.
    pub fn of(request: Request, limits: &Limits) -> Result<Self, Failure> {
        check_type(&request)?;
        let most = usize::try_from(limits.body).unwrap_or(usize::MAX);
        Ok(Self { body: request.into_body(), buffer: BytesMut::new(), most, timeout: limits.body_timeout })
    }

    /// The bytes of the next one; `None` after the last. Between two a client may take its time, inside of one it may not.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let mut deadline = None;
        loop {
            match length(&self.buffer)? {
                Some(length) if length > self.most => {
                    let message =
                        format!("a message of {length} bytes is more than the {} that this server takes", self.most);
                    return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
                }
                Some(length) if self.buffer.len() >= HEAD + length => {
                    self.buffer.advance(HEAD);
                    return Ok(Some(self.buffer.split_to(length).freeze()));
                }
                _ => {}
            }
            let frame = if self.buffer.is_empty() {
                self.body.frame().await
            } else {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
                tokio::time::timeout_at(deadline, self.body.frame()).await.map_err(|_| {
                    let message = format!("a message did not come within {} s", self.timeout.as_secs_f64());
                    Failure::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
                })?
            };
            match frame {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(wrong("the stream ends inside of a message".to_owned())),
                Some(Err(error)) => return Err(wrong(format!("the stream can not be read: {error}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

fn check_type(request: &Request) -> Result<(), Failure> {
    if is_grpc(request.headers()) {
        return Ok(());
    }
    let message = "this path takes calls of gRPC: send the content type application/grpc";
    Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_grpc", message))
}

fn wrong(message: String) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, "invalid_body", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(PartialEq, Message)]
    struct Pair {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(int32, repeated, tag = "2")]
        numbers: Vec<i32>,
    }

    #[test]
    fn a_message_of_too_many_fields_takes_no_memory() {
        let pair = Pair { name: "a".into(), numbers: vec![1, 2] };
        assert_eq!(decode::<Pair>(pair.encode_to_vec().into()).unwrap(), pair);
        let many = Bytes::from([0x10, 0x01].repeat(MOST_FIELDS + 1));
        assert!(decode::<Pair>(many).unwrap_err().message.starts_with("a message of more than"));
        let cut = Bytes::from_static(&[0x0a, 0x05, b'a']);
        assert!(decode::<Pair>(cut).unwrap_err().message.starts_with("not a message of this method: "));
    }
}
