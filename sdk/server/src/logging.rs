//! The log: lines of text, or of JSON, on standard error.

use std::io::Write;
use std::time::{Duration, SystemTime};

use log::{LevelFilter, Metadata, Record};
use pagoda::{Error, Result};
use serde::Serialize;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs: one object a line.
    Json,
}

impl LogFormat {
    /// `text` or `json`.
    pub fn named(word: &str) -> Option<Self> {
        match word {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

/// A request that has ended.
#[derive(Serialize)]
pub struct Access<'a> {
    /// Its id, which its response has too.
    pub request_id: &'a str,
    /// The method.
    pub method: &'a str,
    /// The path, without a query, in which there might be anything.
    pub path: &'a str,
    /// The status of the response.
    pub status: u16,
    /// From the head of the request to the end of the response.
    pub ms: f64,
    /// Whether the client took all of it.
    pub complete: bool,
    /// If it is traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

/// Writes lines from now on. Libraries write at this level or above.
pub fn start(format: LogFormat, level: &str) -> Result<()> {
    let level: LevelFilter = level.parse().map_err(|_| {
        Error::invalid(
            "log_level",
            format!("{level:?} is none of \"error\", \"warn\", \"info\", \"debug\" and \"off\""),
        )
    })?;
    // A second server of this process, as a test may have it, keeps the first one's.
    let logger = match format {
        LogFormat::Text => &TEXT,
        LogFormat::Json => &JSON,
    };
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
    Ok(())
}

/// Writes the line of a request.
pub fn access(format: LogFormat, access: &Access) {
    if log::max_level() < LevelFilter::Info {
        return;
    }
    match format {
        LogFormat::Json => write_json(&Line { time: now(), level: "INFO", target: "request", of: access }),
        LogFormat::Text => {
            let Access { request_id, method, path, status, ms, complete, .. } = access;
            let end = if *complete { "" } else { ", the client went away" };
            write(&format!("{} INFO {request_id} {method} {path}: {status} in {ms:.1} ms{end}\n", now()));
        }
    }
}

struct Logger {
    format: LogFormat,
}

static TEXT: Logger = Logger { format: LogFormat::Text };
static JSON: Logger = Logger { format: LogFormat::Json };

#[derive(Serialize)]
struct Line<'a, T: Serialize> {
    time: String,
    level: &'a str,
    target: &'a str,
    #[serde(flatten)]
    of: T,
}

#[derive(Serialize)]
struct Message {
    message: String,
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let (level, target, message) = (record.level().as_str(), record.target(), record.args().to_string());
        match self.format {
            LogFormat::Text => write(&format!("{} {level} {message}\n", now())),
            LogFormat::Json => write_json(&Line { time: now(), level, target, of: Message { message } }),
        }
    }

    fn flush(&self) {}
}

fn write_json(line: &impl Serialize) {
    if let Ok(mut text) = serde_json::to_string(line) {
        text.push('\n');
        write(&text);
    }
}

/// One write, so that the lines of two threads do not mix.
fn write(line: &str) {
    let _ = std::io::stderr().write_all(line.as_bytes());
}

fn now() -> String {
    utc(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

/// `2026-11-18T07:30:31.123Z`, from the time since 1970.
fn utc(since: Duration) -> String {
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years from March on, in cycles of 400: leap days are at their ends.
    let day = days + 719_468;
    let (cycle, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (date, month_number) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = cycle * 400 + year + u64::from(month_number <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month_number:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
            (1_795_000_000, "2026-11-18T11:06:40.000Z"),
        ] {
            assert_eq!(utc(Duration::from_secs(seconds)), text);
        }
        assert_eq!(utc(Duration::from_millis(1)), "1970-01-01T00:00:00.001Z");
    }
}
