//! How to open a store.

/// When a write to a store counts as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Durability {
    /// When it is queued: the queue is lost if the process ends.
    None,
    /// When the operating system has it: it survives a crash of the process, but not a loss of power.
    Process,
    /// When the disk has it: it survives a loss of power.
    #[default]
    Power,
}

/// How to open a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct StoreOptions {
    /// When a write counts as done.
    pub durability: Durability,
    /// How many bytes the data files may take together before the least recently used owners are evicted; 0 = no limit.
    /// During a compaction the files may take one or two segments more.
    pub max_bytes: u64,
    /// The size at which a segment file is full. With `max_bytes`, at most an eighth of that.
    pub segment_bytes: u64,
    /// How many bytes may wait to be written. Beyond it a write waits or is refused.
    pub queue_bytes: u64,
    /// How many bytes of garbage the files may have before segments are compacted. Garbage of less than half of the
    /// files is left in any case.
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
    /// The size of a segment. Several must fit under `max_bytes`, or every compaction would exceed it.
    pub(crate) fn segment_size(&self) -> u64 {
        let most = if self.max_bytes == 0 { u64::MAX } else { (self.max_bytes / 8).max(1 << 20) };
        self.segment_bytes.min(most).max(4096)
    }
}
