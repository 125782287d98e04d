//! Every kernel gives what the reference gives.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::cuda::Attention;
use pagoda_kernels::{bf16, f16};

use crate::Context;
use crate::common::golden::{Golden, rounded};
use crate::common::{self, Case, Random, User, bits, error, tolerance};
use crate::device::OnDevice;

/// Runs `check` for every seed, on as many threads as there are cores, each with a stream of its own: launches from
/// several threads at once are part of what is tried.
pub fn spread(seeds: u64, check: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    check(seed);
                }
            });
        }
    });
}

/// Compares every path with what is expected; the worst errors by path. A call that appends too gives the same output to the
/// bit, and the pool that an append on its own gives.
fn compare<T: OperatorElement>(
    context: &Context,
    case: &Case<T>,
    expected: &[f64],
    what: &str,
    worst: &Mutex<Vec<(String, f64)>>,
) {
    let stream = context.gpu.context().new_stream().unwrap();
    let device = OnDevice::new(case, &stream);
    let mut appended = case.pool.clone();
    reference::paged_kv_append(&case.append(), &mut appended).unwrap();
    for path in device.paths(context.gpu) {
        let output = device.output(context.gpu, path);
        let (also, pool) = device.output_and_pool(context.gpu, path);
        assert!(bits(&also) == bits(&output), "{what} {} {path:?}: appending too changes the output", T::NAME);
        assert!(bits(&pool) == bits(&appended), "{what} {} {path:?}: the pool", T::NAME);
        let some =
            device.output_of(context.gpu, path, Attention { candidates_only: true, ..device.attention(0) }, None);
        assert!(bits(&some) == bits(&case.candidates_of(&output)), "{what} {} {path:?}: candidates alone", T::NAME);
        let error = error(&output, expected);
        assert!(
            error <= tolerance::<T>(),
            "{what} {} {path:?} error {error:e}: D={} H={} page {} group {} window {} alpha {} {:?}",
            T::NAME,
            case.head_size,
            case.heads,
            case.page_size,
            case.target_group_size,
            case.max_attn_len,
            case.alpha,
            case.users
        );
        worse(worst, format!("{} {path:?}", T::NAME), error);
    }
}

/// Keeps the worst error of each path.
pub fn worse(worst: &Mutex<Vec<(String, f64)>>, path: String, error: f64) {
    let mut worst = worst.lock().unwrap();
    match worst.iter_mut().find(|(name, _)| *name == path) {
        Some((_, most)) => *most = most.max(error),
        None => worst.push((path, error)),
    }
}

pub fn print(worst: Mutex<Vec<(String, f64)>>) {
    for (path, error) in worst.into_inner().unwrap() {
        println!("  {path}: worst relative error {error:.2e}");
    }
}

pub fn golden(context: &Context) {
    let worst = Mutex::default();
    for Golden { name, case, expected_output, expected_pool } in common::golden::golden() {
        compare(context, &case, &expected_output, &name, &worst);
        fn short<T: OperatorElement>(
            context: &Context,
            name: &str,
            case: &Case<f32>,
            worst: &Mutex<Vec<(String, f64)>>,
        ) {
            let case = rounded::<T>(case);
            compare(context, &case, &reference::hstu_attention(&case.attention()).unwrap(), name, worst);
        }
        short::<f16>(context, &name, &case, &worst);
        short::<bf16>(context, &name, &case, &worst);
        let stream = context.gpu.context().new_stream().unwrap();
        assert!(bits(&OnDevice::new(&case, &stream).appended(context.gpu)) == bits(&expected_pool), "{name}");
    }
    print(worst);
}

/// As the CPU's random cases, with the head sizes of the fast kernels more often.
pub fn case<T: OperatorElement>(seed: u64) -> Case<T> {
    let case = common::random_case::<T>(seed);
    if T::NAME == "f32" || seed.is_multiple_of(4) {
        return case;
    }
    let mut random = Random(seed ^ 0x5eed);
    let head_size = random.pick(&[32, 64, 64, 128, 128, 256]);
    let mut fast = Case::new(&mut random, &case.users, case.heads, head_size, case.page_size);
    fast.num_contextual = case.num_contextual;
    (fast.alpha, fast.scaling_seqlen) = (case.alpha, case.scaling_seqlen);
    (fast.target_group_size, fast.max_attn_len) = (case.target_group_size, case.max_attn_len);
    fast
}

pub fn random(context: &Context) {
    let worst = Mutex::default();
    fn check<T: OperatorElement>(context: &Context, worst: &Mutex<Vec<(String, f64)>>) {
        spread(context.cases, |seed| {
            let case = case::<T>(seed);
            let expected = reference::hstu_attention(&case.attention()).unwrap();
            compare(context, &case, &expected, &format!("seed {seed}"), worst);
        });
    }
    check::<f32>(context, &worst);
    check::<f16>(context, &worst);
    check::<bf16>(context, &worst);
    print(worst);
}

/// Histories of thousands of tokens: few rows against them, whose keys the Hopper kernel shares out, and many.
pub fn long_case<T: OperatorElement>(seed: u64) -> Case<T> {
    let mut random = Random(seed ^ 0x1046);
    let users: Vec<User> = (0..1 + random.below(3))
        .map(|_| {
            let few = !random.once_in(4);
            let cached = if few { 900 + random.below(3000) } else { random.below(300) };
            let new = if few { random.below(150) } else { 200 + random.below(500) };
            User { cached, new, candidates: random.below(150), contextual: 0 }
        })
        .collect();
    let (head_size, page_size) = (random.pick(&[32, 64, 128, 256]), 8 * (1 + random.below(16)));
    let heads = 1 + random.below(2);
    let mut case = Case::<T>::new(&mut random, &users, heads, head_size, page_size);
    case.target_group_size = random.pick(&[1, 1, 5, 64]);
    case.max_attn_len = random.pick(&[0, 0, 0, 100, 1500]);
    case.scaling_seqlen = 4096;
    case
}

pub fn long(context: &Context) {
    let worst = Mutex::default();
    fn check<T: OperatorElement>(context: &Context, worst: &Mutex<Vec<(String, f64)>>) {
        spread(context.cases / 10, |seed| {
            let case = long_case::<T>(seed);
            let expected = reference::hstu_attention(&case.attention()).unwrap();
            compare(context, &case, &expected, &format!("long seed {seed}"), worst);
        });
    }
    check::<f32>(context, &worst);
    check::<f16>(context, &worst);
    check::<bf16>(context, &worst);
    print(worst);
}

/// Windows much shorter than what is cached: later rows see nothing of the first segments, whose parts then have tiles of their
/// second segment alone, or none.
pub fn windows(context: &Context) {
    let worst = Mutex::default();
    fn check<T: OperatorElement>(context: &Context, worst: &Mutex<Vec<(String, f64)>>) {
        let known = [(256, 8192, 512), (128, 8192, 768), (64, 8192, 1024), (256, 16_384, 1600), (128, 16_384, 1900)];
        spread(known.len() as u64 + context.cases / 40, |seed| {
            let mut random = Random(seed ^ 0x817d);
            let cached = 2000 + random.below(7000);
            let drawn = (random.pick(&[32, 64, 128, 256]), cached, 1 + random.below(cached / 4));
            let (head_size, cached, new) = known.get(seed as usize).copied().unwrap_or(drawn);
            let candidates = if seed < known.len() as u64 { 0 } else { random.below(40) };
            let user = User { cached, new, candidates, contextual: 0 };
            let mut case = Case::<T>::new(&mut random, &[user], 1, head_size, 64);
            case.max_attn_len = match known.get(seed as usize) {
                Some((64, ..)) => 4096,
                Some(_) => 2048,
                None => 1 + random.below(cached / 2) as i64,
            };
            case.scaling_seqlen = 4096;
            let expected = reference::hstu_attention(&case.attention()).unwrap();
            compare(context, &case, &expected, &format!("window seed {seed}"), worst);
        });
    }
    check::<f16>(context, &worst);
    check::<bf16>(context, &worst);
    print(worst);
}

pub fn append(context: &Context) {
    fn check<T: OperatorElement>(context: &Context) {
        spread(context.cases, |seed| {
            let case = case::<T>(1_000_000 + seed);
            let mut expected = case.pool.clone();
            reference::paged_kv_append(&case.append(), &mut expected).unwrap();
            let stream = context.gpu.context().new_stream().unwrap();
            let pool = OnDevice::new(&case, &stream).appended(context.gpu);
            assert!(bits(&pool) == bits(&expected), "seed {seed} {}", T::NAME);
        });
    }
    check::<f32>(context);
    check::<f16>(context);
    check::<bf16>(context);
}
