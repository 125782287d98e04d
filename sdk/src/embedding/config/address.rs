//! Reads the addresses of nodes.

use crate::embedding::options::Address;
use crate::error::Result;
use crate::json::Field;

/// The default port of Redis.
const PORT: u16 = 6379;

/// Reads addresses: one text, with `;` or `,` between them, or a list of texts.
pub(super) fn read(field: &Field<'_>) -> Result<Vec<Address>> {
    let Some(list) = field.maybe_list() else { return one_text(field) };
    if list.is_empty() {
        return Err(field.error("is empty; name at least one node"));
    }
    Ok(list.iter().map(one_text).collect::<Result<Vec<_>>>()?.concat())
}

/// Parses `host`, `host:port` or `[host]:port`.
fn parse(text: &str) -> Option<Address> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => text.split_once(']')?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match rest {
        "" => PORT,
        _ => rest.strip_prefix(':')?.parse().ok().filter(|port| *port > 0)?,
    };
    let known = |letter: char| letter.is_alphanumeric() || "-._:%".contains(letter);
    (!host.is_empty() && host.chars().all(known)).then(|| Address { host: host.to_owned(), port })
}

fn one_text(field: &Field<'_>) -> Result<Vec<Address>> {
    let text = field.text()?;
    if text.contains('@') {
        // The text is not shown: it may contain a password.
        return Err(field.error(
            "expected host:port, found an @; the user and the password belong under `user_name` and `password`",
        ));
    }
    let read = |text: &str| parse(text.trim()).ok_or_else(|| field.expected("host:port, several with ; between them"));
    text.split([';', ',']).map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_come_apart() {
        let shown = |text| parse(text).map(|address| address.to_string());
        for text in ["127.0.0.1:7000", "redis-0.local_net:1", "[::1]:7000", "[fe80::1%eth0]:65535"] {
            assert_eq!(shown(text).as_deref(), Some(text));
        }
        assert_eq!(shown("host").as_deref(), Some("host:6379"));
        assert_eq!(shown("[::1]").as_deref(), Some("[::1]:6379"));
        for text in
            ["", ":7000", "host:", "host:0", "host:65536", "::1", "[::1", "[::1]7000", "a b:1", "redis://host:1"]
        {
            assert_eq!(shown(text), None, "{text}");
        }
    }
}
