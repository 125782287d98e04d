//! Checksums, each with its use.
//!
//! - XXH3 (64 bits) for headers, index entries and identities: a few bytes at a time.
//! - CRC-32C for bulk data. Processors have an instruction for it that is faster than memory, so that a checked read costs
//!   little more than a copy.
//! - SHA-256 for the files of model folders, which come from another machine.

use ring::digest;
use twox_hash::XxHash3_64;

/// XXH3 of these bytes.
pub(crate) fn xxh3(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// XXH3 of these bytes with a seed.
pub(crate) fn xxh3_seeded(seed: u64, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, bytes)
}

/// CRC-32C of these bytes.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// CRC-32C of these bytes that continues from another checksum, or from a seed.
pub(crate) fn crc32c_append(seed: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, bytes)
}

/// An XXH3 that is computed piece by piece.
pub(crate) use twox_hash::xxhash3_64::Hasher as Xxh3;

/// A SHA-256 that is computed piece by piece.
pub(crate) struct Sha256(digest::Context);

impl Sha256 {
    pub(crate) fn new() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash in hexadecimal, lower case.
    pub(crate) fn hex(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// SHA-256 of these bytes in hexadecimal, lower case.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(bytes);
    hash.hex()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standards() {
        // The check values of CRC-32C, of XXH3-64 and of SHA-256.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(xxh3(b""), 0x2D06_8005_38D3_94C2);
        assert_eq!(xxh3_seeded(0, b"abc"), xxh3(b"abc"));
        assert_eq!(sha256_hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn a_hash_in_pieces_is_the_hash_of_all() {
        let mut hash = Sha256::new();
        [&b"a"[..], b"", b"bc"].into_iter().for_each(|piece| hash.update(piece));
        assert_eq!(hash.hex(), sha256_hex(b"abc"));
    }
}
