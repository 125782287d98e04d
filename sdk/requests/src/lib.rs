//! Requests and answers as JSON: what the lines of the command `pagoda` and the bodies of `pagoda serve` share.
//!
//! Errors name the field and what was found there.

pub mod fields;
#[cfg(feature = "llm")]
pub mod generate;
pub mod rank;
pub mod words;
