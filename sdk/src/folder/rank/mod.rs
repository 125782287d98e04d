//! Folders of the kind `rank`: models that score candidates for a user's history.

mod pages_form;
pub(super) mod read;
pub(super) mod tables;

use std::ops::Deref;
use std::path::Path;

use pagoda_kernels::KvFormat;

use super::contents::{FolderContents, FolderFile, ModelKind};
use super::kv_format::{FORMATS, TokenShape, word};
use super::open::open;
use crate::error::Result;
use crate::tensor::ElementType;

/// A model folder of the kind `rank`, read and checked: the fields are what its pagoda.json says. Those of
/// [`FolderContents`] are its own too.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFolder {
    contents: FolderContents,
    /// Whose blocks the model is made of: `nvidia` or `meta`.
    pub block: String,
    /// What the blocks compute in.
    pub compute: ElementType,
    /// How many numbers a row has.
    pub embedding_size: u32,
    /// Where the tables are.
    pub lookup: Lookup,
    /// The key of a feature that a row does not have.
    pub no_key: i64,
    /// What requests bring keys of.
    pub features: Vec<Feature>,
    /// The embedding tables.
    pub tables: Vec<FolderTable>,
    /// What becomes a row of the model.
    pub sequence: Sequence,
    /// How positions are counted; `None` if the model has none.
    pub positions: Option<Positions>,
    /// What is made of times; `None` if the model has none.
    pub times: Option<Times>,
    /// What is scored, in the order of the scores.
    pub tasks: Vec<Task>,
    /// Keys and values.
    pub kv: KvLayout,
    /// How much one request may have.
    pub limits: Limits,
    /// The inputs of the graph, by role.
    pub inputs: Inputs,
    /// The outputs of the graph, by role.
    pub outputs: Outputs,
}

/// Where a model's tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// In files of their own: the graph looks keys up with EmbeddingBag.
    Bag,
    /// In the graph: a key is the number of a row.
    Gather,
}

/// Something that a user, an event or a candidate has a key of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub source: SourceOf,
    /// The table that its keys are looked up in.
    pub table: String,
    /// The graph input that its keys go to.
    pub input: String,
    /// Of an action: the key that candidates have, if they have one.
    pub candidate_key: Option<i64>,
}

/// Whose a feature is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOf {
    /// An item's: events and candidates have it.
    Item,
    /// An action's: events have it.
    Action,
    /// The user's.
    User,
}

/// An embedding table of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderTable {
    /// Its name.
    pub name: String,
    /// Its file; `None` if it is in the graph.
    pub file: Option<String>,
    /// How many rows it has.
    pub rows: u64,
    /// How many numbers a row has.
    pub dim: u32,
    /// Whether its file says which keys the rows have; otherwise row i has key i.
    pub keyed: bool,
    /// The row that keys get which are not there; without it a request that brings one is refused.
    pub default_row: Option<u64>,
}

/// What becomes a row of the model: each row is a list of the features that have keys in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The first rows of every history.
    pub begin: Vec<Vec<String>>,
    /// The rows of one event.
    pub event: Vec<Vec<String>>,
    /// The row of a candidate.
    pub candidate: Vec<String>,
    /// Whether an action has a row of its own, after its item's.
    pub interleaved: bool,
}

/// How positions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// From the beginning of the history.
    FromStart,
    /// From its end.
    FromEnd,
}

/// What is made of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// They are taken as they are.
    Absolute,
    /// They are counted back from the request.
    BeforeRequest,
}

/// Something that candidates are scored for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its name.
    pub name: String,
    /// What the model ends with: `sigmoid`, `none` or `softmax`.
    pub activation: String,
}

/// The shape of keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Whether they can be kept from one request to the next.
    pub cache: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Layers that have them.
    pub layers: u32,
    /// Heads of each.
    pub heads: u32,
    /// The size of a head.
    pub head_size: u32,
    /// Rows of a page.
    pub page_size: u32,
    /// The type of their numbers, which [`KvFormat::Native`] pages hold as they are.
    pub element: ElementType,
    /// How pages hold them.
    pub format: KvFormat,
    /// Bytes of one row in all layers, with its scales.
    pub bytes_per_token: u64,
}

/// How much one request may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Events of a history.
    pub max_history: u64,
    /// Candidates.
    pub max_candidates: u64,
    /// Rows of the longest history.
    pub max_history_rows: u64,
}

/// The inputs of a graph, by role; `None` where it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// The number of each row in its history.
    pub positions: Option<String>,
    /// The time of each row.
    pub times: Option<String>,
    /// Where the rows of each user begin.
    pub row_offsets: String,
    /// How many candidates each user has.
    pub num_candidates: String,
    /// How many rows at the beginning see the whole history.
    pub num_contextual: Option<String>,
    /// How many rows of each user are cached.
    pub cached_len: Option<String>,
    /// Where the pages of each user begin.
    pub page_indptr: Option<String>,
    /// Pages.
    pub page_ids: Option<String>,
    /// Which rows are candidates.
    pub candidate_rows: String,
    /// The pool of each layer.
    pub kv_pools: Vec<String>,
    /// The scales of each layer's pool; none for [`KvFormat::Native`].
    pub kv_scales: Vec<String>,
}

/// The outputs of a graph, by role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// The scores.
    pub scores: String,
    /// The pool of each layer, with what is new.
    pub kv_pools: Vec<String>,
    /// The scales of each layer's pool, with what is new.
    pub kv_scales: Vec<String>,
}

impl ModelFolder {
    /// Opens a folder: reads its pagoda.json and checks every file against it, byte by byte.
    ///
    /// # Errors
    /// NOT_FOUND for a folder or a file that does not exist; UNSUPPORTED for a folder of another format or kind; MODEL
    /// for files that were changed, cut or left out since the export, for weights that are not finite, and for weights
    /// in files that the version does not cover.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        open(path.as_ref(), Some(ModelKind::Rank), read::read, tables::check)
    }

    /// A table by its name.
    pub fn table(&self, name: &str) -> Option<&FolderTable> {
        self.tables.iter().find(|table| table.name == name)
    }

    /// Rows that a history of so many events has.
    pub fn history_rows(&self, events: u64) -> u64 {
        self.sequence.begin.len() as u64 + events * self.sequence.event.len() as u64
    }

    /// Bytes of the keys and values of a history of so many events, in whole pages.
    pub fn history_bytes(&self, events: u64) -> u64 {
        let page = u64::from(self.kv.page_size).max(1);
        self.history_rows(events).next_multiple_of(page) * self.kv.bytes_per_token
    }

    /// Bytes of the dense part: the graph, and weights that it has in files of their own.
    pub fn model_bytes(&self) -> u64 {
        let of_table = |file: &FolderFile| self.tables.iter().any(|table| table.file.as_ref() == Some(&file.name));
        self.files.iter().filter(|file| !of_table(file)).map(|file| file.bytes).sum()
    }

    /// Bytes of the rows of all tables that are in files of their own.
    pub fn table_bytes(&self) -> u64 {
        self.tables.iter().filter(|table| table.file.is_some()).map(|table| table.rows * u64::from(table.dim) * 4).sum()
    }
}

impl KvLayout {
    /// The word of its format, such as `int8`.
    pub fn format_name(&self) -> &'static str {
        word(&FORMATS, self.format)
    }

    /// Bytes of one row in all layers, with its scales, where pages are of another format. `None` for int4 where heads have an
    /// odd size: it has two numbers in a byte.
    pub fn bytes_per_token_in(&self, format: KvFormat) -> Option<u64> {
        let &Self { layers, heads, head_size, element, .. } = self;
        TokenShape { layers, heads, head_size, element }.bytes_if_possible(format)
    }
}

impl Deref for ModelFolder {
    type Target = FolderContents;

    fn deref(&self) -> &FolderContents {
        &self.contents
    }
}
