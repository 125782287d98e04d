//! An allocator of blocks in one region of host memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{Gpu, PinnedMemory};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;
use crate::tensor::{ElementType, Tensor};

/// Alignment and granularity of blocks.
const GRAIN: usize = 4096;

/// The memory and its free list.
pub(super) struct Arena {
    memory: Memory,
    /// The free ranges: offset and length. Adjacent ones are merged.
    free: Mutex<BTreeMap<usize, usize>>,
}

enum Memory {
    /// Pinned: a GPU copies from it by DMA.
    Pinned(PinnedMemory),
    Plain(Tensor),
}

/// A part of the memory, free again when it is dropped.
pub(super) struct Block {
    arena: Arc<Arena>,
    at: usize,
    bytes: usize,
}

impl Arena {
    /// Takes `bytes` bytes, pinned for a GPU if there is one.
    pub(super) fn new(bytes: u64, gpu: Option<&'static Gpu>) -> Result<Arc<Self>> {
        let too_large = || {
            let message = format!("the host has no memory for {bytes} bytes: ask for fewer");
            Error::new(Status::Capacity, message).about("bytes")
        };
        let bytes = usize::try_from(bytes).map_err(|_| too_large())? / GRAIN * GRAIN;
        let memory = match gpu {
            Some(gpu) => Memory::Pinned(PinnedMemory::zeroed(gpu, bytes).map_err(|error| {
                let error = Error::from(error);
                let hint = "ask for fewer, or raise the limit on memory that is locked";
                Error::new(error.status(), format!("{bytes} bytes: {}; {hint}", error.message())).about("bytes")
            })?),
            None => Memory::Plain(Tensor::zeros(ElementType::U8, &[bytes as i64]).map_err(|_| too_large())?),
        };
        let free = if bytes > 0 { BTreeMap::from([(0, bytes)]) } else { BTreeMap::new() };
        Ok(Arc::new(Self { memory, free: Mutex::new(free) }))
    }

    /// A block with a copy of `data`, first fit; `None` if there is no room.
    pub(super) fn take(self: &Arc<Self>, data: &[u8]) -> Option<Block> {
        let bytes = data.len().next_multiple_of(GRAIN);
        let mut free = self.free.lock();
        let (&at, &len) = free.iter().find(|(_, len)| **len >= bytes)?;
        free.remove(&at);
        if len > bytes {
            free.insert(at + bytes, len - bytes);
        }
        drop(free);
        let block = Block { arena: Arc::clone(self), at, bytes: data.len() };
        // SAFETY: the block is inside the memory and was just allocated: nothing else refers to it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.start().add(at), data.len()) };
        Some(block)
    }

    fn start(&self) -> *mut u8 {
        match &self.memory {
            Memory::Pinned(memory) => memory.data(),
            Memory::Plain(tensor) => tensor.memory().expect("bytes in host memory").0.cast(),
        }
    }

    /// How long it is.
    pub(super) fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Pinned(memory) => memory.bytes(),
            Memory::Plain(tensor) => tensor.len(),
        }
    }

    /// Bytes that are free.
    pub(super) fn free_bytes(&self) -> usize {
        self.free.lock().values().sum()
    }
}

impl Block {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: inside the memory; written before the block was handed out, and not since.
        unsafe { std::slice::from_raw_parts(self.arena.start().add(self.at), self.bytes) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut free = self.arena.free.lock();
        let (mut at, mut len) = (self.at, self.bytes.next_multiple_of(GRAIN));
        if let Some(behind) = free.remove(&(at + len)) {
            len += behind;
        }
        if let Some((&before, &before_len)) = free.range(..at).next_back()
            && before + before_len == at
        {
            free.remove(&before);
            (at, len) = (before, before_len + len);
        }
        if len > 0 {
            free.insert(at, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_whole_again() {
        let arena = Arena::new(10 * GRAIN as u64 + 5, None).unwrap();
        let data: Vec<u8> = (0..3 * GRAIN).map(|n| n as u8).collect();
        let mut blocks: Vec<_> = (1..=3).map(|n| arena.take(&data[..n * GRAIN - 1]).unwrap()).collect();
        assert_eq!(arena.free_bytes(), 4 * GRAIN);
        assert!(arena.take(&vec![0; 5 * GRAIN]).is_none());
        for (n, block) in (1..).zip(&blocks) {
            assert_eq!(block.bytes(), &data[..n * GRAIN - 1]);
        }
        // In an order that merges with free neighbours in three ways: none, the one after, both.
        blocks.swap_remove(0);
        blocks.swap_remove(0);
        drop(blocks);
        assert_eq!(*arena.free.lock(), BTreeMap::from([(0, 10 * GRAIN)]));
        assert!(arena.take(&[]).is_some_and(|block| block.bytes().is_empty()));
        assert_eq!(*arena.free.lock(), BTreeMap::from([(0, 10 * GRAIN)]));
    }
}
