//! Model folders: `pagoda.export` writes them, an engine serves them. `sdk/docs/model-folder.md` is their contract.
//!
//! [`FolderContents`] is what folders of every kind have; each kind has a module of its own beside it.

mod any;
mod check;
mod contents;
#[cfg(feature = "llm")]
mod convert;
mod decoder;
mod external;
#[cfg(feature = "llm")]
mod fuse;
pub mod generate;
mod graph;
mod kv_format;
#[cfg(feature = "serde")]
pub(crate) mod kv_format_word;
mod numbers;
mod onnx;
mod open;
mod rank;
mod weights;

pub use any::AnyFolder;
pub use contents::{FolderContents, FolderFile, ModelKind};
#[cfg(feature = "llm")]
pub use convert::{ConvertTo, convert};
pub use generate::GenerateFolder;
pub use rank::{
    Feature, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence, SourceOf, Task,
    Times,
};
