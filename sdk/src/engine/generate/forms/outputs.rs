//! The tensors of a call: inputs over the buffers of a step, and logits that go where the step wants them.

use half::f16;

use super::step::Step;
use crate::error::{Error, Result, Status};
use crate::tensor::{ElementType, Scalar, Tensor};

/// A tensor over numbers.
///
/// # Safety
/// The numbers outlive the tensor, and are not written while a run uses it.
pub(super) unsafe fn over<T: Scalar>(dims: &[usize], numbers: &[T]) -> Result<Tensor> {
    // SAFETY: the caller's; a run only reads its inputs.
    unsafe { over_bytes(T::TYPE, dims, numbers.as_ptr().cast_mut().cast(), size_of_val(numbers)) }
}

/// A tensor over bytes.
///
/// # Safety
/// The bytes outlive the tensor; while a run uses it nothing else writes to them, and nothing reads them if it is an output.
pub(super) unsafe fn over_bytes(element: ElementType, dims: &[usize], data: *mut u8, bytes: usize) -> Result<Tensor> {
    let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
    // SAFETY: the caller's.
    unsafe { Tensor::from_memory(element, &dims, data.cast(), bytes, Box::new(())) }
}

/// The place of a call's logits among all, if they are just those that are wanted, in the order of the call.
pub(super) fn in_place(step: &Step<'_>, call: &[usize]) -> Option<std::ops::Range<usize>> {
    let (first, _) = step.logits(call[0]);
    let mut end = first.start;
    for &index in call {
        let (places, _) = step.logits(index);
        if places.start != end || places.len() != step.rows(index) {
            return None;
        }
        end = places.end;
    }
    Some(first.start..end)
}

/// Copies the logits of a call, `[sequences, rows, vocab]`, to where the step has them.
pub(super) fn copy_logits(step: &Step<'_>, call: &[usize], vocab: usize, from: &Tensor, to: &mut [f32]) -> Result<()> {
    let rows = step.rows(call[0]);
    let dims = [call.len() as i64, rows as i64, vocab as i64];
    if *from.dims() != dims {
        let message =
            format!("the model's logits have the shape {:?}, expected {dims:?}: export it again", from.dims());
        return Err(Error::new(Status::Model, message));
    }
    let narrow = if from.element_type() == ElementType::F16 { Some(from.as_slice::<f16>()?) } else { None };
    let wide = if narrow.is_none() { from.as_slice::<f32>()? } else { &[] };
    for (sequence, &index) in call.iter().enumerate() {
        let (places, wanted) = step.logits(index);
        for (place, row) in places.zip(wanted) {
            let (at, to) = ((sequence * rows + row) * vocab, &mut to[place * vocab..][..vocab]);
            match narrow {
                None => to.copy_from_slice(&wide[at..at + vocab]),
                Some(narrow) => to.iter_mut().zip(&narrow[at..]).for_each(|(to, from)| *to = from.to_f32()),
            }
        }
    }
    Ok(())
}

/// Checks the size of what a model has returned.
pub(super) fn check_bytes(found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let message =
        format!("the model has returned {found} bytes of keys or values, expected {expected}: export it again");
    Err(Error::new(Status::Model, message))
}
