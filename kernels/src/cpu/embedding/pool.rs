//! The pooling of embedding rows on the CPU.
//!
//! Reading the rows is what takes the time: wider instructions than every CPU has make it no faster. A slot's vector is
//! made some columns at a time, so that their sums stay in registers while the rows go by.

use crate::common::parallel::{Parallel, run_once};
use crate::cpu::common::Shared;
use crate::cpu::common::copy::CHUNK_BYTES;
use crate::{InputError, Pool};

/// How many columns are summed at once: half the registers that every x86-64 has.
const COLUMNS: usize = 32;

impl Pool<'_> {
    /// Checks, then combines the rows of each slot into `output` (`[R, dim]`). After an error it is as it was.
    pub fn run(&self, output: &mut [f32], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check(output.len())?;
        // The rows read and written before a slot tell how much work comes before it; a task is a chunk of that.
        let work_before = |slot: usize| self.offsets[slot] as usize + slot;
        let chunk = (CHUNK_BYTES / size_of::<f32>() / self.dim).max(1);
        let tasks = work_before(self.slots()).div_ceil(chunk);
        let first_slot = |task: usize| lower_bound(self.slots(), |slot| work_before(slot) < task * chunk);
        let output = Shared(output.as_mut_ptr());
        run_once(parallel, tasks, &|task| {
            for slot in first_slot(task)..first_slot(task + 1) {
                // SAFETY: it was checked that the output has room for every slot; each slot is in one task, which runs
                // once.
                let out = unsafe { std::slice::from_raw_parts_mut(output.pointer().add(slot * self.dim), self.dim) };
                self.combine(slot, out);
            }
        });
        Ok(())
    }

    fn combine(&self, slot: usize, out: &mut [f32]) {
        let rows = self.rows_of(slot);
        if rows.len() == 0 {
            return out.fill(0.0);
        }
        let divisor = self.combiner.divisor(rows.len()) as f32;
        let at = self.combine_columns::<COLUMNS>(0, rows.clone(), divisor, out);
        let at = self.combine_columns::<8>(at, rows.clone(), divisor, out);
        self.combine_columns::<1>(at, rows, divisor, out);
    }

    /// Makes the columns from `at` on, `N` at a time while there are as many. Gives the first column that is not made.
    fn combine_columns<const N: usize>(
        &self,
        mut at: usize,
        rows: impl Iterator<Item = usize> + Clone,
        divisor: f32,
        out: &mut [f32],
    ) -> usize {
        while let Some(out) = out[at..].first_chunk_mut::<N>() {
            let mut numbers = rows.clone().map(|row| {
                let row = &self.rows[row * self.dim..(row + 1) * self.dim];
                row[at..].first_chunk::<N>().expect("the output is as wide as a row")
            });
            // From the first row, not from 0: a single row comes out to the bit.
            let mut sums = *numbers.next().expect("a slot with rows");
            for numbers in numbers {
                for (sum, number) in sums.iter_mut().zip(numbers) {
                    *sum += number;
                }
            }
            *out = sums.map(|sum| sum / divisor);
            at += N;
        }
        at
    }
}

/// The first of `0..end` that does not come before, where all that come before stand first.
fn lower_bound(end: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Random;

    use super::*;
    use crate::Combiner;
    use crate::common::parallel::{Serial, Threads};
    use crate::cpu::reference;

    const COMBINERS: [Combiner; 3] = [Combiner::Sum, Combiner::Mean, Combiner::SqrtN];
    const CASES: u64 = if cfg!(miri) { 2 } else { 200 };

    /// What a [`Pool`] borrows.
    struct Case {
        dim: usize,
        rows: Vec<f32>,
        index: Vec<u32>,
        offsets: Vec<i64>,
    }

    impl Case {
        fn new(seed: u64) -> Self {
            let mut random = Random(seed);
            let dim = random.pick(&[1, 2, 7, 8, 9, 16, 31, 32, 33, 40, 64, 71, 128]);
            let most = if cfg!(miri) { 9 } else { random.pick(&[5, 40, 1500]) };
            let mut offsets = vec![0];
            for _ in 0..random.below(most) {
                let keys = if random.once_in(3) { 0 } else { random.below(12) };
                offsets.push(offsets[offsets.len() - 1] + keys as i64);
            }
            let unique = 1 + random.below(50);
            let rows = (0..unique * dim).map(|_| random.number()).collect();
            let index = (0..offsets[offsets.len() - 1]).map(|_| random.below(unique) as u32).collect();
            Self { dim, rows, index, offsets }
        }

        fn pool(&self, combiner: Combiner) -> Pool<'_> {
            let Self { dim, rows, index, offsets } = self;
            Pool { rows, dim: *dim, index: Some(index), offsets, combiner }
        }

        /// The row of each key, one after the other.
        fn gathered(&self) -> Vec<f32> {
            self.index.iter().flat_map(|&row| &self.rows[row as usize * self.dim..][..self.dim]).copied().collect()
        }
    }

    fn run(pool: &Pool<'_>, parallel: &dyn Parallel) -> Vec<f32> {
        let mut output = vec![f32::NAN; pool.slots() * pool.dim];
        pool.run(&mut output, parallel).unwrap();
        output
    }

    fn bits(numbers: &[f32]) -> Vec<u32> {
        numbers.iter().map(|number| number.to_bits()).collect()
    }

    #[test]
    fn what_the_reference_gives_comes_out() {
        for seed in 0..CASES {
            let case = Case::new(seed);
            for combiner in COMBINERS {
                let pool = case.pool(combiner);
                let (output, expected) = (run(&pool, &Serial), reference::pool(&pool).unwrap());
                assert_eq!(output.len(), expected.len());
                for (got, expected) in output.iter().zip(expected) {
                    // Eleven numbers between -1 and 1 are added, each time rounded.
                    assert!((f64::from(*got) - expected).abs() < 1e-5, "seed {seed} {combiner:?}: {got} {expected}");
                }
            }
        }
    }

    #[test]
    fn neither_threads_nor_an_index_change_a_bit() {
        let threads = Threads::new(3);
        for seed in 0..CASES {
            let case = Case::new(seed);
            let gathered = case.gathered();
            for combiner in COMBINERS {
                let pool = case.pool(combiner);
                let expected = bits(&run(&pool, &Serial));
                assert_eq!(bits(&run(&pool, &threads)), expected, "seed {seed} {combiner:?}");
                let pool = Pool { rows: &gathered, index: None, ..pool };
                assert_eq!(bits(&run(&pool, &threads)), expected, "seed {seed} {combiner:?} gathered");
            }
        }
    }

    #[test]
    fn by_hand() {
        let rows = [1.0, -2.0, 3.0, 4.0, 5.0, -0.0, 7.0, 8.0];
        let offsets = [0, 4, 4, 5, 7];
        let pool = Pool {
            rows: &rows,
            dim: 2,
            index: Some(&[0, 1, 3, 1, 2, 2, 2]),
            offsets: &offsets,
            combiner: Combiner::Sum,
        };
        assert_eq!(run(&pool, &Serial), [14.0, 14.0, 0.0, 0.0, 5.0, 0.0, 10.0, 0.0]);
        let mean = run(&Pool { combiner: Combiner::Mean, ..pool }, &Serial);
        assert_eq!(mean, [3.5, 3.5, 0.0, 0.0, 5.0, 0.0, 5.0, 0.0]);
        let root = 2_f32.sqrt();
        let sqrtn = run(&Pool { combiner: Combiner::SqrtN, ..pool }, &Serial);
        assert_eq!(sqrtn, [7.0, 7.0, 0.0, 0.0, 5.0, 0.0, 10.0 / root, 0.0]);
        // A row alone comes out as it is: -0 stays -0.
        assert_eq!(sqrtn[5].to_bits(), (-0.0_f32).to_bits());
        let nothing = Pool { rows: &[], index: None, offsets: &[0], ..pool };
        assert_eq!(run(&nothing, &Serial), []);
        assert_eq!(run(&Pool { offsets: &[0, 0], ..nothing }, &Serial), [0.0, 0.0]);
    }

    #[test]
    fn bad_input_is_refused_and_nothing_written() {
        let good = Pool { rows: &[1.0; 6], dim: 2, index: None, offsets: &[0, 1, 3], combiner: Combiner::Sum };
        let refuses = |pool: &Pool<'_>, message: &str| {
            let mut output = [7.0; 4];
            assert_eq!(pool.run(&mut output, &Serial).unwrap_err().to_string(), message);
            assert_eq!(output, [7.0; 4]);
            assert!(reference::pool(pool).is_err());
        };
        let offsets = |offsets: &[i64], message: &str| refuses(&Pool { offsets, ..good }, message);
        offsets(&[], "offsets: 0 offsets, expected one more than rows");
        offsets(&[1, 2, 3], "offsets: first offset 1, expected 0");
        offsets(&[i64::MIN, 2, 3], "offsets: first offset -9223372036854775808, expected 0");
        offsets(&[0, 4, 3], "offsets: row 1: offset goes down from 4 to 3");
        offsets(&[0, -1, 3], "offsets: row 0: offset goes down from 0 to -1");
        offsets(&[0, 1, 4], "offsets: last offset 4, expected 3, the number of keys");
        offsets(&[0, i64::MAX], "offsets: last offset 9223372036854775807, expected 3, the number of keys");
        offsets(&[0], "offsets: last offset 0, expected 3, the number of keys");
        refuses(&Pool { dim: 0, ..good }, "rows: 6 numbers do not make rows of 0");
        refuses(&Pool { dim: 4, ..good }, "rows: 6 numbers do not make rows of 4");
        refuses(&Pool { index: Some(&[0, 2, 3]), ..good }, "index: key 2 has row 3, there are 3 rows");
        assert_eq!(good.run(&mut [7.0; 3], &Serial).unwrap_err().to_string(), "vectors: 3 elements, expected 4");
        assert!(good.run(&mut [7.0; 4], &Serial).is_ok());
    }

    #[test]
    fn combiners_have_names() {
        assert_eq!(["sum", "mean", "sqrtn"].map(|name| Combiner::named(name).unwrap()), COMBINERS);
        assert!(["", "Sum", "none", "max"].into_iter().all(|name| Combiner::named(name).is_none()));
    }
}
