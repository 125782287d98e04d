//! A client of gRPC that does no more than one call after the other needs: HTTP/2 with a header block of literals, and one stream.

use std::io::{Read, Write};
use std::net::TcpStream;

use pagoda::Result;

use super::process::{Server, failed, unexpected};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// The bytes of a frame that the server takes.
const FRAME: usize = 2 << 20;
/// What a connection may send at first, by the protocol.
const WINDOW: i64 = 65_535;
/// What the server may send: all that it has.
const LARGEST_WINDOW: u32 = (1 << 31) - 1;

/// A connection.
pub struct Calls {
    stream: TcpStream,
    headers: Vec<u8>,
    /// The bytes that may be sent.
    window: i64,
    next: u32,
    buffer: Vec<u8>,
}

impl Calls {
    /// Of a method of a server.
    pub fn new(server: &Server, path: &str) -> Result<Self> {
        let mut headers = Vec::new();
        let pairs = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "bench"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        for (name, value) in pairs {
            // A literal that no table keeps; lengths below 127 are one byte.
            headers.push(0);
            for text in [name, value] {
                headers.push(text.len() as u8);
                headers.extend_from_slice(text.as_bytes());
            }
        }
        let mut calls = Self { stream: server.connect()?, headers, window: WINDOW, next: 1, buffer: Vec::new() };
        let mut begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // Initial window and largest frame.
        let mut settings = [0, 4].to_vec();
        settings.extend(LARGEST_WINDOW.to_be_bytes());
        settings.extend([0, 5]);
        settings.extend((FRAME as u32).to_be_bytes());
        begin.extend(head(settings.len(), SETTINGS, 0, 0));
        begin.extend(settings);
        begin.extend(head(4, WINDOW_UPDATE, 0, 0));
        begin.extend((LARGEST_WINDOW - WINDOW as u32).to_be_bytes());
        calls.stream.write_all(&begin).map_err(failed)?;
        Ok(calls)
    }

    /// Sends a message in its frame, and puts the answer in its frame into `answer`.
    pub fn call(&mut self, message: &[u8], answer: &mut Vec<u8>) -> Result<()> {
        answer.clear();
        let stream = self.next;
        self.next += 2;
        while self.window < message.len() as i64 {
            self.frame(answer)?;
        }
        self.window -= message.len() as i64;
        let mut begin = head(self.headers.len(), HEADERS, END_HEADERS, stream).to_vec();
        begin.extend_from_slice(&self.headers);
        let chunks = message.chunks(FRAME);
        let last = chunks.len() - 1;
        for (at, chunk) in chunks.enumerate() {
            begin.extend(head(chunk.len(), DATA, if at == last { END_STREAM } else { 0 }, stream));
            self.stream.write_all(&begin).map_err(failed)?;
            self.stream.write_all(chunk).map_err(failed)?;
            begin.clear();
        }
        while !self.frame(answer)? {}
        Ok(())
    }

    /// Reads a frame. Returns whether the answer has ended.
    fn frame(&mut self, answer: &mut Vec<u8>) -> Result<bool> {
        let mut head_bytes = [0; 9];
        self.stream.read_exact(&mut head_bytes).map_err(failed)?;
        let [a, b, c, kind, flags, ..] = head_bytes;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        if kind == DATA {
            let before = answer.len();
            answer.resize(before + length, 0);
            self.stream.read_exact(&mut answer[before..]).map_err(failed)?;
            // The server may send as much again.
            let mut update = head(4, WINDOW_UPDATE, 0, 0).to_vec();
            update.extend((length as u32).to_be_bytes());
            if length > 0 {
                self.stream.write_all(&update).map_err(failed)?;
            }
            return Ok(flags & END_STREAM != 0);
        }
        self.buffer.resize(length, 0);
        self.stream.read_exact(&mut self.buffer).map_err(failed)?;
        match kind {
            HEADERS => return Ok(flags & END_STREAM != 0),
            SETTINGS if flags & ACK == 0 => self.stream.write_all(&head(0, SETTINGS, ACK, 0)).map_err(failed)?,
            PING if flags & ACK == 0 => {
                let mut answer = head(length, PING, ACK, 0).to_vec();
                answer.extend_from_slice(&self.buffer);
                self.stream.write_all(&answer).map_err(failed)?;
            }
            // Of the connection; a stream's own is larger than a message.
            WINDOW_UPDATE if head_bytes[5..] == [0; 4] => {
                let more = self.buffer.first_chunk::<4>().ok_or_else(|| unexpected("a short frame"))?;
                self.window += i64::from(u32::from_be_bytes(*more));
            }
            3 | 7 => return Err(unexpected("the end of the stream or the connection")),
            _ => {}
        }
        Ok(false)
    }
}

fn head(length: usize, kind: u8, flags: u8, stream: u32) -> [u8; 9] {
    let [_, a, b, c] = (length as u32).to_be_bytes();
    let [d, e, f, g] = stream.to_be_bytes();
    [a, b, c, kind, flags, d, e, f, g]
}
