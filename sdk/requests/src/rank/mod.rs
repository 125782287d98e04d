//! Requests to rank candidates, and their answers.

mod answer;
mod columns;
mod request;

pub use answer::{Answer, Failed, keys};
pub use columns::Columns;
pub use request::{Features, Line};
