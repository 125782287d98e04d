//! The source of requests: lines of a file or of standard input.

use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::path::Path;

use pagoda::{Error, Result, Status};

use crate::progress::Progress;
use crate::words::bytes;

/// The maximum bytes of a line. A line is in memory as a whole, and its parsed form can take 16 times as much. A
/// history of a million events and the longest prompt are shorter. Without a limit, input without a newline would use up all memory.
const LONGEST_LINE: usize = 64 << 20;

/// The byte order mark, which programs on Windows write.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

pub struct Source {
    name: String,
    from: Box<dyn BufRead + Send>,
    /// The size in bytes, if known.
    length: Option<u64>,
    /// Whether they come from a terminal.
    typed: bool,
    /// Bytes that were read.
    pub read: u64,
    /// The number of the last line, from 1.
    pub number: u64,
}

/// The result of reading a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Next {
    Line,
    /// It was skipped.
    TooLong,
    End,
}

impl Source {
    /// The file at `path`; `-` is standard input.
    pub fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            let typed = std::io::stdin().is_terminal();
            // Not its lock, which could not move to another thread.
            let (name, from) = ("standard input".to_owned(), Box::new(BufReader::new(std::io::stdin())));
            return Ok(Self { name, from, length: None, typed, read: 0, number: 0 });
        }
        let name = path.display().to_string();
        let fail = |error: std::io::Error| {
            let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            Error::new(status, format!("{name} can not be read: {error}")).about("--requests")
        };
        let file = File::open(path).map_err(fail)?;
        let about = file.metadata().map_err(fail)?;
        let length = about.is_file().then_some(about.len());
        Ok(Self { name, from: Box::new(BufReader::new(file)), length, typed: false, read: 0, number: 0 })
    }

    /// Reads a line.
    pub fn next(&mut self, line: &mut Vec<u8>) -> Result<Next> {
        let (next, read) = next(&mut *self.from, line, LONGEST_LINE).map_err(|error| {
            Error::new(Status::Io, format!("{} can not be read after line {}: {error}", self.name, self.number))
        })?;
        self.read += read as u64;
        self.number += 1;
        if self.number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(next)
    }

    /// The progress of what is done with the requests. None if they are typed on a terminal.
    pub fn progress(&self, doing: &str) -> Option<Progress> {
        match self.length {
            Some(length) => Some(Progress::bytes(doing, length)),
            None => (!self.typed).then(|| Progress::spinner(doing)),
        }
    }
}

/// The error of a line that is too long, with what to do instead.
pub fn too_long(advice: &str) -> Error {
    let most = bytes(LONGEST_LINE as u64);
    Error::invalid("request", format!("longer than {most}, the most that a line may have: {advice}"))
}

/// Reads a line of up to `longest` bytes and a newline, or skips a longer one. Returns also the number of bytes.
fn next(from: &mut dyn BufRead, line: &mut Vec<u8>, longest: usize) -> std::io::Result<(Next, usize)> {
    line.clear();
    let read = (&mut *from).take(longest as u64 + 1).read_until(b'\n', line)?;
    if read <= longest || line.ends_with(b"\n") {
        return Ok((if read == 0 { Next::End } else { Next::Line }, read));
    }
    // Freed, not only cleared: the next lines are usually short.
    *line = Vec::new();
    Ok((Next::TooLong, read + from.skip_until(b'\n')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a text with lines of at most 4 bytes, through a buffer of `size`.
    fn lines(text: &[u8], size: usize) -> Vec<(Next, Vec<u8>, usize)> {
        let (mut from, mut line, mut lines) = (BufReader::with_capacity(size, text), vec![1; 9], Vec::new());
        loop {
            let (read, count) = next(&mut from, &mut line, 4).unwrap();
            lines.push((read, line.clone(), count));
            if read == Next::End {
                return lines;
            }
        }
    }

    #[test]
    fn long_lines_are_passed_over_alone() {
        let line = |text: &str| (Next::Line, text.as_bytes().to_vec(), text.len());
        let long = |count| (Next::TooLong, Vec::new(), count);
        let end = || (Next::End, Vec::new(), 0);
        for size in [1, 3, 64] {
            assert_eq!(lines(b"", size), [end()]);
            assert_eq!(lines(b"abcd", size), [line("abcd"), end()]);
            assert_eq!(lines(b"abcd\nab", size), [line("abcd\n"), line("ab"), end()]);
            assert_eq!(lines(b"abcde", size), [long(5), end()]);
            assert_eq!(lines(b"abcde\n\nab\n", size), [long(6), line("\n"), line("ab\n"), end()]);
            assert_eq!(lines(b"a\nabcdefghi\nabcdefgh\nb", size), [line("a\n"), long(10), long(9), line("b"), end()]);
        }
    }
}
