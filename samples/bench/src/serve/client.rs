//! A client that does no more than HTTP/1 needs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use pagoda::Result;

use super::process::{Server, failed, unexpected};

/// A connection that is used for one request after the other.
pub struct Client {
    reader: BufReader<TcpStream>,
}

impl Client {
    /// Of a server.
    pub fn new(server: &Server) -> Result<Self> {
        Ok(Self { reader: BufReader::new(server.connect()?) })
    }

    /// Sends a request. The body of the response is to be read before the next one.
    pub fn send(&mut self, path: &str, body: &str) -> Result<()> {
        let head = format!("POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {}\r\n\r\n", body.len());
        self.reader.get_mut().write_all((head + body).as_bytes()).map_err(failed)
    }

    /// The body of a response that has its length.
    pub fn body(&mut self) -> Result<Vec<u8>> {
        let length = self.head()?.ok_or_else(|| unexpected("a stream"))?;
        let mut body = vec![0; length];
        self.reader.read_exact(&mut body).map_err(failed)?;
        Ok(body)
    }

    /// Begins to read a stream.
    pub fn begin_stream(&mut self) -> Result<()> {
        match self.head()? {
            None => Ok(()),
            Some(_) => Err(unexpected("a body with a length, where a stream was asked for")),
        }
    }

    /// The next part of a stream; `None` after the last one.
    pub fn part(&mut self) -> Result<Option<Vec<u8>>> {
        let size = self.line()?;
        let size = usize::from_str_radix(size.trim(), 16).map_err(|_| unexpected(&size))?;
        let mut part = vec![0; size + 2];
        self.reader.read_exact(&mut part).map_err(failed)?;
        part.truncate(size);
        Ok((size > 0).then_some(part))
    }

    /// Reads the head of a response. Returns its length, or `None` for a stream.
    fn head(&mut self) -> Result<Option<usize>> {
        let status = self.line()?;
        if !status.starts_with("HTTP/1.1 200") {
            return Err(unexpected(&status));
        }
        let mut length = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().ok();
            }
            if line.trim().is_empty() {
                return Ok(length);
            }
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line).map_err(failed)? {
            0 => Err(unexpected("the end of the connection")),
            _ => Ok(line),
        }
    }
}
