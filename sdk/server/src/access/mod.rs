//! Who may ask: API keys, and the origins of web pages.

pub mod cors;
pub mod keys;

pub use cors::Origins;
pub use keys::Keys;
