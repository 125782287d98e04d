//! Why a call is refused, and the checks that every family of operators makes.

use std::fmt;

/// Why an input was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputError {
    /// The tensor or attribute at fault, by the operator's name for it.
    pub tensor: &'static str,
    /// The user at fault, where one is.
    pub user: Option<usize>,
    /// The value that was found and what was expected.
    pub message: String,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.user {
            Some(user) => write!(f, "{}: user {user}: {}", self.tensor, self.message),
            None => write!(f, "{}: {}", self.tensor, self.message),
        }
    }
}

impl std::error::Error for InputError {}

pub(crate) fn refuse<V>(tensor: &'static str, user: Option<usize>, message: String) -> Result<V, InputError> {
    Err(InputError { tensor, user, message })
}

pub(crate) fn check_output(tensor: &'static str, len: usize, expected: usize) -> Result<(), InputError> {
    if len == expected {
        return Ok(());
    }
    refuse(tensor, None, format!("{len} elements, expected {expected}"))
}

pub(crate) fn expect(tensor: &'static str, len: usize, shape: &[usize]) -> Result<(), InputError> {
    let elements = shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
    if elements != Some(len) {
        return refuse(tensor, None, format!("{len} elements do not make the shape {shape:?}"));
    }
    Ok(())
}
