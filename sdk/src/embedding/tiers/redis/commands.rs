//! The commands that are sent to nodes. Atomic operations are Lua scripts.

use std::sync::LazyLock;

use redis::{Cmd, Script};

use crate::embedding::eviction::Eviction;
use crate::embedding::update::version::Version;

/// The hash field with the layout of the rows of a partition. The fields of rows have 8 bytes.
const LAYOUT: &str = "layout";

/// All scripts, to be loaded into nodes.
pub(super) static SCRIPTS: LazyLock<[Script; 2]> =
    LazyLock::new(|| [Script::new(include_str!("write.lua")), Script::new(include_str!("touch.lua"))]);

fn write() -> &'static Script {
    &SCRIPTS[0]
}

fn touch() -> &'static Script {
    &SCRIPTS[1]
}

/// A partition of a table.
pub(super) struct Partition {
    /// The Redis key of a hash from keys to versions and rows.
    pub(super) rows: String,
    /// The Redis key of a hash from keys to the time or number of their uses, if the eviction policy needs it.
    pub(super) uses: String,
    pub(super) slot: u16,
}

/// The parameters of every write.
pub(super) struct WriteLimits<'a> {
    pub(super) layout: &'a [u8],
    pub(super) eviction: Eviction,
    /// The number of rows above which eviction begins.
    pub(super) max_rows: usize,
    /// The number of rows at which it ends.
    pub(super) target: usize,
}

/// Which rows a write changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteMode {
    /// Only missing rows.
    Put,
    /// Missing rows, and rows with the same version or a lower one.
    Update,
}

impl Partition {
    pub(super) fn new(table: &str, number: usize) -> Self {
        // The slot depends on the hash tag in braces only, so both hashes are on the same node.
        let tag = format!("{table}/{number}");
        let slot = super::address::slot(tag.as_bytes());
        Self { rows: format!("pagoda:{{{tag}}}:rows"), uses: format!("pagoda:{{{tag}}}:uses"), slot }
    }

    /// Encodes the command that reads the layout and the rows of keys.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = i64>) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg("HMGET").arg(&self.rows).arg(LAYOUT);
        for key in keys {
            command.arg(&key.to_le_bytes());
        }
        command.get_packed_command()
    }

    /// Encodes the command that writes rows: key, version, bytes. The answer is the number of evicted rows. If the
    /// partition has rows of another layout, the answer is that layout, and nothing is written.
    pub(super) fn write(&self, terms: &WriteLimits<'_>, mode: WriteMode, rows: &[(i64, Version, &[u8])]) -> Vec<u8> {
        let mut command = Cmd::new();
        let mode = if mode == WriteMode::Put { "put" } else { "update" };
        command.arg("EVALSHA").arg(write().get_hash());
        // During the migration of a slot, a command with two keys of which one is missing has to wait for its end.
        match terms.eviction {
            Eviction::Random => command.arg(1).arg(&self.rows),
            Eviction::Oldest | Eviction::LeastUsed => command.arg(2).arg(&self.rows).arg(&self.uses),
        };
        command.arg(mode).arg(terms.layout).arg(name(terms.eviction)).arg(terms.max_rows).arg(terms.target);
        let mut value = Vec::new();
        for (key, version, row) in rows {
            value.clear();
            // Big-endian, so that the script can compare byte by byte.
            value.extend(version.0.to_be_bytes());
            value.extend(*row);
            command.arg(&key.to_le_bytes()).arg(value.as_slice());
        }
        command.get_packed_command()
    }

    /// Encodes the command that records the use of rows.
    pub(super) fn touch(&self, eviction: Eviction, keys: &[i64]) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(touch().get_hash()).arg(2).arg(&self.rows).arg(&self.uses).arg(name(eviction));
        for key in keys {
            command.arg(&key.to_le_bytes());
        }
        command.get_packed_command()
    }
}

fn name(eviction: Eviction) -> &'static str {
    match eviction {
        Eviction::Random => "random",
        Eviction::Oldest => "oldest",
        Eviction::LeastUsed => "least used",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_argument() {
        let partition = Partition::new("t", 3);
        assert_eq!(partition.rows, "pagoda:{t/3}:rows");
        let packed = partition.fetch([-2].into_iter());
        let expected = b"*4\r\n$5\r\nHMGET\r\n$17\r\npagoda:{t/3}:rows\r\n$6\r\nlayout\r\n$8\r\n\xfe\xff\xff\xff\xff\xff\xff\xff\r\n";
        assert_eq!(packed, expected);
    }
}
