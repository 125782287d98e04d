//! Tokens on their way between the pools of a GPU and the host, beside what the GPU computes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagoda_kernels::cuda::{Arrivals, CUdeviceptr, DeviceMemory, Event, Gpu, PinnedMemory, SideStream, Tokens};

use super::shape::Shape;
use crate::error::Result;
use crate::tensor::Tensor;

/// Bytes that come in at a time, and that go out: enough to keep the link to the host busy.
const INCOMING: usize = 32 << 20;
const OUTGOING: usize = 8 << 20;

/// Moves tokens between the pools of a GPU and the host.
pub(super) struct Mover {
    gpu: &'static Gpu,
    shape: Shape,
    pages: usize,
    incoming: Mutex<Incoming>,
    /// Has what came in on either lane in the order in which it was put there: whoever waits for the last of a layer has what
    /// came before it too.
    order: SideStream,
    arrivals: Vec<Arrivals>,
    /// How many times tokens were put on their way, and how many of these are known to have arrived.
    sent: AtomicU64,
    arrived: AtomicU64,
    /// Those that no one is using, each with memory of the host for what comes out.
    outgoing: Mutex<Vec<(Lane, PinnedMemory)>>,
}

/// Lanes that take turns, so that tokens come in on one while those of the other go into their pages.
struct Incoming {
    lanes: [(Lane, Event); 2],
    next: usize,
}

/// A stream with memory for tokens, and behind it for the numbers of their pages.
struct Lane {
    stream: SideStream,
    memory: DeviceMemory,
    /// How many tokens there is memory for.
    tokens: usize,
}

/// Tokens in the pages of a user: from which on, and how many.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    pub(super) pages: &'a [u32],
    pub(super) first: usize,
    pub(super) count: usize,
}

/// A piece of a user's history in one layer, as the store has it.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    /// The keys, then the values, of `held` tokens.
    pub(super) bytes: &'a [u8],
    pub(super) held: usize,
    /// How many of them are left out at the beginning, and how many there are then.
    pub(super) skip: usize,
    pub(super) count: usize,
}

impl Mover {
    pub(super) fn new(gpu: &'static Gpu, shape: Shape, pages: u32, layers: &[CUdeviceptr]) -> Result<Self> {
        let arrivals = layers.iter().map(|&pool| Arrivals::new(gpu, pool)).collect::<Result<_, _>>()?;
        let lane = || -> Result<_> { Ok((Lane::new(gpu, shape, INCOMING)?, Event::new(gpu)?)) };
        let incoming = Mutex::new(Incoming { lanes: [lane()?, lane()?], next: 0 });
        let (order, outgoing) = (SideStream::new(gpu)?, Mutex::default());
        let (sent, arrived) = Default::default();
        Ok(Self { gpu, shape, pages: pages as usize, incoming, order, arrivals, sent, arrived, outgoing })
    }

    /// Appends the keys, then the values, of tokens to `to`, and waits until they are there.
    ///
    /// # Safety
    /// As for [`Pool::read`](super::pool::Pool::read).
    pub(super) unsafe fn read(&self, pool: &Tensor, stretch: Stretch<'_>, to: &mut Vec<u8>) -> Result<()> {
        let free = lock(&self.outgoing).pop();
        let lane = match free {
            Some(lane) => lane,
            None => {
                let lane = Lane::new(self.gpu, self.shape, OUTGOING)?;
                let bytes = lane.tokens * 2 * self.shape.row_bytes();
                (lane, PinnedMemory::zeroed(self.gpu, bytes)?)
            }
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
            let count = (stretch.count - done).min(lane.tokens);
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

    /// Has tokens go into their pages, from `first` on, and returns as soon as they are on their way; operators wait for them.
    /// The parts follow one another.
    ///
    /// # Safety
    /// As for [`Pool::write`](super::pool::Pool::write), until [`wait`](Self::wait) has returned; so long the bytes live.
    pub(super) unsafe fn write(
        &self,
        pool: &Tensor,
        layer: u32,
        (pages, first): (&[u32], usize),
        parts: &[Part<'_>],
    ) -> Result<()> {
        let mut incoming = lock(&self.incoming);
        let Incoming { lanes, next } = &mut *incoming;
        let (lane, event) = &lanes[*next];
        *next = (*next + 1) % lanes.len();
        // SAFETY: the caller's.
        let written = unsafe { self.write_by(lane, pool, (pages, first), parts) }.and_then(|()| {
            event.record(&lane.stream)?;
            // SAFETY: the event lives as long as the streams do.
            unsafe { event.hold(self.order.raw()) }?;
            self.arrivals[layer as usize].mark(&self.order)?;
            // When it is there to be asked after.
            self.sent.fetch_add(1, Ordering::Release);
            Ok(())
        });
        // What is on the lane already is waited for here, as no one else knows of it.
        written.inspect_err(|_| drop(lane.stream.wait()))
    }

    /// # Safety
    /// As for [`write`](Self::write).
    unsafe fn write_by(
        &self,
        lane: &Lane,
        pool: &Tensor,
        (pages, first): (&[u32], usize),
        parts: &[Part<'_>],
    ) -> Result<()> {
        let row = self.shape.row_bytes();
        let all: usize = parts.iter().map(|part| part.count).sum();
        let mut done = 0;
        while done < all {
            let count = (all - done).min(lane.tokens);
            // SAFETY: what is on the stream before is done with the lane's memory when this begins; both halves of each part
            // are inside its bytes, which the caller keeps; of the pool the caller's.
            unsafe {
                let tokens = self.tokens(lane, pool, Stretch { pages, first: first + done, count })?;
                let mut before = 0;
                for part in parts {
                    // The part's tokens among those of this turn.
                    let (from, to) = (done.max(before), (done + count).min(before + part.count));
                    for half in (0..2).filter(|_| from < to) {
                        let bytes =
                            &part.bytes[(half * part.held + part.skip + from - before) * row..][..(to - from) * row];
                        let place = lane.memory.address() + ((half * count + from - done) * row) as CUdeviceptr;
                        lane.stream.upload(place, bytes.as_ptr(), bytes.len())?;
                    }
                    before += part.count;
                }
                self.gpu.unpack(&tokens, lane.stream.raw())?;
            }
            done += count;
        }
        Ok(())
    }

    /// Whether everything that [`write`](Self::write) has put on its way is in its pages; false if that can not be found out.
    pub(super) fn is_still(&self) -> bool {
        let sent = self.sent.load(Ordering::Acquire);
        if sent == self.arrived.load(Ordering::Relaxed) {
            return true;
        }
        let still = self.order.is_done().unwrap_or(false);
        if still {
            self.arrived.fetch_max(sent, Ordering::Relaxed);
        }
        still
    }

    /// Waits until everything that came in is in its pages.
    pub(super) fn wait(&self) -> Result<()> {
        Ok(self.order.wait()?)
    }

    /// Tokens packed at the beginning of a lane's memory; the numbers of their pages are put behind them.
    ///
    /// # Safety
    /// Nothing but what is on the lane's stream uses its memory.
    unsafe fn tokens(&self, lane: &Lane, pool: &Tensor, stretch: Stretch<'_>) -> Result<Tokens> {
        let page_size = self.shape.page_size as usize;
        let (from, to) = (stretch.first / page_size, (stretch.first + stretch.count).div_ceil(page_size));
        let pages: Vec<u8> = stretch.pages[from..to].iter().flat_map(|page| page.to_le_bytes()).collect();
        let behind = lane.memory.address() + lane.behind(self.shape) as CUdeviceptr;
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
    /// With memory for so many bytes of tokens, or for one.
    fn new(gpu: &'static Gpu, shape: Shape, bytes: usize) -> Result<Self> {
        let tokens = (bytes / (2 * shape.row_bytes())).max(1);
        let pages = tokens / shape.page_size as usize + 2;
        let stream = SideStream::new(gpu)?;
        let bytes = (tokens * 2 * shape.row_bytes()).next_multiple_of(16) + pages * size_of::<u32>();
        Ok(Self { stream, memory: DeviceMemory::zeroed(gpu, bytes)?, tokens })
    }

    /// Where the numbers of pages are in its memory.
    fn behind(&self, shape: Shape) -> usize {
        (self.tokens * 2 * shape.row_bytes()).next_multiple_of(16)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
