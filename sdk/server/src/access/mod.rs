//! Who may ask, and how much: API keys, their rates, and the origins of web pages.

pub mod cors;
pub mod keys;
mod rates;

pub use cors::Origins;
pub use keys::Keys;
pub use rates::{Caller, Rates};
