//! What is known of a tensor in a trial run: its shape, where its tokens are, and, of small ones such as shapes, masks and positions,
//! the numbers.

use std::rc::Rc;

use half::{bf16, f16};

use super::proto::TensorProto;
use crate::tensor::ElementType;

/// Numbers of larger tensors are not computed.
const MOST_NUMBERS: usize = 1 << 22;
/// Nor are those of larger weights looked at.
const MOST_OF_WEIGHTS: usize = 4096;

#[derive(Clone, Debug, Default)]
pub(super) struct Value {
    /// `None`: not known.
    pub(super) dims: Option<Vec<usize>>,
    /// In rows; `None`: not known. What has fewer than 53 bits is exact.
    pub(super) numbers: Option<Rc<[f64]>>,
    /// Whether the numbers are whole: integers, or truths.
    pub(super) whole: bool,
    /// The dimension that has the tokens, if the numbers are those of tokens.
    pub(super) tokens: Option<usize>,
    /// Whether it depends on what a converted graph does not have: masks, and keys and values of the past.
    pub(super) of_past: bool,
    /// Whether it depends on how many tokens a call brings.
    pub(super) of_count: bool,
}

impl Value {
    /// A tensor of this shape, with numbers that are not known.
    pub(super) fn shaped(dims: &[usize], tokens: Option<usize>) -> Self {
        Self { dims: Some(dims.to_vec()), tokens, ..Self::default() }
    }

    pub(super) fn known(dims: &[usize], numbers: Vec<f64>, whole: bool) -> Self {
        debug_assert_eq!(dims.iter().product::<usize>(), numbers.len());
        Self { dims: Some(dims.to_vec()), numbers: Some(numbers.into()), whole, ..Self::default() }
    }

    /// A weight or a constant.
    pub(super) fn of_tensor(tensor: &TensorProto) -> Self {
        let dims: Option<Vec<usize>> = tensor.dims.iter().map(|&dim| dim.try_into().ok()).collect();
        let Some(dims) = dims else { return Self::default() };
        let element = ElementType::from_number(tensor.data_type);
        let whole = element.is_some_and(|element| !is_float(element));
        let count = dims.iter().try_fold(1_usize, |count, &dim| count.checked_mul(dim));
        let most = if whole { MOST_NUMBERS } else { MOST_OF_WEIGHTS };
        let numbers = element.zip(count.filter(|&count| count <= most));
        let numbers = numbers.and_then(|(element, count)| numbers_of(tensor, element).filter(|it| it.len() == count));
        Self { dims: Some(dims), numbers: numbers.map(Rc::from), whole, ..Self::default() }
    }

    pub(super) fn rank(&self) -> Option<usize> {
        self.dims.as_ref().map(Vec::len)
    }

    /// The number, where it has one alone.
    pub(super) fn single(&self) -> Option<f64> {
        self.numbers.as_ref().filter(|numbers| numbers.len() == 1).map(|numbers| numbers[0])
    }

    /// The numbers as indices or sizes. What is beyond i64, as the end of a slice, is cut to it.
    pub(super) fn ints(&self) -> Option<Vec<i64>> {
        self.numbers
            .as_ref()
            .filter(|_| self.whole)
            .map(|numbers| numbers.iter().map(|&number| number as i64).collect())
    }

    /// The same number everywhere.
    pub(super) fn uniform(&self) -> Option<f64> {
        let numbers = self.numbers.as_ref()?;
        let first = *numbers.first()?;
        numbers.iter().all(|&number| number == first).then_some(first)
    }

    /// The tensor of these dimensions each of whose numbers is one of this tensor's, at the index that `from` gives for the place
    /// of it.
    pub(super) fn picked(&self, dims: &[usize], mut from: impl FnMut(&[usize]) -> usize) -> Self {
        let count: usize = dims.iter().product();
        let pick = |numbers: &Rc<[f64]>| {
            let mut made = Vec::with_capacity(count);
            each_place(dims, |place| made.push(numbers[from(place)]));
            made.into()
        };
        let numbers = self.numbers.as_ref().filter(|_| count <= MOST_NUMBERS).map(pick);
        Self { dims: Some(dims.to_vec()), numbers, tokens: None, ..self.clone() }
    }

    /// This tensor in another shape, with as many numbers.
    pub(super) fn reshaped(&self, dims: Vec<usize>, tokens: Option<usize>) -> Self {
        Self { dims: Some(dims), tokens, ..self.clone() }
    }
}

/// Calls `visit` with each place of a tensor, row by row.
pub(super) fn each_place(dims: &[usize], mut visit: impl FnMut(&[usize])) {
    let mut place = vec![0; dims.len()];
    for _ in 0..dims.iter().product() {
        visit(&place);
        for (at, &dim) in dims.iter().enumerate().rev() {
            place[at] += 1;
            if place[at] < dim {
                break;
            }
            place[at] = 0;
        }
    }
}

/// How far neighbours of each dimension are apart.
pub(super) fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = strides[at] * dims[at];
    }
    strides
}

/// The index of a place in a tensor whose dimensions of 1 are repeated, and which lacks the first ones.
pub(super) fn broadcast_index(place: &[usize], dims: &[usize]) -> usize {
    let place = &place[place.len() - dims.len()..];
    place.iter().zip(dims).fold(0, |index, (&at, &dim)| index * dim + if dim == 1 { 0 } else { at })
}

/// The dimensions of tensors that are combined number by number.
pub(super) fn broadcast(all: &[&[usize]]) -> Option<Vec<usize>> {
    let rank = all.iter().map(|dims| dims.len()).max()?;
    let mut made = vec![1; rank];
    for dims in all {
        for (made, &dim) in made[rank - dims.len()..].iter_mut().zip(*dims) {
            match (*made, dim) {
                (_, 1) => {}
                (1, dim) => *made = dim,
                (known, dim) if known == dim => {}
                _ => return None,
            }
        }
    }
    Some(made)
}

/// Applies a function to the numbers of tensors, place by place.
pub(super) fn combined(inputs: &[&Value], dims: &[usize], function: impl Fn(&[f64]) -> f64) -> Option<Rc<[f64]>> {
    let count: usize = dims.iter().product();
    let all: Option<Vec<_>> =
        inputs.iter().map(|value| Some((value.dims.as_deref()?, value.numbers.as_deref()?))).collect();
    let all = all.filter(|_| count <= MOST_NUMBERS)?;
    let (mut made, mut numbers) = (Vec::with_capacity(count), vec![0.0; all.len()]);
    each_place(dims, |place| {
        for (number, (dims, of)) in numbers.iter_mut().zip(&all) {
            *number = of[broadcast_index(place, dims)];
        }
        made.push(function(&numbers));
    });
    Some(made.into())
}

pub(super) fn is_float(element: ElementType) -> bool {
    matches!(element, ElementType::F32 | ElementType::F64 | ElementType::F16 | ElementType::Bf16)
}

fn numbers_of(tensor: &TensorProto, element: ElementType) -> Option<Vec<f64>> {
    if !tensor.external_data.is_empty() {
        return None;
    }
    let Some(raw) = tensor.raw_data.as_ref().filter(|raw| !raw.is_empty()) else {
        return fields_of(tensor, element);
    };
    fn read<const N: usize>(raw: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        raw.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
    }
    Some(match element {
        ElementType::F32 => read(raw, |bytes| f32::from_le_bytes(bytes).into()),
        ElementType::F64 => read(raw, f64::from_le_bytes),
        ElementType::F16 => read(raw, |bytes| f16::from_le_bytes(bytes).into()),
        ElementType::Bf16 => read(raw, |bytes| bf16::from_le_bytes(bytes).into()),
        ElementType::I64 => read(raw, |bytes| i64::from_le_bytes(bytes) as f64),
        ElementType::I32 => read(raw, |bytes| i32::from_le_bytes(bytes).into()),
        ElementType::Bool | ElementType::U8 => read(raw, |[byte]| byte.into()),
        ElementType::I8 => read(raw, |bytes| i8::from_le_bytes(bytes).into()),
        _ => return None,
    })
}

/// The numbers that are not in `raw_data`. Those of 16 bits are there as their bits.
fn fields_of(tensor: &TensorProto, element: ElementType) -> Option<Vec<f64>> {
    let ints = || tensor.int32_data.iter();
    Some(match element {
        ElementType::F32 => tensor.float_data.iter().map(|&number| number.into()).collect(),
        ElementType::F64 => tensor.double_data.clone(),
        ElementType::F16 => ints().map(|&bits| f16::from_bits(bits as u16).into()).collect(),
        ElementType::Bf16 => ints().map(|&bits| bf16::from_bits(bits as u16).into()).collect(),
        ElementType::I64 => tensor.int64_data.iter().map(|&number| number as f64).collect(),
        ElementType::I32 | ElementType::Bool | ElementType::U8 | ElementType::I8 => {
            ints().map(|&number| number.into()).collect()
        }
        _ => return None,
    })
}
