//! What model folders of every kind have: a pagoda.json with format, kind and version, the graph, and files with
//! hashes.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result, Status};
use crate::json::{Field, Object};
use crate::tensor::ElementType;

/// The format that this version reads.
const FORMAT: u64 = 1;

/// The types that models compute in, by their words in pagoda.json.
pub(super) const TYPES: [(&str, ElementType); 3] =
    [("f32", ElementType::F32), ("f16", ElementType::F16), ("bf16", ElementType::Bf16)];

/// What the model of a folder does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelKind {
    /// It scores candidates for a user's history.
    Rank,
    /// It is a language model: it continues a text.
    Generate,
}

impl ModelKind {
    const ALL: [Self; 2] = [Self::Rank, Self::Generate];

    /// Its word in pagoda.json, such as `rank`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::Generate => "generate",
        }
    }

    /// The end of an error message: what to do with a folder of this kind.
    pub(super) fn served_by(self) -> &'static str {
        match self {
            Self::Rank => "a ranking engine serves it",
            Self::Generate => "it is a language model, which a generator serves",
        }
    }
}

/// What folders of every kind have.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderContents {
    path: PathBuf,
    json: String,
    /// What the model does.
    pub kind: ModelKind,
    /// The hash of all contents: two folders of one version are the same.
    pub version: String,
    /// The file with the graph.
    pub model: String,
    /// The file with the graph that the CPU runs instead, with the same inputs and outputs; `None`: the same one.
    pub cpu_model: Option<String>,
    /// Every file with its size and hash.
    pub files: Vec<FolderFile>,
}

/// A file of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderFile {
    /// Its path in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its contents, in hexadecimal.
    pub sha256: String,
}

impl FolderContents {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of its pagoda.json; of a folder without one, what it would say.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Where one of its files is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A decoder of another exporter: files that no pagoda.json lists. Hashes and version are to be filled in.
    pub(super) fn foreign(path: &Path, model: String, files: Vec<FolderFile>) -> Self {
        let (json, version) = (String::new(), String::new());
        Self { path: path.to_owned(), json, kind: ModelKind::Generate, version, model, cpu_model: None, files }
    }

    /// Sets the text that stands for the pagoda.json that there is not.
    pub(super) fn describe(&mut self, json: String) {
        self.json = json;
    }

    /// A folder with these files, for tests.
    #[cfg(test)]
    pub(super) fn of_files(path: &Path, model: &str, files: Vec<FolderFile>) -> Self {
        let (path, model) = (path.to_owned(), model.to_owned());
        Self { path, json: String::new(), kind: ModelKind::Rank, version: String::new(), model, cpu_model: None, files }
    }

    /// The files with graphs.
    pub(super) fn graphs(&self) -> impl Iterator<Item = &String> {
        [&self.model].into_iter().chain(&self.cpu_model)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.name == name)
    }

    pub(super) fn read(path: &Path, json: &str, top: &Object<'_>) -> Result<Self> {
        let format: u64 = count(&top.value("format")?)?;
        if format != FORMAT {
            let message = format!(
                "pagoda.json: this folder has format {format} and this Pagoda reads format {FORMAT}: export the model \
                 again, or use the Pagoda that it was made for"
            );
            return Err(Error::new(Status::Unsupported, message));
        }
        Ok(Self {
            path: path.to_owned(),
            json: json.to_owned(),
            kind: kind(top)?,
            version: top.value("version")?.text()?.to_owned(),
            model: file_name(&top.value("model")?)?,
            cpu_model: top.get("cpu_model").map(|field| file_name(&field)).transpose()?,
            files: files(&top.value("files")?.open_object()?)?,
        })
    }
}

/// Folders from before there were kinds are of the kind `rank`.
fn kind(top: &Object<'_>) -> Result<ModelKind> {
    let Some(field) = top.get("kind") else { return Ok(ModelKind::Rank) };
    let word = field.text()?;
    ModelKind::ALL.into_iter().find(|kind| kind.name() == word).ok_or_else(|| {
        let message = format!(
            "pagoda.json: this folder has the kind {word:?} and this Pagoda knows {}: use a Pagoda that knows this \
             kind, or export the model as another one",
            ModelKind::ALL.map(|kind| format!("{:?}", kind.name())).join(" and ")
        );
        Error::new(Status::Unsupported, message)
    })
}

fn files(files: &Object<'_>) -> Result<Vec<FolderFile>> {
    let mut known = Vec::new();
    for (name, field) in files.members() {
        if !stays_inside(name) {
            return Err(field.expected("under the path of a file inside the folder"));
        }
        let file = field.open_object()?;
        let (bytes, sha256) = (count(&file.value("bytes")?)?, file.value("sha256")?.text()?.to_owned());
        known.push(FolderFile { name: name.to_owned(), bytes, sha256 });
    }
    Ok(known)
}

/// A path that stays in the folder.
pub(super) fn file_name(field: &Field<'_>) -> Result<String> {
    let name = field.text()?;
    if stays_inside(name) { Ok(name.to_owned()) } else { Err(field.expected("the path of a file inside the folder")) }
}

fn stays_inside(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// A number that is not negative.
pub(super) fn count<T: TryFrom<u64>>(field: &Field<'_>) -> Result<T> {
    let number = field.whole(0..=u64::MAX)?;
    number.try_into().map_err(|_| field.expected("a whole number that is not too large"))
}

/// One of several words.
pub(super) fn choice<T: Copy>(field: &Field<'_>, choices: &[(&str, T)]) -> Result<T> {
    let text = field.text()?;
    let found = choices.iter().find(|(word, _)| *word == text).map(|&(_, meaning)| meaning);
    found.ok_or_else(|| field.expected(&choices.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(" or ")))
}

/// The texts of a list.
pub(super) fn texts(field: &Field<'_>) -> Result<Vec<String>> {
    field.list("texts")?.iter().map(|text| text.text().map(str::to_owned)).collect()
}

/// An error in pagoda.json.
pub(super) fn damaged(message: impl std::fmt::Display) -> Error {
    Error::new(Status::Model, format!("pagoda.json: {message}"))
}
