//! Opens a folder of any kind.

use std::io::ErrorKind;
use std::ops::Deref;
use std::path::Path;

use super::check;
use super::contents::{FolderContents, ModelKind, damaged};
use crate::error::{Error, Result, Status};
use crate::json::{Field, Json, Object};

/// Opens a folder of one kind; `None`: of any. `read` reads the part of pagoda.json that is the kind's own; `check` checks the files
/// that only this kind has, when all files are known to be those that were exported.
pub(super) fn open<F: Deref<Target = FolderContents>>(
    path: &Path,
    kind: Option<ModelKind>,
    read: impl FnOnce(FolderContents, &Object<'_>) -> Result<F>,
    check: impl FnOnce(&F) -> Result<()>,
) -> Result<F> {
    if path.as_os_str().is_empty() {
        return Err(Error::invalid("folder", "an empty text; name a model folder"));
    }
    let opened = || {
        let text = text(path)?;
        let json = Json::parse(&text).map_err(|error| damaged(error.message()))?;
        let folder = parse(path, &text, &json, kind, read).map_err(of_document)?;
        check::version(&text, &folder.version)?;
        check::files(&folder)?;
        check(&folder)?;
        Ok(folder)
    };
    let named = |error: Error| Error::new(error.status(), format!("{}: {error}", path.display())).about("folder");
    opened().map_err(named)
}

fn text(path: &Path) -> Result<String> {
    let text = std::fs::read(path.join("pagoda.json")).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let what = if path.is_dir() { "there is no pagoda.json in it" } else { "there is no such folder" };
            let message = format!("{what}: name a folder that `python -m pagoda.export` has made");
            Error::new(Status::NotFound, message)
        }
        _ => Error::new(Status::Io, format!("pagoda.json can not be read: {error}")),
    })?;
    String::from_utf8(text).map_err(|error| damaged(format!("not UTF-8: {error}")))
}

/// Reads pagoda.json; no other file is opened.
fn parse<F: Deref<Target = FolderContents>>(
    path: &Path,
    text: &str,
    json: &Json,
    kind: Option<ModelKind>,
    read: impl FnOnce(FolderContents, &Object<'_>) -> Result<F>,
) -> Result<F> {
    let top = Field::new("", json).open_object()?;
    let contents = FolderContents::read(path, text, &top)?;
    if let Some(kind) = kind.filter(|&kind| kind != contents.kind) {
        let (needed, found) = (kind.name(), contents.kind.name());
        let message = format!("this folder has the kind {found:?}, and one of the kind {needed:?} is needed here");
        let message = format!("pagoda.json: {message}: {}", contents.kind.served_by());
        return Err(Error::new(Status::Unsupported, message));
    }
    let folder = read(contents, &top)?;
    let missing = folder.graphs().find(|name| !folder.has(name));
    match missing.map(|name| damaged(format!("`files` does not have {name}"))) {
        None => Ok(folder),
        Some(error) => Err(error),
    }
}

/// The error of a value, which names its place, as one of the folder.
fn of_document(error: Error) -> Error {
    match error.argument() {
        // "`kv.page_size` is missing", but "`lookup`: expected ...".
        Some(place) if error.message().starts_with("is ") => damaged(format!("`{place}` {}", error.message())),
        Some("") => damaged(error.message()),
        Some(place) => damaged(format!("`{place}`: {}", error.message())),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::super::{AnyFolder, GenerateFolder, ModelFolder};
    use super::*;

    /// The error of a folder with this pagoda.json, which does not depend on what opens it.
    fn refused(json: &str) -> Error {
        let folder = Folder::new();
        std::fs::write(folder.path().join("pagoda.json"), json).unwrap();
        let error = ModelFolder::open(folder.path()).unwrap_err();
        assert_eq!(AnyFolder::open(folder.path()).unwrap_err(), error);
        error
    }

    #[test]
    fn a_kind_that_is_not_known_is_named() {
        for kind in ["rang", "Generate", ""] {
            let error = refused(&format!(r#"{{"format": 1, "kind": "{kind}"}}"#));
            assert_eq!(error.status(), Status::Unsupported);
            let message =
                format!("this folder has the kind {kind:?} and this Pagoda knows \"rank\" and \"generate\": ");
            assert!(error.message().contains(&message), "{error}");
        }
        assert!(refused(r#"{"format": 1, "kind": 2}"#).message().contains("`kind`: expected a text, found 2"));
    }

    #[test]
    fn a_folder_of_another_kind_says_what_it_is_for() {
        let folder = Folder::new();
        let refused = |kind: &str, error: fn(&Path) -> Error| {
            let json = format!(r#"{{"format": 1, "kind": "{kind}", "version": "", "model": "m", "files": {{}}}}"#);
            std::fs::write(folder.path().join("pagoda.json"), json).unwrap();
            let error = error(folder.path());
            assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("folder")));
            error.message().to_owned()
        };
        let error = refused("generate", |path| ModelFolder::open(path).unwrap_err());
        let message = "this folder has the kind \"generate\", and one of the kind \"rank\" is needed here: it is a language \
                       model, which a generator serves";
        assert!(error.contains(message), "{error}");
        let error = refused("rank", |path| GenerateFolder::open(path).unwrap_err());
        let message = "this folder has the kind \"rank\", and one of the kind \"generate\" is needed here: a ranking engine \
                       serves it";
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn no_kind_is_rank() {
        for kind in ["", r#", "kind": "rank""#] {
            let error = refused(&format!(r#"{{"format": 1{kind}, "version": "", "model": "m", "files": {{}}}}"#));
            assert_eq!(error.status(), Status::Model);
            // The first part that only this kind has.
            assert!(error.message().contains("pagoda.json: `block` is missing"), "{error}");
        }
    }

    #[test]
    fn errors_name_their_place() {
        for (json, message) in [
            ("[]", "pagoda.json: expected an object, found a list of 0"),
            ("{", "pagoda.json: not JSON: "),
            (r#"{"format": 1, "format": 2}"#, "pagoda.json: `format` is there twice"),
            (r#"{"format": 1, "version": 3}"#, "pagoda.json: `version`: expected a text, found 3"),
            (
                r#"{"format": 1, "version": "", "model": "../m"}"#,
                "`model`: expected the path of a file inside the folder",
            ),
        ] {
            let error = refused(json);
            assert!(error.status() == Status::Model && error.message().contains(message), "{error}");
        }
    }
}
