//! Scratch memory of GPU lookups, reused from one lookup to the next.

use crate::device::{CudaError, Gpu, MissList};
use crate::sync::Mutex;

/// Scratch memory that no lookup uses at present.
#[derive(Default)]
pub(in crate::embedding) struct ScratchPool(Mutex<Vec<MissList>>);

impl ScratchPool {
    /// Scratch memory with room for `keys` keys.
    pub(in crate::embedding) fn take(
        &self,
        gpu: &'static Gpu,
        keys: usize,
    ) -> std::result::Result<MissList, CudaError> {
        let mut free = self.0.lock();
        if let Some(place) = free.iter().position(|scratch| scratch.room() >= keys) {
            return Ok(free.swap_remove(place));
        }
        // Lookups grow to this size: a smaller scratch would not be used again.
        let small = free.pop();
        drop(free);
        drop(small);
        MissList::new(gpu, keys.next_power_of_two().max(1024))
    }

    /// Returns scratch memory. No lookup that uses it is still on a stream.
    pub(in crate::embedding) fn put_back(&self, scratch: MissList) {
        self.0.lock().push(scratch);
    }
}
