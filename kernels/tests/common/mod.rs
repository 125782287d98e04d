//! Random calls, owned, and what tests compare them by.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod golden;
pub mod quantised;

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::parallel::{Parallel, Serial};
use pagoda_kernels::{HstuAttention, InputError, KvView, PagedKvAppend, Pages, Rows, cpu::Isa};
pub use pagoda_test_support::Random;

/// What one user brings.
#[derive(Clone, Copy, Debug, Default)]
pub struct User {
    pub cached: usize,
    pub new: usize,
    pub candidates: usize,
    pub contextual: usize,
}

/// A call of either operator with everything it needs.
#[derive(Clone)]
pub struct Case<T> {
    pub users: Vec<User>,
    pub heads: usize,
    pub head_size: usize,
    pub row_offsets: Vec<i32>,
    pub num_candidates: Vec<i32>,
    pub query: Vec<T>,
    pub key: Vec<T>,
    pub value: Vec<T>,
    pub cached_len: Vec<i32>,
    pub page_indptr: Vec<i32>,
    pub page_ids: Vec<i32>,
    pub pool_pages: usize,
    pub page_size: usize,
    pub pool: Vec<T>,
    pub num_contextual: Option<Vec<i32>>,
    pub alpha: f32,
    pub scaling_seqlen: i64,
    pub target_group_size: i64,
    pub max_attn_len: i64,
    pub candidates_only: bool,
}

impl<T: OperatorElement> Case<T> {
    /// Random rows and cached tokens for the users given. Pages lie in random order, some pages belong to no user, and
    /// every slot without a token holds NaN.
    pub fn new(random: &mut Random, users: &[User], heads: usize, head_size: usize, page_size: usize) -> Self {
        let mut row_offsets = vec![0];
        let mut page_indptr = vec![0];
        for user in users {
            row_offsets.push(row_offsets.last().unwrap() + (user.new + user.candidates) as i32);
            let pages = (user.cached + user.new).div_ceil(page_size);
            page_indptr.push(page_indptr.last().unwrap() + pages as i32);
        }
        let used = *page_indptr.last().unwrap() as usize;
        let pool_pages = used + random.below(3);
        let mut page_ids: Vec<i32> = (0..pool_pages as i32).collect();
        random.shuffle(&mut page_ids);
        page_ids.truncate(used);

        let width = heads * head_size;
        let rows = *row_offsets.last().unwrap() as usize;
        let mut tensor = |len: usize| (0..len).map(|_| T::from_f32(random.number())).collect::<Vec<T>>();
        let [query, key, value] = [0; 3].map(|_| tensor(rows * width));
        let mut pool = vec![T::from_f32(f32::NAN); pool_pages * 2 * page_size * width];
        for (user, pages) in users.iter().zip(page_indptr.windows(2)) {
            let pages = &page_ids[pages[0] as usize..pages[1] as usize];
            for (position, which) in (0..user.cached).flat_map(|position| [(position, 0), (position, 1)]) {
                let page = pages[position / page_size] as usize;
                let slot = (page * 2 + which) * page_size + position % page_size;
                pool[slot * width..(slot + 1) * width].copy_from_slice(&tensor(width));
            }
        }
        let contextual = users.iter().any(|user| user.contextual > 0);
        Case {
            users: users.to_vec(),
            heads,
            head_size,
            row_offsets,
            num_candidates: users.iter().map(|user| user.candidates as i32).collect(),
            query,
            key,
            value,
            cached_len: users.iter().map(|user| user.cached as i32).collect(),
            page_indptr,
            page_ids,
            pool_pages,
            page_size,
            pool,
            num_contextual: contextual.then(|| users.iter().map(|user| user.contextual as i32).collect()),
            alpha: 0.0,
            scaling_seqlen: 64,
            target_group_size: 1,
            max_attn_len: 0,
            candidates_only: false,
        }
    }

    pub fn rows(&self) -> Rows<'_> {
        Rows {
            row_offsets: &self.row_offsets,
            num_candidates: &self.num_candidates,
            total_rows: self.query.len() / (self.heads * self.head_size),
            heads: self.heads,
            head_size: self.head_size,
        }
    }

    pub fn pages(&self) -> Pages<'_> {
        Pages {
            cached_len: &self.cached_len,
            page_indptr: &self.page_indptr,
            page_ids: &self.page_ids,
            pool_pages: self.pool_pages,
            page_size: self.page_size,
        }
    }

    pub fn attention(&self) -> HstuAttention<'_, T> {
        HstuAttention {
            rows: self.rows(),
            query: &self.query,
            key: &self.key,
            value: &self.value,
            cache: Some((self.pages(), KvView::Native(&self.pool))),
            num_contextual: self.num_contextual.as_deref(),
            alpha: self.alpha,
            scaling_seqlen: self.scaling_seqlen,
            target_group_size: self.target_group_size,
            max_attn_len: self.max_attn_len,
            candidates_only: self.candidates_only,
        }
    }

    pub fn append(&self) -> PagedKvAppend<'_, T> {
        PagedKvAppend { rows: self.rows(), key: &self.key, value: &self.value, pages: self.pages() }
    }

    /// The attention's output, written over NaN.
    pub fn output(&self, isa: Isa) -> Vec<T> {
        self.output_on(isa, &Serial).unwrap()
    }

    pub fn output_on(&self, isa: Isa, parallel: &dyn Parallel) -> Result<Vec<T>, InputError> {
        let mut output = vec![T::from_f32(f32::NAN); self.query.len()];
        self.attention().run_with(isa, &mut output, parallel)?;
        Ok(output)
    }

    /// An output of all rows as it is with `candidates_only`.
    pub fn candidates_of<N: Copy + Default>(&self, output: &[N]) -> Vec<N> {
        let (mut output, width) = (output.to_vec(), self.heads * self.head_size);
        for (rows, candidates) in self.row_offsets.windows(2).zip(&self.num_candidates) {
            output[rows[0] as usize * width..(rows[1] - candidates) as usize * width].fill(N::default());
        }
        output
    }

    /// What the rows of one user come out as.
    pub fn rows_of<'a>(&self, user: usize, output: &'a [T]) -> &'a [T] {
        let width = self.heads * self.head_size;
        &output[self.row_offsets[user] as usize * width..self.row_offsets[user + 1] as usize * width]
    }
}

/// A call of random shape; the same for the same seed.
pub fn random_case<T: OperatorElement>(seed: u64) -> Case<T> {
    let mut random = Random(seed);
    let small = cfg!(miri);
    let head_size = match random.below(4) {
        _ if small => random.pick(&[1, 5, 8, 9]),
        0 => 1 + random.below(70),
        1 => random.pick(&[16, 32, 64, 128, 256, 512]),
        2 => random.pick(&[16, 32, 64]),
        _ => random.pick(&[24, 33, 96, 100, 127, 130]),
    };
    // Now and then more rows than a block holds, but not with a large head: the reference is slow.
    let most = if small { 7 } else { [20, 40, 70, 300][random.below(if head_size > 70 { 2 } else { 4 })] };
    let users: Vec<User> = (0..random.below(5))
        .map(|_| {
            let mut part = || if random.below(4) == 0 { 0 } else { random.below(most) };
            let (cached, new, candidates) = (part(), part(), part());
            let contextual = if cached == 0 && random.below(2) == 0 { random.below(new + 1) } else { 0 };
            User { cached, new, candidates, contextual }
        })
        .collect();
    let page_size = 8 * (1 + random.below(16));
    let heads = 1 + random.below(3);
    let mut case = Case::new(&mut random, &users, heads, head_size, page_size);
    case.target_group_size = random.pick(&[1, 1, 2, 3, 7, 64, i64::MAX]);
    case.max_attn_len = random.pick(&[0, 0, 0, 1, 2, 7, 30, 100, i64::MAX]);
    case.scaling_seqlen = random.pick(&[1, 64, 1000]);
    case.alpha = random.pick(&[0.0, 0.0, 0.5, -0.25, 3.0]);
    case
}

/// The same call with only the users named, in that order.
pub fn only<T: OperatorElement>(case: &Case<T>, users: &[usize]) -> Case<T> {
    let mut part = case.clone();
    (part.row_offsets, part.page_indptr) = (vec![0], vec![0]);
    (part.query, part.key, part.value) = (vec![], vec![], vec![]);
    part.page_ids = vec![];
    for &user in users {
        for (to, from) in [(&mut part.query, &case.query), (&mut part.key, &case.key), (&mut part.value, &case.value)] {
            to.extend_from_slice(case.rows_of(user, from));
        }
        part.row_offsets.push((part.query.len() / (case.heads * case.head_size)) as i32);
        let pages = case.page_indptr[user] as usize..case.page_indptr[user + 1] as usize;
        part.page_ids.extend_from_slice(&case.page_ids[pages]);
        part.page_indptr.push(part.page_ids.len() as i32);
    }
    let pick = |from: &[i32]| users.iter().map(|user| from[*user]).collect::<Vec<_>>();
    part.users = users.iter().map(|user| case.users[*user]).collect();
    part.num_candidates = pick(&case.num_candidates);
    part.cached_len = pick(&case.cached_len);
    part.num_contextual = case.num_contextual.as_deref().map(pick);
    part
}

/// The relative error that the specification allows.
pub fn tolerance<T: OperatorElement>() -> f64 {
    match T::NAME {
        "f32" => 1e-5,
        "f16" => 2e-3,
        _ => 1e-2,
    }
}

/// ‖output − expected‖ / ‖expected‖; infinite where a number is not finite.
pub fn error<T: OperatorElement>(output: &[T], expected: &[f64]) -> f64 {
    assert_eq!(output.len(), expected.len());
    let mut difference = 0.0;
    let mut norm = 0.0;
    for (x, y) in output.iter().zip(expected) {
        difference += (f64::from(x.to_f32()) - y).powi(2);
        norm += y * y;
    }
    match difference {
        0.0 => 0.0,
        _ if difference.is_finite() => (difference / norm).sqrt(),
        _ => f64::INFINITY,
    }
}

/// Bits, so that NaN equals itself and 0 differs from -0.
pub fn bits<T: OperatorElement>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.to_f32().to_bits()).collect()
}
