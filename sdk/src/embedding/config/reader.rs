//! The reader of JSON with places, for the configuration.

pub(super) use crate::json::{Field, Keys, Object};
