//! A pool of more than 2^32 elements.

use cudarc::driver::DevicePtr;
use pagoda_kernels::bf16;
use pagoda_kernels::cuda::{Append, Attention, Cache};

use crate::Context;
use crate::common::{Case, Random, User, bits};
use crate::device::OnDevice;

/// The same pages at both ends of a small pool and of a large one: appending there and attending over them gives the same.
pub fn beyond_32_bits(context: &Context) {
    let stream = context.gpu.context().new_stream().unwrap();
    let users = [User { cached: 200, new: 60, candidates: 9, contextual: 0 }; 2];
    let case = Case::<bf16>::new(&mut Random(77), &users, 4, 128, 64);
    let small = OnDevice::new(&case, &stream);
    let page = case.pool.len() / case.pool_pages;
    let large_pages = (1_usize << 32) / page + 100;
    let elements = large_pages * page;
    assert!(elements > 1 << 32);
    // SAFETY: what is read of it is written first, page by page.
    let memory = unsafe { stream.alloc::<u16>(elements) }.expect("8.7 GB of the GPU's memory");
    let address = memory.device_ptr(&stream).0;
    // The last pages of the small pool become the last of the large one; the first stay the first.
    let half = case.pool_pages as i32 / 2;
    let place = |id: i32| if id < half { id as usize } else { large_pages - case.pool_pages + id as usize };
    let bytes = page * 2;
    for id in 0..case.pool_pages as i32 {
        let from = small.cache().pool + (id as usize * bytes) as u64;
        let to = address + (place(id) * bytes) as u64;
        // SAFETY: one page of either pool.
        unsafe { cudarc::driver::result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.unwrap();
    }
    let mut moved = case.clone();
    moved.page_ids.iter_mut().for_each(|id| *id = place(*id) as i32);
    let large = OnDevice::new(&moved, &stream);
    let cache = Cache { pool: address, pool_pages: large_pages, ..large.cache() };
    for path in small.paths(context.gpu) {
        let call = Attention { cache: Some(cache), ..large.attention(0) };
        let (near, far) = (small.output(context.gpu, path), large.output_of(context.gpu, path, call, None));
        assert!(bits(&near) == bits(&far), "{path:?}");
    }
    let near = small.appended(context.gpu);
    // SAFETY: the tensors are as long as the shapes say; the stream is waited for below.
    unsafe { context.gpu.append(&Append { cache, ..large.append() }, stream.cu_stream()) }.unwrap();
    for id in 0..case.pool_pages {
        let at = place(id as i32) * page;
        let far: Vec<u16> = stream.clone_dtoh(&memory.slice(at..at + page)).unwrap();
        let same = near[id * page..(id + 1) * page]
            .iter()
            .zip(&far)
            .all(|(a, b)| a.to_bits() == *b || (a.is_nan() && bf16::from_bits(*b).is_nan()));
        assert!(same, "page {id} at {}", place(id as i32));
    }
}
