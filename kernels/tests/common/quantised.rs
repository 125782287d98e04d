//! The quantised pool of a case.

use half::slice::HalfBitsSliceExt;
use pagoda_kernels::cpu::{Isa, OperatorElement};
use pagoda_kernels::parallel::Parallel;
use pagoda_kernels::{HstuAttention, KvFormat, KvView, QuantisedPool};

use super::Case;

pub const FORMATS: [KvFormat; 3] = [KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8];

/// A quantised pool.
#[derive(Clone, PartialEq, Debug)]
pub struct Pool {
    pub format: KvFormat,
    pub codes: Vec<u8>,
    /// The bits: a number that is none is not equal to itself.
    pub scales: Vec<u16>,
}

impl Pool {
    /// The cached tokens of a case. Slots without a token have scales that are no numbers.
    pub fn new<T: OperatorElement>(case: &Case<T>, format: KvFormat) -> Self {
        let blocks = case.pool_pages * 2 * case.page_size * case.heads;
        let (width, scale) = (format.pool_width(case.head_size), format.scales_width());
        let mut pool = Self { format, codes: vec![0x7f; blocks * width], scales: vec![0x7e00; blocks * scale] };
        for (block, numbers) in case.pool.chunks_exact(case.head_size).enumerate() {
            let numbers: Vec<f32> = numbers.iter().map(|number| number.to_f32()).collect();
            if numbers.iter().all(|number| !number.is_nan()) {
                let writes = pool.writes();
                let scales = &mut writes.scales[block * scale..][..scale];
                format.quantise(&numbers, &mut writes.codes[block * width..][..width], scales);
            }
        }
        pool
    }

    pub fn writes(&mut self) -> QuantisedPool<'_> {
        QuantisedPool { format: self.format, codes: &mut self.codes, scales: self.scales.reinterpret_cast_mut() }
    }

    pub fn view<T>(&self) -> KvView<'_, T> {
        KvView::Quantised { format: self.format, codes: &self.codes, scales: self.scales.reinterpret_cast() }
    }

    /// With the new rows of the call.
    pub fn appended<T: OperatorElement>(&self, case: &Case<T>, isa: Isa, parallel: &dyn Parallel) -> Self {
        let mut pool = self.clone();
        case.append().check().unwrap().run_quantised_with(isa, pool.writes(), parallel).unwrap();
        pool
    }

    pub fn attention<'a, T: OperatorElement>(&'a self, case: &'a Case<T>) -> HstuAttention<'a, T> {
        HstuAttention { cache: Some((case.pages(), self.view())), ..case.attention() }
    }

    pub fn output<T: OperatorElement>(&self, case: &Case<T>, isa: Isa, parallel: &dyn Parallel) -> Vec<T> {
        let mut output = vec![T::from_f32(f32::NAN); case.query.len()];
        self.attention(case).run_with(isa, &mut output, parallel).unwrap();
        output
    }

    /// The case with the numbers that the pool holds, in the type of the case: the cached ones, and the new rows.
    pub fn opened<T: OperatorElement>(&self, case: &Case<T>) -> Case<T> {
        let (mut opened, size, heads) = (case.clone(), case.head_size, case.heads);
        for (user, has) in case.users.iter().enumerate() {
            for position in 0..has.cached + has.new {
                let page = case.page_ids[case.page_indptr[user] as usize + position / case.page_size] as usize;
                for (which, head) in [0, 1].into_iter().flat_map(|which| (0..heads).map(move |head| (which, head))) {
                    let slot = (page * 2 + which) * case.page_size + position % case.page_size;
                    let from = slot * heads + head;
                    let row = case.row_offsets[user] as usize + position.saturating_sub(has.cached);
                    let to = match (position < has.cached, which) {
                        (true, _) => &mut opened.pool[from * size..][..size],
                        (false, 0) => &mut opened.key[(row * heads + head) * size..][..size],
                        (false, _) => &mut opened.value[(row * heads + head) * size..][..size],
                    };
                    self.block(from, to);
                }
            }
        }
        opened
    }

    /// The numbers of a block.
    fn block<T: OperatorElement>(&self, block: usize, to: &mut [T]) {
        let (width, scale) = (self.format.pool_width(to.len()), self.format.scales_width());
        let (codes, scales) = (&self.codes[block * width..][..width], &self.scales[block * scale..][..scale]);
        for (index, to) in to.iter_mut().enumerate() {
            *to = T::from_f32(self.format.dequantise(codes, scales.reinterpret_cast(), index));
        }
    }
}
