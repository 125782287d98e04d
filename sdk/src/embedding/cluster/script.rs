//! The commands that are sent. What has to happen at once is a script, which a node runs without anything in between.

use std::sync::LazyLock;

use redis::{Cmd, Script};

use crate::embedding::overflow::Overflow;

/// The field that says how the rows of a partition are laid out. Fields of rows have 8 bytes.
const LAYOUT: &str = "layout";

/// Every script, for nodes that do not know them yet.
pub(super) static SCRIPTS: LazyLock<[Script; 2]> =
    LazyLock::new(|| [Script::new(include_str!("write.lua")), Script::new(include_str!("touch.lua"))]);

fn write() -> &'static Script {
    &SCRIPTS[0]
}

fn touch() -> &'static Script {
    &SCRIPTS[1]
}

/// Where a partition is.
pub(super) struct Partition {
    /// A hash: from keys to versions and rows.
    pub(super) rows: String,
    /// A hash: from keys to when or how often they were used, if that decides which rows leave.
    pub(super) uses: String,
    pub(super) slot: u16,
}

/// What there is to say about every write.
pub(super) struct Terms<'a> {
    pub(super) layout: &'a [u8],
    pub(super) policy: Overflow,
    /// Rows leave when there are more than this …
    pub(super) margin: usize,
    /// … until so many are left.
    pub(super) target: usize,
}

/// Which rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Those that are not there.
    Put,
    /// And those that are there with the same version or a lower one.
    Update,
}

impl Partition {
    pub(super) fn new(table: &str, number: usize) -> Self {
        // The braces make the slot depend on nothing else, so both hashes are on the same node.
        let tag = format!("{table}/{number}");
        let slot = super::address::slot(tag.as_bytes());
        Self { rows: format!("pagoda:{{{tag}}}:rows"), uses: format!("pagoda:{{{tag}}}:uses"), slot }
    }

    /// Reads the layout and rows.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = i64>) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg("HMGET").arg(&self.rows).arg(LAYOUT);
        for key in keys {
            command.arg(&key.to_le_bytes());
        }
        command.get_packed_command()
    }

    /// Writes rows; a row is its version and its bytes. The answer is how many rows left, or the layout of the rows that
    /// are there if it is another one; then nothing was written.
    pub(super) fn write(&self, terms: &Terms<'_>, mode: Mode, rows: &[(i64, u64, &[u8])]) -> Vec<u8> {
        let mut command = Cmd::new();
        let mode = if mode == Mode::Put { "put" } else { "update" };
        command.arg("EVALSHA").arg(write().get_hash());
        // While a slot moves, a command with two keys of which one is not there has to wait until the end of it.
        match terms.policy {
            Overflow::Random => command.arg(1).arg(&self.rows),
            Overflow::Oldest | Overflow::LeastUsed => command.arg(2).arg(&self.rows).arg(&self.uses),
        };
        command.arg(mode).arg(terms.layout).arg(name(terms.policy)).arg(terms.margin).arg(terms.target);
        let mut value = Vec::new();
        for (key, version, row) in rows {
            value.clear();
            // Big-endian, so that the script can compare the bytes one by one.
            value.extend(version.to_be_bytes());
            value.extend(*row);
            command.arg(&key.to_le_bytes()).arg(value.as_slice());
        }
        command.get_packed_command()
    }

    /// Notes that rows were used.
    pub(super) fn touch(&self, policy: Overflow, keys: &[i64]) -> Vec<u8> {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(touch().get_hash()).arg(2).arg(&self.rows).arg(&self.uses).arg(name(policy));
        for key in keys {
            command.arg(&key.to_le_bytes());
        }
        command.get_packed_command()
    }
}

fn name(policy: Overflow) -> &'static str {
    match policy {
        Overflow::Random => "random",
        Overflow::Oldest => "oldest",
        Overflow::LeastUsed => "least used",
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
