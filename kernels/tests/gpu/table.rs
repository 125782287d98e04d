//! Rows of an embedding table by their keys: what is found, what leaves, and what is seen while rows are put.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use pagoda_kernels::cuda::{DeviceTable, Gpu, TableLookup, TablePut, Type};
use pagoda_kernels::f16;
use pagoda_test_support::Random;

use crate::Context;
use crate::device::{Tensor, bytes};

/// What the default vector consists of.
const DEFAULT: f32 = -7.0;
/// Keys that are easily confused.
const ODD_KEYS: [i64; 8] = [0, -1, 1, 1 << 32, -(1 << 32), i64::MIN, i64::MAX, 1 << 63 >> 1];

struct Table {
    stream: Arc<CudaStream>,
    /// Of the table; only the device reads it.
    _memory: [Tensor; 3],
    row_count: Tensor,
    table: DeviceTable,
}

struct Looked {
    rows: Vec<Vec<f32>>,
    found: Vec<bool>,
    missing: Vec<i32>,
}

impl Table {
    fn new(gpu: &Gpu, rows: usize, dim: usize, element: Type) -> Self {
        let stream = gpu.context().new_stream().unwrap();
        let mut table =
            DeviceTable { sets: 0, rows: 0, versions: 0, set_count: DeviceTable::sets_for(rows), dim, element };
        let zeros = |len: usize| Tensor::new(&stream, &vec![0; len]);
        let row_bytes = dim * if element == Type::F32 { 4 } else { 2 };
        let memory = [zeros(table.sets_bytes()), zeros(table.places() * row_bytes), zeros(table.places() * 8)];
        [table.sets, table.rows, table.versions] = [0, 1, 2].map(|part: usize| memory[part].address);
        Self { row_count: zeros(8), stream, _memory: memory, table }
    }

    /// Rows whose numbers all are `value`.
    fn rows(&self, values: &[f32]) -> Vec<u8> {
        let row = |value: f32| match self.table.element {
            Type::F32 => value.to_le_bytes().repeat(self.table.dim),
            _ => f16::from_f32(value).to_le_bytes().repeat(self.table.dim),
        };
        values.iter().flat_map(|&value| row(value)).collect()
    }

    fn put(&self, gpu: &Gpu, keys: &[i64], values: &[f32], change: impl Fn(&mut TablePut)) {
        let [keys_there, rows] = [bytes(keys), &self.rows(values)].map(|content| Tensor::new(&self.stream, content));
        let mut call = TablePut {
            table: self.table,
            keys: keys_there.address,
            key_count: keys.len(),
            places: None,
            place_count: None,
            rows: rows.address,
            versions: None,
            deleted: None,
            row_count: self.row_count.address,
            count: keys.len(),
            only_present: false,
        };
        change(&mut call);
        // SAFETY: as long as the call says; waited for below.
        unsafe { gpu.table_put(&call, self.stream.cu_stream()) }.unwrap();
        self.stream.synchronize().unwrap();
    }

    fn lookup(&self, gpu: &Gpu, keys: &[i64]) -> Looked {
        let tensor = |content: &[u8]| Tensor::new(&self.stream, content);
        let dim = self.table.dim;
        let (there, progress) = (tensor(bytes(keys)), tensor(&[0; 8]));
        let (output, found) = (tensor(&vec![0xff; keys.len() * dim * 4]), tensor(&vec![0xff; keys.len()]));
        let (missing, count) = (tensor(&vec![0xff; keys.len() * 4]), tensor(&[0xff; 4]));
        let missing_keys = tensor(&vec![0xff; keys.len() * 8]);
        let default = tensor(bytes(&vec![DEFAULT; dim]));
        let call = TableLookup {
            table: self.table,
            keys: there.address,
            count: keys.len(),
            output: output.address,
            default_row: Some(default.address),
            found: Some(found.address),
            missing: missing.address,
            missing_keys: Some(missing_keys.address),
            missing_count: count.address,
            progress: progress.address,
        };
        // SAFETY: as above.
        unsafe { gpu.table_lookup(&call, self.stream.cu_stream()) }.unwrap();
        let words = |tensor: &Tensor| -> Vec<[u8; 4]> { tensor.read(&self.stream).as_chunks().0.to_vec() };
        assert_eq!(progress.read(&self.stream), [0; 8]);
        let count = i32::from_le_bytes(words(&count)[0]) as usize;
        let missing: Vec<i32> = words(&missing)[..count].iter().map(|word| i32::from_le_bytes(*word)).collect();
        let listed = missing_keys.read(&self.stream);
        assert!(bytes(&missing.iter().map(|&place| keys[place as usize]).collect::<Vec<_>>()) == &listed[..8 * count]);
        let numbers: Vec<f32> = words(&output).into_iter().map(f32::from_le_bytes).collect();
        Looked {
            rows: numbers.chunks_exact(dim).map(<[f32]>::to_vec).collect(),
            found: found.read(&self.stream).into_iter().map(|found| found == 1).collect(),
            missing,
        }
    }

    fn len(&self) -> i64 {
        i64::from_le_bytes(self.row_count.read(&self.stream).try_into().unwrap())
    }
}

/// That a lookup agrees with itself, and with what was put: found rows are `expected`, others are the default.
fn check(looked: &Looked, keys: &[i64], expected: &HashMap<i64, f32>, what: &str) {
    for (place, (row, &found)) in looked.rows.iter().zip(&looked.found).enumerate() {
        let value = if found { expected.get(&keys[place]).copied() } else { Some(DEFAULT) };
        assert!(
            value.is_some_and(|value| row.iter().all(|&number| number == value)),
            "{what}: key {} is {row:?}, expected {value:?}",
            keys[place]
        );
    }
    let mut missing = looked.missing.clone();
    missing.sort_unstable();
    let absent: Vec<i32> = (0..).zip(&looked.found).filter(|(_, found)| !**found).map(|(place, _)| place).collect();
    assert_eq!(missing, absent, "{what}");
}

/// Values that rows are made of; every type has them.
fn value_of(random: &mut Random) -> f32 {
    (random.bits() % 2048) as f32
}

/// Every length of row in both types: what was put is found, by the last and highest version, and nothing else is.
pub fn found(context: &Context) {
    let mut random = Random(3);
    for element in [Type::F32, Type::F16] {
        for dim in [1, 2, 3, 4, 7, 8, 16, 31, 32, 36, 64, 100, 128, 130, 132, 256, 300, 512] {
            let what = format!("{element:?} of {dim}");
            let table = Table::new(context.gpu, 2000, dim, element);
            assert!(table.lookup(context.gpu, &[]).missing.is_empty());
            let mut expected = HashMap::new();
            let mut keys: Vec<i64> = (0..400).map(|_| random.bits() as i64).chain(ODD_KEYS).collect();
            let values: Vec<f32> = keys.iter().map(|_| value_of(&mut random)).collect();
            check(&table.lookup(context.gpu, &keys), &keys, &expected, &what);
            table.put(context.gpu, &keys, &values, |_| ());
            expected.extend(keys.iter().copied().zip(values));
            let strangers = (0..100).map(|_| random.bits() as i64).chain(ODD_KEYS.map(|key| key ^ 1 << 20));
            let asked: Vec<i64> = keys.iter().copied().chain(strangers).chain(keys[..50].to_vec()).collect();
            let looked = table.lookup(context.gpu, &asked);
            check(&looked, &asked, &expected, &what);
            // A set of seven that gets eight of 408 keys, among 286: rare, and what it evicts is counted.
            keys.retain(|key| looked.found[asked.iter().position(|asked| asked == key).unwrap()]);
            assert!(keys.len() > 390 && table.len() == keys.len() as i64, "{what}: {} {}", keys.len(), table.len());

            // Version 5 of the first ones; then 4, which is too late, and 5 again, which is not.
            for (version, changes) in [(5_u64, true), (4, false), (5, true)] {
                let some = &keys[..100];
                let values: Vec<f32> = some.iter().map(|_| value_of(&mut random)).collect();
                let versions = Tensor::new(&table.stream, bytes(&vec![version; some.len()]));
                table.put(context.gpu, some, &values, |put| put.versions = Some(versions.address));
                if changes {
                    expected.extend(some.iter().copied().zip(values));
                }
                let looked = table.lookup(context.gpu, &keys);
                assert!(looked.missing.is_empty(), "{what}");
                check(&looked, &keys, &expected, &what);
            }
            // Removed, and with them a stranger; then a change that passes over those that are not there.
            let gone: Vec<i64> = keys[100..150].iter().copied().chain([77]).collect();
            let marks = Tensor::new(&table.stream, &vec![1; gone.len()]);
            table.put(context.gpu, &gone, &vec![1.0; gone.len()], |put| put.deleted = Some(marks.address));
            table.put(context.gpu, &gone, &vec![2.0; gone.len()], |put| put.only_present = true);
            let looked = table.lookup(context.gpu, &keys);
            check(&looked, &keys, &expected, &what);
            assert_eq!(looked.missing.len(), 50, "{what}");
            assert_eq!(table.len(), keys.len() as i64 - 50, "{what}");
            // Put back by their places among the keys, not more than are said to be there.
            let places = Tensor::new(&table.stream, bytes(&[149, 100, -1, 1 << 20, 148, 120]));
            let count = Tensor::new(&table.stream, bytes(&[5]));
            table.put(context.gpu, &keys, &[11.0, 12.0, 13.0, 14.0, 15.0, 16.0], |put| {
                (put.places, put.place_count, put.count) = (Some(places.address), Some(count.address), 6);
            });
            expected.extend([(keys[149], 11.0), (keys[100], 12.0), (keys[148], 15.0)]);
            let looked = table.lookup(context.gpu, &keys);
            check(&looked, &keys, &expected, &what);
            assert_eq!(looked.missing.len(), 47, "{what}");
            assert!(!looked.found[120], "{what}");
        }
    }
}

/// Of a set that is full the row leaves that was not used.
pub fn evicted(context: &Context) {
    let table = Table::new(context.gpu, 7, 8, Type::F32);
    let keys: Vec<i64> = (0..7).collect();
    for key in &keys {
        table.put(context.gpu, &[*key], &[*key as f32], |_| ());
    }
    let mut expected: HashMap<i64, f32> = keys.iter().map(|&key| (key, key as f32)).collect();
    for unused in 0..7 {
        let new = 100 + unused;
        let used: Vec<i64> =
            (0..7).map(|key| if key < unused { key + 100 } else { key }).filter(|&key| key != unused).collect();
        assert!(table.lookup(context.gpu, &used).missing.is_empty());
        table.put(context.gpu, &[new], &[new as f32], |_| ());
        expected.insert(new, new as f32);
        let asked: Vec<i64> = used.iter().copied().chain([new, unused]).collect();
        let looked = table.lookup(context.gpu, &asked);
        check(&looked, &asked, &expected, "a full set");
        assert_eq!(looked.missing, [7], "key {unused} was not used");
    }
    assert_eq!(table.len(), 7);
}

/// Lookups on one stream while rows are put, removed and evicted on others: every row that is found is whole.
pub fn torn(context: &Context) {
    const KEYS: usize = 4096;
    for (element, dim) in [(Type::F32, 128), (Type::F32, 384), (Type::F32, 33), (Type::F16, 64)] {
        // Fewer places than keys: rows leave all the time.
        let table = Table::new(context.gpu, KEYS / 2, dim, element);
        let keys: Vec<i64> = (0..KEYS as i64).collect();
        let writers: Vec<_> = (0..2).map(|_| context.gpu.context().new_stream().unwrap()).collect();
        // A row is its key and the round that it was put in, in numbers that every type has.
        let value = |key: usize, round: usize| (key % 64 + 64 * round) as f32;
        let kept: Vec<_> = (0..16)
            .map(|round| {
                let values: Vec<f32> = (0..KEYS).map(|key| value(key, round)).collect();
                let marks: Vec<u8> = (0..KEYS).map(|key| u8::from((key + round) % 5 == 0)).collect();
                [table.rows(&values), marks].map(|content| Tensor::new(&table.stream, &content))
            })
            .collect();
        let there = Tensor::new(&table.stream, bytes(&keys));
        table.stream.synchronize().unwrap();
        let mut found = 0;
        for round in 0..50 * kept.len() {
            let [rows, marks] = &kept[round % kept.len()];
            for stream in &writers {
                let call = TablePut {
                    table: table.table,
                    keys: there.address,
                    key_count: KEYS,
                    places: None,
                    place_count: None,
                    rows: rows.address,
                    versions: None,
                    deleted: Some(marks.address),
                    row_count: table.row_count.address,
                    count: KEYS,
                    only_present: false,
                };
                // SAFETY: as above; waited for at the end.
                unsafe { context.gpu.table_put(&call, stream.cu_stream()) }.unwrap();
            }
            if round % 8 != 0 {
                continue;
            }
            let looked = table.lookup(context.gpu, &keys);
            for (key, row) in looked.rows.iter().enumerate().filter(|(key, _)| looked.found[*key]) {
                let first = row[0];
                assert!(row.iter().all(|&number| number == first), "{element:?} of {dim}: key {key} is torn: {row:?}");
                assert_eq!(first as usize % 64, key % 64, "{element:?} of {dim}: another key's row");
                found += 1;
            }
        }
        writers.iter().for_each(|stream| stream.synchronize().unwrap());
        assert!(found > KEYS, "hardly anything was found: {found}");
        let looked = table.lookup(context.gpu, &keys);
        assert_eq!(table.len(), looked.found.iter().filter(|found| **found).count() as i64);
    }
}
