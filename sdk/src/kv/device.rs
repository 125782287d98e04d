//! Copies of tokens between the pools of a GPU and the host, on streams of their own beside the compute stream.

use std::sync::atomic::{AtomicU64, Ordering};

use pagoda_kernels::cuda::Tokens;

use super::plane_pool::PlanePool;
use super::shape::Shape;
use crate::device::{Arrivals, CUdeviceptr, DeviceMemory, Event, Gpu, PinnedMemory, SideStream};
use crate::error::{Result, Status};
use crate::sync::{Condvar, Mutex};

/// Bytes that come in at a time, and that go out: enough to keep the link to the host busy.
const INCOMING: usize = 32 << 20;
const OUTGOING: usize = 8 << 20;

/// Moves tokens between the pools of a GPU and the host.
pub(super) struct Mover {
    gpu: &'static Gpu,
    shape: Shape,
    pages: usize,
    incoming: Mutex<Incoming>,
    /// Joins both lanes in the order of their copies: a wait for the last copy of a layer covers those before it.
    order: SideStream,
    /// Recorded behind the last copy of a page to another one.
    copied: Event,
    arrivals: Vec<Arrivals>,
    /// How many copies were begun, and how many of these are known to have ended.
    sent: AtomicU64,
    arrived: AtomicU64,
    /// The free ones. At least one exists.
    outgoing: Mutex<Vec<Outgoing>>,
    /// One was put back.
    returned: Condvar,
}

/// Two lanes that take turns: tokens come in on one while those of the other go into their pages.
struct Incoming {
    lanes: [(Lane, Event); 2],
    next: usize,
}

/// A lane with memory of the host for what comes out.
struct Outgoing {
    lane: Lane,
    host: PinnedMemory,
}

/// A stream with memory for tokens, and behind it for the numbers of their pages.
struct Lane {
    stream: SideStream,
    memory: DeviceMemory,
    /// How many tokens there is memory for.
    tokens: usize,
    /// Numbers of pages that the stream may not have read yet.
    numbers: Vec<Vec<u8>>,
}

/// Tokens in the pages of an owner: from which on, and how many.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    pub(super) pages: &'a [u32],
    pub(super) first: usize,
    pub(super) count: usize,
}

/// A piece of an owner's history in one layer, as the store has it.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    /// The keys, then the values, of `held` tokens; of a quantised format the codes of both, then the scales of both.
    pub(super) bytes: &'a [u8],
    pub(super) held: usize,
    /// How many of them are left out at the beginning, and how many there are then.
    pub(super) skip: usize,
    pub(super) count: usize,
}

impl<'a> Part<'a> {
    /// The bytes of the plane with rows of `row` bytes, where a token has `before` bytes in the planes before it.
    pub(super) fn plane(&self, before: usize, row: usize) -> &'a [u8] {
        &self.bytes[2 * self.held * before..][..2 * self.held * row]
    }
}

impl Mover {
    pub(super) fn new(gpu: &'static Gpu, shape: Shape, pages: u32, layers: &[CUdeviceptr]) -> Result<Self> {
        let arrivals = layers.iter().map(|&pool| Arrivals::new(gpu, pool)).collect::<Result<_, _>>()?;
        let lane = || -> Result<_> { Ok((Lane::new(gpu, shape, INCOMING)?, Event::new(gpu)?)) };
        let incoming = Mutex::new(Incoming { lanes: [lane()?, lane()?], next: 0 });
        // One that is always there: when histories have to leave, there may be no memory left.
        let outgoing = Mutex::new(vec![Outgoing::new(gpu, shape)?]);
        let (order, sent, arrived, returned) =
            (SideStream::new(gpu)?, Default::default(), Default::default(), Condvar::new());
        let (pages, copied) = (pages as usize, Event::new(gpu)?);
        Ok(Self { gpu, shape, pages, incoming, order, copied, arrivals, sent, arrived, outgoing, returned })
    }

    /// Appends the keys, then the values, of tokens to `to`, plane by plane, and waits until they are there.
    ///
    /// # Safety
    /// As for [`Pool::read`](super::pool::Pool::read).
    pub(super) unsafe fn read(&self, planes: &[PlanePool], stretch: Stretch<'_>, to: &mut Vec<u8>) -> Result<()> {
        let mut outgoing = self.way_out()?;
        // SAFETY: the event lives as long as the streams do.
        let behind_copies = unsafe { self.copied.hold(outgoing.lane.stream.raw()) }.map_err(Into::into);
        // SAFETY: the caller's.
        let mut read_plane = |plane| unsafe { self.read_by(&mut outgoing, plane, stretch, to) };
        let read = behind_copies.and_then(|()| planes.iter().try_for_each(&mut read_plane));
        // What is on the lane already uses its memory.
        let read = read.inspect_err(|_| drop(outgoing.lane.stream.wait()));
        self.outgoing.lock().push(outgoing);
        self.returned.notify_one();
        read
    }

    /// A free lane: a new one if there is memory for it, else the next that is put back.
    fn way_out(&self) -> Result<Outgoing> {
        if let Some(free) = self.outgoing.lock().pop() {
            return Ok(free);
        }
        match Outgoing::new(self.gpu, self.shape) {
            Err(error) if error.status() == Status::Capacity => {}
            made => return made,
        }
        let mut outgoing = self.outgoing.lock();
        self.returned.wait_while(&mut outgoing, |free| free.is_empty());
        Ok(outgoing.pop().expect("there is one"))
    }

    /// # Safety
    /// As for [`read`](Self::read).
    unsafe fn read_by(
        &self,
        Outgoing { lane, host }: &mut Outgoing,
        plane: &PlanePool,
        stretch: Stretch<'_>,
        to: &mut Vec<u8>,
    ) -> Result<()> {
        let (row, base) = (plane.row_bytes, to.len());
        to.resize(base + 2 * stretch.count * row, 0);
        let mut done = 0;
        while done < stretch.count {
            let count = (stretch.count - done).min(lane.tokens);
            // SAFETY: the lane is ours and the stream is waited for before its memory is used again; of the pool the
            // caller's. What was packed is inside the memory of either side.
            unsafe {
                let tokens = self.tokens(lane, plane, Stretch { first: stretch.first + done, count, ..stretch })?;
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
        planes: &[PlanePool],
        layer: u32,
        (pages, first): (&[u32], usize),
        parts: &[Part<'_>],
    ) -> Result<()> {
        let mut incoming = self.incoming.lock();
        let Incoming { lanes, next } = &mut *incoming;
        let turn = *next;
        *next = (turn + 1) % lanes.len();
        let (lane, event) = &mut lanes[turn];
        // Its pages may have been another owner's, and be copied still.
        // SAFETY: the event lives as long as the streams do.
        unsafe { self.copied.hold(lane.stream.raw()) }?;
        // SAFETY: the caller's.
        let written = unsafe { self.write_planes(lane, planes, (pages, first), parts) }.and_then(|()| {
            event.record(&lane.stream)?;
            // SAFETY: the event lives as long as the streams do.
            unsafe { event.hold(self.order.raw()) }?;
            self.arrivals[layer as usize].mark(&self.order)?;
            // When it is there to be asked after.
            self.sent.fetch_add(1, Ordering::Release);
            Ok(())
        });
        // No other code waits for the copies that were begun before an error.
        written.inspect_err(|_| drop(lane.stream.wait()))
    }

    /// # Safety
    /// As for [`write`](Self::write).
    unsafe fn write_planes(
        &self,
        lane: &mut Lane,
        planes: &[PlanePool],
        to: (&[u32], usize),
        parts: &[Part<'_>],
    ) -> Result<()> {
        let mut before = 0;
        for plane in planes {
            let parts: Vec<_> =
                parts.iter().map(|part| Part { bytes: part.plane(before, plane.row_bytes), ..*part }).collect();
            // SAFETY: the caller's.
            unsafe { self.write_by(lane, plane, to, &parts) }?;
            before += plane.row_bytes;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`write`](Self::write); the bytes of the parts are those of the plane.
    unsafe fn write_by(
        &self,
        lane: &mut Lane,
        plane: &PlanePool,
        (pages, first): (&[u32], usize),
        parts: &[Part<'_>],
    ) -> Result<()> {
        let row = plane.row_bytes;
        let all: usize = parts.iter().map(|part| part.count).sum();
        let mut done = 0;
        while done < all {
            let count = (all - done).min(lane.tokens);
            // SAFETY: what is on the stream before is done with the lane's memory when this begins; both halves of each part
            // are inside its bytes, which the caller keeps; of the pool the caller's.
            unsafe {
                let tokens = self.tokens(lane, plane, Stretch { pages, first: first + done, count })?;
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

    /// Has a page copied to another one. Returns at once; operators wait for it, as for what [`write`](Self::write) brings.
    ///
    /// # Safety
    /// As for [`Pool::copy_page`](super::pool::Pool::copy_page).
    pub(super) unsafe fn copy_page(&self, planes: &[PlanePool], layer: u32, from: u32, to: u32) -> Result<()> {
        // Copies of several threads come one after the other: the event of a layer is behind all of them.
        let _incoming = self.incoming.lock();
        for plane in planes {
            let bytes = 2 * self.shape.page_size as usize * plane.row_bytes;
            let pool = plane.tensor.place()?.0.addr();
            let at = |page: u32| (pool + page as usize * bytes) as CUdeviceptr;
            // SAFETY: both pages are inside the pool, which lives as long as the stream does; the rest is the caller's.
            unsafe { self.order.copy(at(to), at(from), bytes) }?;
        }
        self.copied.record(&self.order)?;
        self.arrivals[layer as usize].mark(&self.order)?;
        self.sent.fetch_add(1, Ordering::Release);
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
    unsafe fn tokens(&self, lane: &mut Lane, plane: &PlanePool, stretch: Stretch<'_>) -> Result<Tokens> {
        let page_size = self.shape.page_size as usize;
        let (from, to) = (stretch.first / page_size, (stretch.first + stretch.count).div_ceil(page_size));
        let pages: Vec<u8> = stretch.pages[from..to].iter().flat_map(|page| page.to_le_bytes()).collect();
        let behind = lane.memory.address() + lane.behind(self.shape) as CUdeviceptr;
        if lane.stream.is_done().unwrap_or(false) {
            lane.numbers.clear();
        }
        // SAFETY: there is room for as many pages as tokens that travel at a time can lie in. The numbers are kept, failed or
        // not: a GPU that shares the host's page tables reads memory that is not pinned by itself, when it gets there.
        let uploaded = unsafe { lane.stream.upload(behind, pages.as_ptr(), pages.len()) };
        lane.numbers.push(pages);
        uploaded?;
        Ok(Tokens {
            pool: plane.tensor.place()?.0.addr() as CUdeviceptr,
            pool_pages: self.pages,
            page_size,
            row_bytes: plane.row_bytes,
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

impl Outgoing {
    fn new(gpu: &'static Gpu, shape: Shape) -> Result<Self> {
        let lane = Lane::new(gpu, shape, OUTGOING)?;
        let host = PinnedMemory::zeroed(gpu, lane.tokens * 2 * shape.row_bytes())?;
        Ok(Self { lane, host })
    }
}

impl Lane {
    /// With memory for so many bytes of tokens, or for one.
    fn new(gpu: &'static Gpu, shape: Shape, bytes: usize) -> Result<Self> {
        let tokens = (bytes / (2 * shape.row_bytes())).max(1);
        let pages = tokens / shape.page_size as usize + 2;
        let stream = SideStream::new(gpu)?;
        let bytes = (tokens * 2 * shape.row_bytes()).next_multiple_of(16) + pages * size_of::<u32>();
        Ok(Self { stream, memory: DeviceMemory::zeroed(gpu, bytes)?, tokens, numbers: Vec::new() })
    }

    /// Where the numbers of pages are in its memory.
    fn behind(&self, shape: Shape) -> usize {
        (self.tokens * 2 * shape.row_bytes()).next_multiple_of(16)
    }
}
