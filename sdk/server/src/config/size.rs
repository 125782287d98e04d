//! Sizes and times in a configuration file.

use std::fmt;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// Bytes: a whole number, or a text such as `512MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes such as 4096 or \"512MiB\"")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Bytes, E> {
                u64::try_from(number).map(Bytes).map_err(|_| E::custom(format!("{number} bytes are less than none")))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
                pagoda_requests::words::parse_bytes(text).map(Bytes).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Size)
    }
}

/// Seconds above 0, with or without a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = f64::deserialize(deserializer)?;
        let time = Duration::try_from_secs_f64(number).ok().filter(|time| !time.is_zero());
        time.map(Self).ok_or_else(|| D::Error::custom(format!("{number} is not a number of seconds above 0")))
    }
}
