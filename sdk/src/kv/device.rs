//! Tokens on their way between the pools of a GPU and the host, beside what the GPU computes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pagoda_kernels::cuda::{Arrivals, CUdeviceptr, DeviceMemory, Gpu, PinnedMemory, SideStream, Tokens};

use super::shape::Shape;
use crate::error::Result;
use crate::tensor::Tensor;

/// Bytes that travel at a time: enough to keep the link to the host busy.
const AT_A_TIME: usize = 8 << 20;

/// Moves tokens between the pools of a GPU and the host.
pub(super) struct Mover {
    gpu: &'static Gpu,
    shape: Shape,
    pages: usize,
    /// Everything that comes in does so in one order: whoever waits for the last of a layer has what came before it too.
    incoming: Mutex<Lane>,
    arrivals: Vec<Arrivals>,
    /// Those that no one is using, each with memory of the host for what comes out.
    outgoing: Mutex<Vec<(Lane, PinnedMemory)>>,
}

/// A stream with memory for tokens, and behind it for the numbers of their pages.
struct Lane {
    stream: SideStream,
    memory: DeviceMemory,
}

/// Tokens in the pages of a user: from which on, and how many.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    pub(super) pages: &'a [u32],
    pub(super) first: usize,
    pub(super) count: usize,
}

impl Mover {
    pub(super) fn new(gpu: &'static Gpu, shape: Shape, pages: u32, layers: &[CUdeviceptr]) -> Result<Self> {
        let arrivals = layers.iter().map(|&pool| Arrivals::new(gpu, pool)).collect::<Result<_, _>>()?;
        let incoming = Mutex::new(Lane::new(gpu, shape)?);
        Ok(Self { gpu, shape, pages: pages as usize, incoming, arrivals, outgoing: Mutex::default() })
    }

    /// Appends the keys, then the values, of tokens to `to`, and waits until they are there.
    ///
    /// # Safety
    /// As for [`Pool::read`](super::pool::Pool::read).
    pub(super) unsafe fn read(&self, pool: &Tensor, stretch: Stretch<'_>, to: &mut Vec<u8>) -> Result<()> {
        let free = lock(&self.outgoing).pop();
        let lane = match free {
            Some(lane) => lane,
            None => (Lane::new(self.gpu, self.shape)?, PinnedMemory::zeroed(self.gpu, self.at_a_time().1)?),
        };
        // SAFETY: the caller's.
        let read = unsafe { self.read_by(&lane, pool, stretch, to) };
        if read.is_ok() {
            lock(&self.outgoing).push(lane);
        }
        read
    }

    /// # Safety
    /// As for [`read`](Self::read).
    unsafe fn read_by(
        &self,
        (lane, host): &(Lane, PinnedMemory),
        pool: &Tensor,
        stretch: Stretch<'_>,
        to: &mut Vec<u8>,
    ) -> Result<()> {
        let (row, base) = (self.shape.row_bytes(), to.len());
        to.resize(base + 2 * stretch.count * row, 0);
        let mut done = 0;
        while done < stretch.count {
            let count = (stretch.count - done).min(self.at_a_time().0);
            // SAFETY: the lane is ours and the stream is waited for before its memory is used again; of the pool the
            // caller's. What was packed is inside the memory of either side.
            unsafe {
                let tokens = self.tokens(lane, pool, Stretch { first: stretch.first + done, count, ..stretch })?;
                self.gpu.pack(&tokens, lane.stream.raw())?;
                lane.stream.download(host.data(), lane.memory.address(), 2 * count * row)?;
                lane.stream.wait()?;
            }
            for half in 0..2 {
                let to = &mut to[base + (half * stretch.count + done) * row..][..count * row];
                // SAFETY: inside the pinned memory, which nothing writes to any more.
                to.copy_from_slice(unsafe {
                    std::slice::from_raw_parts(host.data().add(half * count * row), count * row)
                });
            }
            done += count;
        }
        Ok(())
    }

    /// Has tokens go into their pages and returns as soon as they are on their way; operators wait for them. `from` has the
    /// keys, then the values, of `held` tokens, of which the first `skip` are left out.
    ///
    /// # Safety
    /// As for [`Pool::write`](super::pool::Pool::write), until [`wait`](Self::wait) has returned; so long `from` lives.
    pub(super) unsafe fn write(
        &self,
        pool: &Tensor,
        layer: u32,
        stretch: Stretch<'_>,
        from: &[u8],
        (held, skip): (usize, usize),
    ) -> Result<()> {
        let row = self.shape.row_bytes();
        let lane = lock(&self.incoming);
        let mut done = 0;
        while done < stretch.count {
            let count = (stretch.count - done).min(self.at_a_time().0);
            // SAFETY: what is on the stream before is done with the lane's memory when this begins; both halves are inside
            // `from`, which the caller keeps; of the pool the caller's.
            unsafe {
                let tokens = self.tokens(&lane, pool, Stretch { first: stretch.first + done, count, ..stretch })?;
                for half in 0..2 {
                    let from = &from[(half * held + skip + done) * row..][..count * row];
                    let to = lane.memory.address() + (half * count * row) as CUdeviceptr;
                    lane.stream.upload(to, from.as_ptr(), from.len())?;
                }
                self.gpu.unpack(&tokens, lane.stream.raw())?;
            }
            done += count;
        }
        Ok(self.arrivals[layer as usize].mark(&lane.stream)?)
    }

    /// Waits until everything that came in is in its pages.
    pub(super) fn wait(&self) -> Result<()> {
        Ok(lock(&self.incoming).stream.wait()?)
    }

    /// How many tokens travel at a time, and their bytes.
    fn at_a_time(&self) -> (usize, usize) {
        let token = 2 * self.shape.row_bytes();
        let count = (AT_A_TIME / token).max(1);
        (count, count * token)
    }

    /// Tokens packed at the beginning of a lane's memory; the numbers of their pages are put behind them.
    ///
    /// # Safety
    /// Nothing but what is on the lane's stream uses its memory.
    unsafe fn tokens(&self, lane: &Lane, pool: &Tensor, stretch: Stretch<'_>) -> Result<Tokens> {
        let page_size = self.shape.page_size as usize;
        let (from, to) = (stretch.first / page_size, (stretch.first + stretch.count).div_ceil(page_size));
        let pages: Vec<u8> = stretch.pages[from..to].iter().flat_map(|page| page.to_le_bytes()).collect();
        let behind = lane.memory.address() + self.at_a_time().1.next_multiple_of(16) as CUdeviceptr;
        // SAFETY: there is room for as many pages as tokens that travel at a time can lie in. Memory that is not pinned is
        // read before this returns.
        unsafe { lane.stream.upload(behind, pages.as_ptr(), pages.len()) }?;
        Ok(Tokens {
            pool: pool.place()?.0.addr() as CUdeviceptr,
            pool_pages: self.pages,
            page_size,
            row_bytes: self.shape.row_bytes(),
            pages: behind,
            page_entries: to - from,
            packed: lane.memory.address(),
            held: stretch.count,
            skip: 0,
            first: stretch.first % page_size,
            count: stretch.count,
        })
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // The memory of lanes and pools goes next.
        let _ = self.wait();
    }
}

impl Lane {
    fn new(gpu: &'static Gpu, shape: Shape) -> Result<Self> {
        let token = 2 * shape.row_bytes();
        let count = (AT_A_TIME / token).max(1);
        let pages = count / shape.page_size as usize + 2;
        let bytes = (count * token).next_multiple_of(16) + pages * size_of::<u32>();
        Ok(Self { stream: SideStream::new(gpu)?, memory: DeviceMemory::zeroed(gpu, bytes)? })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
