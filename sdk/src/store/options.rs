//! How to open a store.

/// When a write to a store counts as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// As soon as it is queued: what is queued is lost with the process.
    None,
    /// When the operating system has it: it survives the end of the process, but not a loss of power.
    Process,
    /// When the disk has it: it survives a loss of power.
    #[default]
    Power,
}

/// How to open a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// When a write counts as done.
    pub durability: Durability,
    /// How many bytes the data files may take together before the users that were not used for longest leave; 0 = no
    /// limit. While segments are compacted the files may take one or two segments more.
    pub max_bytes: u64,
    /// How long a segment file gets before the next one is begun. With `max_bytes`, at most an eighth of that.
    pub segment_bytes: u64,
    /// How many bytes may wait to be written before a write has to wait or is refused.
    pub queue_bytes: u64,
    /// How many bytes of removed data are left lying in the files before segments are compacted; they are left in any
    /// case while they are less than half of all.
    pub garbage_bytes: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            max_bytes: 0,
            segment_bytes: 256 << 20,
            queue_bytes: 256 << 20,
            garbage_bytes: 64 << 20,
        }
    }
}

impl StoreOptions {
    /// How long segments get: several must fit under a limit, or every compaction would exceed it.
    pub(crate) fn segment_size(&self) -> u64 {
        let most = if self.max_bytes == 0 { u64::MAX } else { (self.max_bytes / 8).max(1 << 20) };
        self.segment_bytes.min(most).max(4096)
    }
}
