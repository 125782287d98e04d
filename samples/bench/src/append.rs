//! PagedKvAppend in place, against memcpy of the same bytes.

use pagoda::{ElementType, Model, Result, Tensor};
use pagoda_kernels::parallel::{Parallel, Threads};

use super::{Report, Row, one_node, random, side_by_side};

const USERS: i64 = 8;
const HEADS: i64 = 4;
const NEW: i64 = 512;
const PAGE: i64 = 64;

/// The shapes with a goal.
pub fn measure(threads: u32, report: &Report) -> Result<()> {
    for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
        for head_size in [64, 128] {
            let append = Append::new(element, head_size, threads)?;
            let bytes = append.bytes();
            let mut copy = Memcpy::new(bytes, threads);
            let run = || append.run();
            let (ours, theirs) = side_by_side(31, run, || {
                copy.run();
                Ok(())
            })?;
            let (value, baseline) = (bytes as f64 / ours * 1e-9, bytes as f64 / theirs * 1e-9);
            report.row(Row {
                bench: "append",
                case: format!("{} D={head_size} n={NEW} B={USERS} H={HEADS}", element.name()),
                value,
                unit: "GB/s",
                baseline,
                baseline_name: "memcpy, same threads",
                ratio: value / baseline,
            })?;
        }
    }
    Ok(())
}

struct Append {
    model: Model,
    inputs: Vec<(&'static str, Tensor)>,
}

impl Append {
    fn new(element: ElementType, head_size: i64, threads: u32) -> Result<Self> {
        let (dims, pages) = ([USERS * NEW, HEADS, head_size], USERS * NEW / PAGE);
        let pool_dims = [pages, 2, PAGE, HEADS, head_size];
        let offsets = |step: i64| (0..=USERS).map(|user| (user * step) as i32).collect::<Vec<_>>();
        let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values);
        let page_ids: Vec<i32> = (0..pages).map(|page| ((page * 37 + 11) % pages) as i32).collect();
        let inputs = vec![
            ("kv_pool", random::tensor(element, &pool_dims, 6)?),
            ("key", random::tensor(element, &dims, 4)?),
            ("value", random::tensor(element, &dims, 5)?),
            ("row_offsets", ints(&offsets(NEW))?),
            ("num_candidates", ints(&[0; USERS as usize])?),
            ("cached_len", ints(&[0; USERS as usize])?),
            ("page_indptr", ints(&offsets(NEW / PAGE))?),
            ("page_ids", ints(&page_ids)?),
        ];
        let output = ("kv_pool_out", element, &pool_dims[..]);
        let model = one_node("ai.pagoda.PagedKvAppend", &inputs, output, &[], threads)?;
        Ok(Self { model, inputs })
    }

    fn run(&self) -> Result<()> {
        let inputs: Vec<_> = self.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
        // SAFETY: nothing else uses the pool. It is input and output, as the engine binds it.
        unsafe { self.model.run_bound(&inputs, &[("kv_pool_out", Some(&self.inputs[0].1))], None) }.map(drop)
    }

    /// What is written: the keys and the values of the new rows.
    fn bytes(&self) -> usize {
        let size = |index: usize| self.inputs[index].1.memory().map_or(0, |(_, bytes)| bytes);
        size(1) + size(2)
    }
}

struct Memcpy {
    threads: Threads,
    parts: usize,
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    fn new(bytes: usize, threads: u32) -> Self {
        let parts = threads as usize;
        Self { threads: Threads::new(parts), parts, from: vec![1; bytes], to: vec![2; bytes] }
    }

    fn run(&mut self) {
        let part = self.from.len().div_ceil(self.parts);
        let pieces: Vec<_> = self.to.chunks_mut(part).map(std::sync::Mutex::new).collect();
        self.threads.run(pieces.len(), &|index| {
            let mut to = pieces[index].lock().expect("nothing panics here");
            let from = &self.from[index * part..][..to.len()];
            to.copy_from_slice(from);
        });
    }
}
