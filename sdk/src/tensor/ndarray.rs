//! Tensors as arrays of the crate ndarray, without copies.

use std::os::raw::c_void;

use ndarray::{Array, ArrayViewD, ArrayViewMutD, Dimension, IxDyn};

use super::{Scalar, Tensor};
use crate::error::{Error, Result, Status};

impl Tensor {
    /// The numbers as an array.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    ///
    /// ```
    /// # fn main() -> pagoda::Result<()> {
    /// let tensor = pagoda::Tensor::from_slice(&[2, 3], &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    /// assert_eq!(tensor.view::<f32>()?[[1, 0]], 4.0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn view<T: Scalar>(&self) -> Result<ArrayViewD<'_, T>> {
        ArrayViewD::from_shape(shape(self.dims()), self.as_slice()?).map_err(|error| odd(self.dims(), &error))
    }

    /// The numbers as an array that can be changed.
    ///
    /// # Errors
    /// As [`as_mut_slice`](Self::as_mut_slice).
    pub fn view_mut<T: Scalar>(&mut self) -> Result<ArrayViewMutD<'_, T>> {
        let dims = self.dims().to_vec();
        ArrayViewMutD::from_shape(shape(&dims), self.as_mut_slice()?).map_err(|error| odd(&dims, &error))
    }

    /// A tensor that takes the memory of an array, also of a part of one. Only an array in another order than the standard one is
    /// copied.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for more dimensions or numbers than a tensor can have.
    ///
    /// ```
    /// # fn main() -> pagoda::Result<()> {
    /// let array = ndarray::arr2(&[[1_i64, 2], [3, 4]]);
    /// assert_eq!(pagoda::Tensor::from_array(array.reversed_axes())?.as_slice::<i64>()?, [1, 3, 2, 4]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_array<T: Scalar + Send, D: Dimension>(array: Array<T, D>) -> Result<Self> {
        let dims: Vec<i64> = array.shape().iter().map(|&dim| dim as i64).collect();
        let array = if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned() };
        let (mut numbers, first) = array.into_raw_vec_and_offset();
        // A part of an array begins inside its memory. An empty array has no first number.
        let numbers_of_it = &mut numbers[first.unwrap_or(0)..];
        let (data, bytes) = (numbers_of_it.as_mut_ptr().cast::<c_void>(), size_of_val(numbers_of_it));
        // SAFETY: the memory is the vector's, which does not move, is not used otherwise, and is freed with the tensor.
        unsafe { Self::from_memory(T::TYPE, &dims, data, bytes, Box::new(numbers)) }
    }
}

fn shape(dims: &[i64]) -> IxDyn {
    IxDyn(&dims.iter().map(|&dim| dim as usize).collect::<Vec<_>>())
}

fn odd(dims: &[i64], error: &ndarray::ShapeError) -> Error {
    Error::new(Status::Internal, format!("a tensor of {dims:?} has other numbers than its dimensions say: {error}"))
}
