//! Folders of the kind `generate`: decoder-only language models.

pub(super) mod folder;
pub(super) mod form;
#[cfg(feature = "llm")]
mod pages_form;
#[cfg(feature = "llm")]
pub(crate) use pages_form::{PagesForm, RewrittenGraphs, SlotNames};
pub(super) mod read;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use folder::{
    Attention, GenerateFolder, Generation, Inputs, KvLayout, Limits, MainModel, Outputs, SpecialTokens, TextFiles,
    WeightFormat,
};
pub use form::{Form, Functional, PastAttention, PastPresent};
pub use pagoda_kernels::KvFormat;

use super::contents::ModelKind;
use super::decoder;
use super::open::open;
use crate::error::{Error, Result, Status};

impl GenerateFolder {
    /// Opens a folder: reads its pagoda.json and checks every file against it, byte by byte. A folder without one is read as a
    /// decoder of another exporter: an ONNX graph with past tensors, config.json or genai_config.json, and tokenizer.json.
    ///
    /// # Errors
    /// NOT_FOUND for a folder or a file that does not exist; UNSUPPORTED for a folder of another format or kind, and for a graph
    /// that takes keys and values in a way that is not known here; MODEL for files that were changed, cut or left out since the
    /// export, for weights that are not finite, for weights in files that the version does not cover, and for a graph that its
    /// configuration contradicts.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        match Self::is_foreign(path.as_ref()) {
            true => decoder::open(path.as_ref()),
            false => open(path.as_ref(), Some(ModelKind::Generate), read::read, |_| Ok(())),
        }
    }

    /// Whether a folder has no pagoda.json and the files of a checkpoint, so that it is read as a decoder of another exporter. No
    /// file is read.
    pub fn is_foreign(path: impl AsRef<Path>) -> bool {
        decoder::is_foreign(path.as_ref())
    }

    /// The Jinja template that makes one text of the messages of a chat, if the model has one.
    ///
    /// # Errors
    /// IO if its file can not be read.
    pub fn chat_template(&self) -> Result<Option<String>> {
        let Some(name) = &self.text.chat_template else { return Ok(None) };
        let path = self.file(name);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Error::new(Status::Io, format!("{}: {error}", path.display())))?;
        if path.extension().is_none_or(|extension| extension != "json") {
            return Ok(Some(text));
        }
        let found = decoder::template_in(&text);
        found.map_err(|error| Error::new(Status::Model, format!("{}: {error}", path.display())))
    }
}
