//! Addresses of nodes, and hash slots.

use crate::embedding::options::Address;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// Parses `host:port`. An IPv6 address may be in brackets, or without them, as nodes write it.
pub(super) fn parse(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some(Address { host: host.into(), port: port.parse().ok()? }).filter(|address| !address.host.is_empty())
}

/// Parses the address of a redirection by the node at `from`. A node that does not know its own name omits the host.
pub(super) fn parse_redirection(from: &Address, text: &str) -> Option<Address> {
    match text.strip_prefix(':') {
        Some(port) => Some(Address { host: from.host.clone(), port: port.parse().ok()? }),
        None => parse(text),
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
        assert_eq!(parse("redis.example:6379"), address("redis.example", 6379));
        assert_eq!(parse("[::1]:6379"), address("::1", 6379));
        assert_eq!(parse("::1:6379"), address("::1", 6379));
        for wrong in ["", "host", "host:", "host:port", "host:65536", ":6379"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        let here = address("here", 1).unwrap();
        assert_eq!(parse_redirection(&here, ":7"), address("here", 7));
        assert_eq!(parse_redirection(&here, "there:7"), address("there", 7));
    }

    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3, "the check value of the specification");
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b""), 0);
    }
}
