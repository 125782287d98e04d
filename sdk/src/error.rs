//! Errors, for Rust and C callers alike.

use std::fmt;

use pagoda_kernels::cuda::CudaError;

/// The result of an operation that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error. The numbers are those of `pagoda_status` in `pagoda.h`; a number is never used again for
/// something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// No error.
    Ok = 0,
    /// An argument has a value that can not be used.
    InvalidArgument = 1,
    /// A handle is NULL, was freed, belongs to another type of object, or never was one.
    InvalidHandle = 2,
    /// A file, a library or a name does not exist.
    NotFound = 3,
    /// What was asked for is not possible with this build, this model or this machine.
    Unsupported = 4,
    /// A limit is reached: a queue is full, a buffer too small, memory exhausted.
    Capacity = 5,
    /// The caller cancelled the run.
    Cancelled = 6,
    /// The model can not be loaded.
    Model = 7,
    /// ONNX Runtime failed while running the model.
    Runtime = 8,
    /// Reading or writing a file failed.
    Io = 9,
    /// A bug in Pagoda: something panicked. The call had no effect that can be relied on.
    Internal = 10,
    /// It is in use, by another process or thread; try again later.
    Busy = 11,
}

impl Status {
    /// Every status, in order of its number.
    pub const ALL: [Self; 12] = [
        Self::Ok,
        Self::InvalidArgument,
        Self::InvalidHandle,
        Self::NotFound,
        Self::Unsupported,
        Self::Capacity,
        Self::Cancelled,
        Self::Model,
        Self::Runtime,
        Self::Io,
        Self::Internal,
        Self::Busy,
    ];

    /// Its name as in `pagoda.h` without the prefix, e.g. `INVALID_ARGUMENT`.
    pub fn name(self) -> &'static str {
        self.c_name().to_str().expect("status names are ASCII")
    }

    pub(crate) fn c_name(self) -> &'static std::ffi::CStr {
        match self {
            Self::Ok => c"OK",
            Self::InvalidArgument => c"INVALID_ARGUMENT",
            Self::InvalidHandle => c"INVALID_HANDLE",
            Self::NotFound => c"NOT_FOUND",
            Self::Unsupported => c"UNSUPPORTED",
            Self::Capacity => c"CAPACITY",
            Self::Cancelled => c"CANCELLED",
            Self::Model => c"MODEL",
            Self::Runtime => c"RUNTIME",
            Self::Io => c"IO",
            Self::Internal => c"INTERNAL",
            Self::Busy => c"BUSY",
        }
    }
}

/// An error: its status, the argument at fault if there is one, and a message that says which value was wrong and what
/// to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: Status,
    argument: Option<String>,
    message: String,
}

impl Error {
    /// An error that is not about one argument.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, argument: None, message: message.into() }
    }

    /// An argument that can not be used.
    pub fn invalid(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, message).about(argument)
    }

    /// The error that a panic becomes.
    pub(crate) fn from_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        Self::new(Status::Internal, format!("a bug in Pagoda, please report it: {text}"))
    }

    /// The same error, said of an argument.
    #[must_use]
    pub fn about(mut self, argument: impl Into<String>) -> Self {
        self.argument = Some(argument.into());
        self
    }

    /// The kind.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The argument at fault, e.g. `inputs[1]` or `options.provider`.
    pub fn argument(&self) -> Option<&str> {
        self.argument.as_deref()
    }

    /// What was wrong and what to do, without the argument's name.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.argument {
            Some(argument) => write!(f, "{argument}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        let status = match &error {
            CudaError::NotBuilt | CudaError::NoDriver | CudaError::Unsupported(_) => Status::Unsupported,
            error if error.is_out_of_memory() => Status::Capacity,
            CudaError::Driver { .. } => Status::Runtime,
        };
        Self::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_positions_agree() {
        for (number, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status as usize, number);
        }
    }

    #[test]
    fn the_text_names_the_argument() {
        let error = Error::invalid("dims[1]", "-3 is negative");
        assert_eq!(error.to_string(), "dims[1]: -3 is negative");
        assert_eq!(error.argument(), Some("dims[1]"));
    }
}
