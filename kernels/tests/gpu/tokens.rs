//! Tokens out of pages and back, as histories leave a pool and come in.

use pagoda_kernels::cuda::{Gpu, Tokens};

use crate::Context;
use crate::common::Random;
use crate::device::{Tensor, bytes};

/// What no token is made of, around and between what is moved.
const POISON: u8 = 0xff;
/// Bytes of a token's keys, for copies of 16, 4 and 2 bytes at a time, in one step of a warp and in several.
const ROWS: [usize; 8] = [2, 70, 36, 140, 48, 512, 10, 2064];

/// Packed and put back in random stretches, out of pages in random order: what is moved, and nothing else.
pub fn moved(context: &Context) {
    let mut random = Random(5);
    for case in 0..context.cases.min(200) {
        one(context.gpu, &mut random, ROWS[case as usize % ROWS.len()]);
    }
}

fn one(gpu: &Gpu, random: &mut Random, row: usize) {
    let stream = gpu.context().new_stream().unwrap();
    let page_size = [8, 16, 40][random.below(3)];
    let pool_pages = 3 + random.below(40);
    let page_bytes = 2 * page_size * row;
    let content: Vec<u8> = (0..pool_pages * page_bytes).map(|_| random.below(255) as u8).collect();
    let mut pages: Vec<i32> = (0..pool_pages as i32).collect();
    (1..pages.len()).rev().for_each(|at| pages.swap(at, random.below(at + 1)));
    pages.truncate(1 + random.below(pool_pages));
    // Some that are not there: their tokens are left out.
    if random.below(2) == 0 {
        let some = random.below(pages.len());
        pages[some] = [-1, pool_pages as i32, i32::MAX][random.below(3)];
    }
    let room = pages.len() * page_size;
    let first = random.below(room);
    // Beyond the last page there is nothing either.
    let count = 1 + random.below(room - first + 3);
    let skip = random.below(5);
    let held = skip + count + random.below(5);
    // Where a token's keys (0) or values (1) are in the pool, if it is there.
    let in_pool = |half: usize, token: usize| {
        let place = first + token;
        let page = usize::try_from(*pages.get(place / page_size)?).ok().filter(|page| *page < pool_pages)?;
        Some(((page * 2 + half) * page_size + place % page_size) * row)
    };
    let in_packed = |half: usize, token: usize| (half * held + skip + token) * row;
    let all = || (0..2).flat_map(|half| (0..count).map(move |token| (half, token)));

    let pool = Tensor::new(&stream, &content);
    let numbers = Tensor::new(&stream, bytes(&pages));
    let packed = Tensor::new(&stream, &vec![POISON; 2 * held * row]);
    let tokens = Tokens {
        pool: pool.address,
        pool_pages,
        page_size,
        row_bytes: row,
        pages: numbers.address,
        page_entries: pages.len(),
        packed: packed.address,
        held,
        skip,
        first,
        count,
    };
    let what =
        format!("{count} tokens of {row} bytes from {first} on, {skip} of {held} left out, pages of {page_size}");
    // SAFETY: the tensors are as long as the call says; the stream is waited for below.
    unsafe { gpu.pack(&tokens, stream.cu_stream()) }.unwrap();
    let mut expected = vec![POISON; 2 * held * row];
    for (half, token) in all() {
        if let Some(at) = in_pool(half, token) {
            expected[in_packed(half, token)..][..row].copy_from_slice(&content[at..at + row]);
        }
    }
    assert!(packed.read(&stream) == expected, "{what}: packed");
    assert!(pool.read(&stream) == content, "{what}: packing leaves the pool alone");

    let incoming: Vec<u8> = (0..2 * held * row).map(|_| random.below(255) as u8).collect();
    let packed = Tensor::new(&stream, &incoming);
    // SAFETY: as above.
    unsafe { gpu.unpack(&Tokens { packed: packed.address, ..tokens }, stream.cu_stream()) }.unwrap();
    let mut expected = content;
    for (half, token) in all() {
        if let Some(at) = in_pool(half, token) {
            expected[at..at + row].copy_from_slice(&incoming[in_packed(half, token)..][..row]);
        }
    }
    assert!(pool.read(&stream) == expected, "{what}: unpacked");
}
