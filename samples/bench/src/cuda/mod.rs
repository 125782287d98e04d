//! The kernels of the operators on a GPU, against the limits of the same GPU, and the engine on a GPU.

mod append;
mod attention;
mod ceiling;
mod embedding;
mod generate;
mod paged_attention;
mod rank;

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags_enum as Flags};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use pagoda::{Error, Result, Status};
use pagoda_kernels::bf16;
use pagoda_kernels::cuda::Gpu;
use pagoda_test_support::Random;

pub use append::measure as append;
pub use attention::measure as attention;
pub use embedding::measure as embedding;
pub use generate::measure as generate;
pub use paged_attention::measure as paged_attention;
pub use rank::measure as rank;

/// Bytes of inputs that alternate, so that no run finds its own in the L2 cache: several times the size of any.
const ROTATE: usize = 400 << 20;

/// A GPU and the stream that everything here runs on.
struct Bench {
    gpu: Gpu,
    stream: Arc<CudaStream>,
}

impl Bench {
    fn open() -> Result<Self> {
        let gpu = Gpu::open(0).map_err(failed)?;
        let stream = gpu.context().new_stream().map_err(failed)?;
        eprintln!("on {}", gpu.context().name().map_err(failed)?);
        Ok(Self { gpu, stream })
    }

    fn ints(&self, values: &[i32]) -> Result<CudaSlice<i32>> {
        self.stream.clone_htod(values).map_err(failed)
    }

    /// Random bf16 numbers between -1 and 1: a million of them, repeated.
    fn numbers(&self, len: usize, seed: u64) -> Result<CudaSlice<u16>> {
        let mut random = Random(seed);
        let some: Vec<u16> = (0..1 << 20).map(|_| bf16::from_f32(random.number()).to_bits()).collect();
        // SAFETY: every element is written below.
        let mut tensor = unsafe { self.stream.alloc::<u16>(len) }.map_err(failed)?;
        for at in (0..len).step_by(some.len()) {
            let end = len.min(at + some.len());
            self.stream.memcpy_htod(&some[..end - at], &mut tensor.slice_mut(at..end)).map_err(failed)?;
        }
        Ok(tensor)
    }

    fn address<V>(&self, tensor: &CudaSlice<V>) -> CUdeviceptr {
        tensor.device_ptr(&self.stream).0
    }

    /// Seconds of one `run(i)`, i counting up: the median of several series of consecutive runs.
    fn seconds(&self, mut run: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        let mut count = 0;
        let mut stretch = |runs: usize| -> Result<f64> {
            let event = || self.stream.record_event(Some(Flags::CU_EVENT_DEFAULT)).map_err(failed);
            let start = event()?;
            for _ in 0..runs {
                run(count)?;
                count += 1;
            }
            let end = event()?;
            let milliseconds = start.elapsed_ms(&end).map_err(failed)?;
            Ok(f64::from(milliseconds) * 1e-3 / runs as f64)
        };
        stretch(3)?;
        // About 10 ms for each series.
        let runs = (0.01 / stretch(3)?).clamp(3.0, 500.0) as usize;
        let mut times = (0..9).map(|_| stretch(runs)).collect::<Result<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// The offsets of equal shares of the users.
fn offsets(users: usize, step: usize) -> Vec<i32> {
    (0..=users).map(|user| (user * step) as i32).collect()
}

/// Pages in random order, as after some time in service.
fn scattered(pages: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..pages as i32).collect();
    Random(9).shuffle(&mut ids);
    ids
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::new(Status::Runtime, error.to_string())
}
