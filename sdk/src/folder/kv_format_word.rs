//! Formats of pages in serde's data, by their words in pagoda.json.

use pagoda_kernels::KvFormat;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::kv_format::{FORMATS, word};

pub(crate) fn serialize<S: Serializer>(format: &Option<KvFormat>, to: S) -> Result<S::Ok, S::Error> {
    format.map(|format| word(&FORMATS, format)).serialize(to)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<KvFormat>, D::Error> {
    let Some(name) = Option::<String>::deserialize(from)? else { return Ok(None) };
    let known = || FORMATS.map(|(word, _)| word);
    let found = FORMATS.iter().find(|(word, _)| *word == name).map(|&(_, format)| format);
    found
        .map(Some)
        .ok_or_else(|| D::Error::custom(format!("{name:?} is no format of pages: expected one of {:?}", known())))
}
