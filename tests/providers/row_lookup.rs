//! Lookups that combine rows: the vectors are the CPU's to the bit, and what is missing is told.

use std::collections::HashMap;

use pagoda::device::{BagCall, Gpu, HostRows, MissList, RowCache};
use pagoda_kernels::cuda::{Slots, Type};
use pagoda_kernels::parallel::Serial;
use pagoda_kernels::{Combiner, Pool, f16};
use pagoda_test_support::Random;

use crate::device::{Tensor, bytes};

/// Every kernel, and where they meet.
pub const DIMS: [usize; 14] = [1, 3, 4, 36, 100, 127, 128, 130, 132, 256, 260, 512, 516, 1000];
const COMBINERS: [Option<Combiner>; 4] = [None, Some(Combiner::Sum), Some(Combiner::Mean), Some(Combiner::SqrtN)];
/// What the default vector consists of.
const DEFAULT: f32 = 0.3;

/// What a lookup gave.
pub struct Bagged {
    pub vectors: Vec<f32>,
    pub found: Vec<bool>,
    pub missing: Vec<i32>,
}

/// The bytes of rows, in the type of a table.
pub fn encoded(numbers: &[f32], element: Type) -> Vec<u8> {
    match element {
        Type::F32 => bytes(numbers).to_vec(),
        _ => numbers.iter().flat_map(|&number| f16::from_f32(number).to_le_bytes()).collect(),
    }
}

/// What is not in every call.
#[derive(Clone, Copy, Default)]
pub struct Odd {
    /// Vectors begin where no four numbers may.
    unaligned: bool,
    /// A key that is none.
    no_key: Option<i64>,
}

/// Looks up on a stream of its own.
pub fn bag(
    table: &RowCache,
    dim: usize,
    keys: &[i64],
    pooling: Option<(Combiner, &[i64])>,
    scratch: &mut MissList,
    Odd { unaligned, no_key }: Odd,
) -> Bagged {
    let stream = table.gpu().context().new_stream().unwrap();
    let tensor = |content: &[u8]| Tensor::new(&stream, content);
    let (keys_there, default_row) = (tensor(bytes(keys)), tensor(bytes(&vec![DEFAULT; dim])));
    let offsets = pooling.map(|(_, offsets)| tensor(bytes(offsets)));
    let slots = pooling.map_or(keys.len(), |(_, offsets)| offsets.len() - 1);
    // With room around, to see that nothing is written there.
    let skipped = 64 + if unaligned { 4 } else { 0 };
    let vectors = tensor(&vec![0xff; skipped + slots * dim * 4 + 64]);
    let found = tensor(&vec![0xff; keys.len() + 64]);
    let call = BagCall {
        keys: keys_there.address,
        count: keys.len(),
        slots: pooling.map(|(combiner, _)| Slots {
            offsets: offsets.as_ref().unwrap().address,
            count: slots,
            combiner,
        }),
        vectors: vectors.address + skipped as u64,
        default_row: default_row.address,
        found: Some(found.address),
        no_key,
    };
    stream.synchronize().unwrap();
    // SAFETY: every tensor is as long as the call says, and it is waited for.
    unsafe { table.bag(&call, scratch, stream.cu_stream()) }.unwrap();
    scratch.wait().unwrap();
    let (made, marks) = (vectors.read(&stream), found.read(&stream));
    let around = made[..skipped].iter().chain(&made[skipped + slots * dim * 4..]).chain(&marks[keys.len()..]);
    assert!(around.copied().all(|byte| byte == 0xff), "something was written around the outputs");
    let missing = scratch.missing_places();
    assert_eq!(missing.len(), scratch.missing());
    let listed: Vec<i64> = missing.iter().map(|&place| keys[place as usize]).collect();
    assert_eq!(listed, scratch.missing_keys());
    let numbers = made[skipped..][..slots * dim * 4].as_chunks().0;
    Bagged {
        vectors: numbers.iter().map(|number| f32::from_le_bytes(*number)).collect(),
        found: marks[..keys.len()].iter().map(|mark| *mark == 1).collect(),
        missing,
    }
}

fn random_offsets(random: &mut Random, keys: usize) -> Vec<i64> {
    let mut offsets = vec![0_i64];
    while (*offsets.last().unwrap() as usize) < keys {
        let some = if random.once_in(4) { 0 } else { random.below(12) };
        offsets.push((offsets.last().unwrap() + some as i64).min(keys as i64));
    }
    offsets.extend(vec![keys as i64; random.below(3)]);
    offsets
}

/// A table of random rows, and what is in it as f32.
fn filled(gpu: &'static Gpu, random: &mut Random, dim: usize, element: Type) -> (RowCache, HashMap<i64, Vec<f32>>) {
    let table = RowCache::new(gpu, 4000, dim, element).unwrap();
    let keys: Vec<i64> = (0..300).map(|key| key * 77 - 5000).collect();
    let numbers: Vec<f32> = (0..keys.len() * dim).map(|_| random.number()).collect();
    let (versions, deleted) = (vec![0; keys.len()], vec![false; keys.len()]);
    let rows = encoded(&numbers, element);
    let rows = HostRows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted };
    table.put(&rows, false, &|_| true).unwrap();
    assert_eq!(table.len(), keys.len());
    let kept = |number: &f32| if element == Type::F32 { *number } else { f16::from_f32(*number).to_f32() };
    let there = numbers.chunks_exact(dim).map(|row| row.iter().map(kept).collect());
    (table, keys.into_iter().zip(there).collect())
}

/// Random keys and slots in every type, length and combiner, against the CPU; also with rows that are given.
#[test]
#[ignore = "needs a GPU"]
fn vectors_are_those_of_the_cpu() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::shared(0).unwrap();
    let mut random = Random(5);
    for element in [Type::F32, Type::F16] {
        for dim in DIMS {
            let (table, there) = filled(gpu, &mut random, dim, element);
            let known: Vec<i64> = there.keys().copied().collect();
            for round in 0..12 {
                let count = random.pick(&[0, 1, 5, 33, 200, 1500]);
                let keys: Vec<i64> = (0..count)
                    .map(|_| if random.once_in(6) { random.below(40) as i64 } else { random.pick(&known) })
                    .collect();
                let offsets = random_offsets(&mut random, count);
                let combiner = COMBINERS[round % COMBINERS.len()];
                let what = format!("{element:?} of {dim}, {count} keys, {combiner:?}");
                let mut scratch = MissList::new(gpu, count + round).unwrap();
                // One that is there, and yet none.
                let no_key = (round % 3 == 2).then_some(known[0]);
                // Every third key that is not there is given its row.
                let mut given = HashMap::new();
                let with_given = round >= 6;
                for key in keys.iter().filter(|key| !there.contains_key(key) && **key % 3 == 0 && with_given) {
                    given.insert(*key, (0..dim).map(|_| random.number()).collect::<Vec<f32>>());
                }
                if with_given {
                    let order: Vec<i64> = given.keys().copied().collect();
                    let place = |key: &i64| order.iter().position(|given| given == key).map_or(-1, |at| at as i32);
                    let places: Vec<i32> = keys.iter().map(place).collect();
                    let rows: Vec<f32> = order.iter().flat_map(|key| given[key].clone()).collect();
                    let stream = gpu.context().default_stream();
                    // SAFETY: no lookup is under way.
                    unsafe { scratch.give(gpu, &places, &rows, dim, stream.cu_stream()) }.unwrap();
                }
                let is_none = |key: &i64| no_key == Some(*key);
                let row = |key: &i64| given.get(key).or(there.get(key)).filter(|_| !is_none(key)).cloned();
                let default = |key| vec![if is_none(key) { 0.0 } else { DEFAULT }; dim];
                let rows: Vec<f32> = keys.iter().flat_map(|key| row(key).unwrap_or_else(|| default(key))).collect();
                let expected = match combiner {
                    None => rows,
                    Some(combiner) => {
                        let mut expected = vec![0.0; (offsets.len() - 1) * dim];
                        let pool = Pool { rows: &rows, dim, index: None, offsets: &offsets, combiner };
                        pool.run(&mut expected, &Serial).unwrap();
                        expected
                    }
                };
                let pooling = combiner.map(|combiner| (combiner, &offsets[..]));
                let odd = Odd { unaligned: round % 5 == 4, no_key };
                let bagged = bag(&table, dim, &keys, pooling, &mut scratch, odd);
                assert!(bytes(&bagged.vectors) == bytes(&expected), "{what}: the vectors");
                let found: Vec<bool> = keys.iter().map(|key| row(key).is_some()).collect();
                assert_eq!(bagged.found, found, "{what}");
                let absent = (0..).zip(&keys).filter(|(_, key)| row(key).is_none() && !is_none(key));
                let absent = absent.map(|(place, _)| place);
                let mut missing = bagged.missing;
                missing.sort_unstable();
                assert!(missing.into_iter().eq(absent), "{what}: what is missing");
            }
        }
    }
}

/// Offsets that hold anything: nothing is read or written outside the tensors, and the next lookup is as ever.
#[test]
#[ignore = "needs a GPU"]
fn offsets_that_hold_anything_do_no_harm() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::shared(0).unwrap();
    let mut random = Random(6);
    for dim in [1, 128, 300, 1000] {
        let (table, there) = filled(gpu, &mut random, dim, Type::F32);
        let known: Vec<i64> = there.keys().copied().collect();
        let keys: Vec<i64> = (0..100).map(|_| if random.once_in(2) { 1 } else { random.pick(&known) }).collect();
        let mut scratch = MissList::new(gpu, keys.len()).unwrap();
        for _ in 0..20 {
            let odd = [i64::MIN, i64::MAX, -1, 0, 50, 99, 100, 101, 1 << 40];
            let offsets: Vec<i64> = (0..1 + random.below(60)).map(|_| random.pick(&odd)).collect();
            bag(&table, dim, &keys, Some((Combiner::Mean, &offsets)), &mut scratch, Odd::default());
        }
        let bagged = bag(&table, dim, &keys, Some((Combiner::Sum, &[0, 100])), &mut scratch, Odd::default());
        assert_eq!(bagged.missing.len(), keys.iter().filter(|key| **key == 1).count());
    }
}
