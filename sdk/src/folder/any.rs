//! A folder whose kind is not known before it is opened.

use std::ops::Deref;
use std::path::Path;

use super::contents::{FolderContents, ModelKind};
use super::open::open;
use super::{GenerateFolder, ModelFolder, decoder, generate, rank};
use crate::error::Result;

/// A model folder of any kind, read and checked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AnyFolder {
    /// One of the kind `rank`.
    Rank(Box<ModelFolder>),
    /// One of the kind `generate`.
    Generate(Box<GenerateFolder>),
}

impl AnyFolder {
    /// Opens a folder: reads its pagoda.json and checks every file against it, byte by byte. One without it may be a decoder of
    /// another exporter, as for [`GenerateFolder::open`].
    ///
    /// # Errors
    /// As [`ModelFolder::open`] and [`GenerateFolder::open`]; UNSUPPORTED for a kind that this version does not know.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if decoder::is_foreign(path) {
            return decoder::open(path).map(|folder| Self::Generate(Box::new(folder)));
        }
        open(
            path,
            None,
            |contents, top| match contents.kind {
                ModelKind::Rank => rank::read::read(contents, top).map(|folder| Self::Rank(Box::new(folder))),
                ModelKind::Generate => {
                    generate::read::read(contents, top).map(|folder| Self::Generate(Box::new(folder)))
                }
            },
            |folder| match folder {
                Self::Rank(folder) => rank::tables::check(folder),
                Self::Generate(_) => Ok(()),
            },
        )
    }
}

impl Deref for AnyFolder {
    type Target = FolderContents;

    fn deref(&self) -> &FolderContents {
        match self {
            Self::Rank(folder) => folder,
            Self::Generate(folder) => folder,
        }
    }
}
