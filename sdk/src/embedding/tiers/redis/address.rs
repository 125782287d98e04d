//! Addresses of nodes, and hash slots.

use std::fmt;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Address {
    /// Parses `host:port`. An IPv6 address may be in brackets, or without them, as nodes write it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some(Self { host: host.into(), port: port.parse().ok()? }).filter(|address| !address.host.is_empty())
    }

    /// Parses the address of a redirection by the node at `self`. A node that does not know its own name omits the
    /// host.
    pub(super) fn parse_redirection(&self, text: &str) -> Option<Self> {
        match text.strip_prefix(':') {
            Some(port) => Some(Self { host: self.host.clone(), port: port.parse().ok()? }),
            None => Self::parse(text),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The slot of a hash tag, or of a key without braces.
pub(super) fn slot(tag: &[u8]) -> u16 {
    crc16(tag) % SLOTS
}

/// CRC-16/XMODEM, which Redis uses.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, &byte| {
        (0..8).fold(sum ^ u16::from(byte) << 8, |sum, _| if sum & 0x8000 == 0 { sum << 1 } else { sum << 1 ^ 0x1021 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_and_nodes_write_them() {
        let address = |host: &str, port| Some(Address { host: host.into(), port });
        assert_eq!(Address::parse("redis.example:6379"), address("redis.example", 6379));
        assert_eq!(Address::parse("[::1]:6379"), address("::1", 6379));
        assert_eq!(Address::parse("::1:6379"), address("::1", 6379));
        for wrong in ["", "host", "host:", "host:port", "host:65536", ":6379"] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
        }
        let here = address("here", 1).unwrap();
        assert_eq!(here.parse_redirection(":7"), address("here", 7));
        assert_eq!(here.parse_redirection("there:7"), address("there", 7));
    }

    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3, "the check value of the specification");
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b""), 0);
    }
}
