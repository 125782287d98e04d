//! Requests for text.

mod answering;
mod request;

pub use answering::{context_end, early_stop, set_field};
pub use request::{id, parse, read, read_messages, read_prompt};
