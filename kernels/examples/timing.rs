//! Timing.
#[path = "../tests/common/mod.rs"]
mod common;
use common::*;
use pagoda_kernels::{cpu::Isa, parallel::*, *};
use std::time::Instant;

fn best(n: usize, mut f: impl FnMut()) -> (f64, f64) {
    let mut t: Vec<f64> = (0..n)
        .map(|_| {
            let s = Instant::now();
            f();
            s.elapsed().as_secs_f64()
        })
        .collect();
    t.sort_by(f64::total_cmp);
    (t[0], t[n / 2])
}
fn attention<T: Element>(d: usize, isa: Isa, threads: usize, u: User, users: usize) {
    let c = Case::<T>::new(&mut Random(1), &vec![u; users], 4, d, 64);
    let op = c.attention();
    let flop = op.unmasked_pairs() as f64 * 4.0 * d as f64 * 4.0;
    let mut out = vec![T::from_f32(0.0); c.query.len()];
    let pool = Threads::new(threads);
    let (b, m) = best(60, || op.run_with(isa, &mut out, &pool).unwrap());
    println!(
        "{} D={d} {isa:?} threads={threads} {u:?}: best {:.1} median {:.1} GFLOP/s ({:.2} ms)",
        T::NAME,
        flop / b / 1e9,
        flop / m / 1e9,
        b * 1e3
    );
}
fn append(n: usize) {
    let u = User { cached: 256, new: n, candidates: 64, contextual: 0 };
    let c = Case::<f32>::new(&mut Random(1), &[u; 4], 4, 128, 64);
    let mut pool = c.pool.clone();
    let threads = Threads::new(2);
    let bytes = (2 * 4 * n * 4 * 128 * 4) as f64;
    let mut dst = vec![0f32; bytes as usize / 4];
    let src = vec![1f32; bytes as usize / 4];
    let (b, m) = best(100, || c.append().run(&mut pool, &threads).unwrap());
    let (b1, _) = best(100, || c.append().run(&mut pool, &Serial).unwrap());
    let (cb, cm) = best(100, || {
        dst.copy_from_slice(std::hint::black_box(&src));
        std::hint::black_box(&mut dst);
    });
    println!(
        "append n={n}: best {:.2} median {:.2} serial {:.2}; memcpy best {:.2} median {:.2} GB/s",
        bytes / b / 1e9,
        bytes / m / 1e9,
        bytes / b1 / 1e9,
        bytes / cb / 1e9,
        bytes / cm / 1e9
    );
}
fn main() {
    let u = User { cached: 2048, new: 64, candidates: 64, contextual: 0 };
    let what = std::env::args().nth(1).unwrap_or_default();
    if what == "append" {
        for n in [1, 16, 64, 512, 4096] {
            append(n);
        }
        return;
    }
    if what == "small" {
        for (n, t) in [(1, 1), (8, 8), (1, 31), (16, 100), (512, 512)] {
            attention::<f32>(64, Isa::Avx512, 2, User { new: n, candidates: t, ..u }, 4);
        }
        attention::<f32>(64, Isa::Avx512, 2, User { cached: 128, new: 16, candidates: 512, contextual: 0 }, 4);
        return;
    }
    for d in [64, 128] {
        for _ in 0..2 {
            attention::<f32>(d, Isa::Avx512, 2, u, 4);
            attention::<f16>(d, Isa::Avx512, 2, u, 4);
            attention::<bf16>(d, Isa::Avx512, 2, u, 4);
        }
        if what == "all" {
            attention::<f32>(d, Isa::Avx512, 1, u, 4);
            attention::<f32>(d, Isa::Avx2, 2, u, 4);
            attention::<f16>(d, Isa::Avx2, 2, u, 4);
            attention::<bf16>(d, Isa::Avx2, 2, u, 4);
            attention::<f32>(d, Isa::Portable, 2, u, 4);
            attention::<f16>(d, Isa::Portable, 2, u, 4);
        }
    }
}
