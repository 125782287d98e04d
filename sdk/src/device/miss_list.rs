//! The list of keys that a lookup did not find, and rows that are given to it instead.

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};
use pagoda_kernels::cuda::{CUdeviceptr, CUstream, CudaError, GivenRows, Gpu, asked, no_capture};

use super::memory::{DeviceMemory, PinnedMemory};

/// The scratch memory of one lookup at a time: the list of missing keys, which the host reads afterwards, and given
/// rows.
#[derive(Debug)]
pub struct MissList {
    progress: DeviceMemory,
    /// How many are missing, then their keys, then their places.
    listed: PinnedMemory,
    room: usize,
    given: Option<Given>,
    done: CudaEvent,
}

/// Rows that the next lookup takes instead of the table's.
#[derive(Debug)]
struct Given {
    memory: DeviceMemory,
    rows_at: usize,
    count: usize,
}

/// Where the keys begin in [`MissList::listed`].
const KEYS_AT: usize = 16;

impl MissList {
    /// With room for lookups of so many keys.
    pub fn new(gpu: &'static Gpu, room: usize) -> Result<Self, CudaError> {
        // A thread that waits in the background must not spin.
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        Ok(Self {
            progress: DeviceMemory::zeroed(gpu, 8)?,
            listed: PinnedMemory::zeroed(gpu, KEYS_AT + room.saturating_mul(12))?,
            room,
            given: None,
            done: gpu.context().new_event(flags).map_err(asked("making an event"))?,
        })
    }

    /// For how many keys there is room.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Waits until the lookup is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _hold = no_capture();
        self.done.synchronize().map_err(asked("waiting for a lookup"))
    }

    /// How many keys were missing, once the lookup is done.
    pub fn missing(&self) -> usize {
        // SAFETY: the number that the lookup wrote, or the zero that was there before.
        let count = unsafe { self.listed.data().cast::<i32>().read_volatile() };
        usize::try_from(count).unwrap_or(0).min(self.room)
    }

    /// The places of the keys that were missing, in no order, once the lookup is done.
    pub fn missing_places(&self) -> Vec<i32> {
        let at = (self.places_at() - self.listed.address()) as usize;
        // SAFETY: so many numbers there are; nothing writes them while there is no lookup.
        unsafe { std::slice::from_raw_parts(self.listed.data().add(at).cast(), self.missing()) }.to_vec()
    }

    /// The keys that were missing, in the same order.
    pub fn missing_keys(&self) -> Vec<i64> {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.listed.data().add(KEYS_AT).cast(), self.missing()) }.to_vec()
    }

    /// Gives the next lookups rows of their own, in f32: `places` has for each key which of them, or -1.
    ///
    /// # Safety
    /// The stream is one of the device, and no lookup is under way with this.
    pub unsafe fn give(
        &mut self,
        gpu: &'static Gpu,
        places: &[i32],
        rows: &[f32],
        dim: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let rows_at = size_of_val(places).next_multiple_of(16);
        let bytes = rows_at + size_of_val(rows);
        let memory = match self.given.take().filter(|given| given.memory.bytes() >= bytes) {
            Some(given) => given.memory,
            None => DeviceMemory::zeroed(gpu, bytes.next_power_of_two())?,
        };
        // SAFETY: there is room for both; the rest is the caller's.
        unsafe {
            gpu.write(memory.address(), places, stream)?;
            gpu.write(memory.address() + rows_at as CUdeviceptr, rows, stream)?;
        }
        self.given = Some(Given { memory, rows_at, count: rows.len() / dim });
        Ok(())
    }

    /// The next lookups have none.
    pub fn give_nothing(&mut self) {
        if let Some(given) = &mut self.given {
            given.count = 0;
        }
    }

    /// Those that the next lookup has.
    pub(super) fn given(&self) -> Option<GivenRows> {
        let Given { memory, rows_at, count } = self.given.as_ref().filter(|given| given.count > 0)?;
        let rows = memory.address() + *rows_at as CUdeviceptr;
        Some(GivenRows { places: memory.address(), rows, count: *count })
    }

    /// Notes that a lookup is on a stream.
    ///
    /// # Safety
    /// The stream is one of the device.
    pub(super) unsafe fn asked(&self, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { result::event::record(self.done.cu_event(), stream) }.map_err(asked("recording an event"))
    }

    /// Where a lookup says how many keys are missing.
    pub(super) fn count_at(&self) -> CUdeviceptr {
        self.listed.address()
    }

    /// Where it counts on its way.
    pub(super) fn progress_at(&self) -> CUdeviceptr {
        self.progress.address()
    }

    pub(super) fn keys_at(&self) -> CUdeviceptr {
        self.listed.address() + KEYS_AT as CUdeviceptr
    }

    pub(super) fn places_at(&self) -> CUdeviceptr {
        self.keys_at() + (self.room * size_of::<i64>()) as CUdeviceptr
    }
}
