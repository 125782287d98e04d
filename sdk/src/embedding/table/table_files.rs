//! Chooses the file of a table. It finds the file again after folders were moved, and builds it if there is none or if
//! the source has changed. It never replaces a file with updates unless the options allow it.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::source_note::SourceNote;
use crate::checksum::xxh3;
use crate::embedding::options::{DISK, DiskOptions, TableSpec};
use crate::embedding::row::{Layout, RowType};
use crate::embedding::source::Source;
use crate::embedding::source::fingerprint::{self, ContentHash};
use crate::embedding::tiers::disk::{self, TableFileInfo, TableId};
use crate::error::{Error, Result, Status};
use crate::files::make_folder;

/// The option that allows dropping updates.
const DROP: &str = "EmbeddingOptions.tiers.disk.drop_updates_on_source_change";

/// The table file of a table. Builds it if necessary.
pub(super) fn prepare(
    options: &DiskOptions,
    source: &Source,
    table: &TableSpec,
    layout: Layout,
    names: &str,
) -> Result<PathBuf> {
    if !options.read_only {
        make_folder(&options.path).map_err(|error| {
            let message = format!("the folder {} can not be made: {error}", options.path.display());
            Error::new(Status::Io, message).about(format!("{DISK}.path"))
        })?;
    }
    let search = Search {
        options,
        table,
        layout,
        names,
        source: relative(&table.path, &fs::canonicalize(&options.path).unwrap_or_else(|_| options.path.clone())),
        content: Cell::new(None),
    };
    match search.run()? {
        Found::Current(path) => Ok(path),
        // Opening it returns the error that there is no file.
        Found::Missing(path, _) if !options.build => Ok(path),
        Found::Missing(path, before) => {
            search.build(source, &path, before)?;
            Ok(path)
        }
    }
}

/// Whether an open table file was built from the present contents of its source.
pub(super) fn is_current(options: &DiskOptions, table: &TableSpec, path: &Path, id: TableId) -> Result<bool> {
    // If it can not be read, the next open returns the error.
    let Ok(Some(info)) = disk::inspect(path) else { return Ok(true) };
    if info.id != id {
        return Ok(false);
    }
    // A file that is not built from the source does not change with it.
    if !options.build {
        return Ok(true);
    }
    let note = SourceNote::read(path)?.filter(|note| note.table == id);
    if note.as_ref().is_some_and(|note| fingerprint::names(&table.path).is_ok_and(|names| names == note.names)) {
        return Ok(true);
    }
    let expected = info.content.or(note.map(|note| note.content));
    Ok(expected == Some(fingerprint::content(&table.path)?))
}

enum Found {
    /// A table file that was built from the present source.
    Current(PathBuf),
    /// There is none; this is its path. A file at the path was built from another source, and may be replaced if it has
    /// not changed since it was inspected.
    Missing(PathBuf, Option<Before>),
}

/// The table that will be replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Before {
    id: TableId,
    updated: bool,
}

impl From<&TableFileInfo> for Before {
    fn from(info: &TableFileInfo) -> Self {
        Self { id: info.id, updated: info.updated }
    }
}

/// The table that a table file belongs to.
#[derive(PartialEq)]
enum Owner {
    This,
    /// Another table: its source exists, or its rows have another type.
    Other,
    /// Unknown: its source was moved or removed, or the note is missing.
    Unknown,
}

struct Search<'a> {
    options: &'a DiskOptions,
    table: &'a TableSpec,
    layout: Layout,
    names: &'a str,
    /// The path of the source, relative to the folder of table files: both may be moved together.
    source: String,
    content: Cell<Option<ContentHash>>,
}

impl Search<'_> {
    fn run(&self) -> Result<Found> {
        let (mut unknown, mut others) = (Vec::new(), Vec::new());
        for path in self.candidates()? {
            let note = SourceNote::read(&path)?;
            match self.owner(&path, note.as_ref()) {
                Owner::This => return self.decide(path, note),
                Owner::Unknown => unknown.push((path, note)),
                Owner::Other => others.push((path, note)),
            }
        }
        // An error about one file is returned only if no other file belongs to this table.
        let mut refused = None;
        for (path, note) in unknown {
            match self.adopts(&path, note) {
                Ok(true) => return Ok(Found::Current(path)),
                Ok(false) => {}
                Err(error) => drop(refused.get_or_insert(error)),
            }
        }
        if let Some(error) = refused {
            return Err(error);
        }
        for (path, note) in others {
            if self.was_swapped(&path, note)? {
                return Ok(Found::Current(path));
            }
        }
        let free = |path: &PathBuf| !path.exists() && !disk::update_log_path(path).exists();
        // Another table may have the path: it was built before its source was moved.
        let path = (0..100).map(|place| self.path(place)).find(free).unwrap_or_else(|| self.path(0));
        Ok(Found::Missing(path, None))
    }

    /// The path of a new table file. Models that share the table share the file.
    fn path(&self, place: u32) -> PathBuf {
        let place = if place == 0 { String::new() } else { format!("\0{place}") };
        let identity = format!("{}\0{}\0{:?}{place}", self.table.name, self.source, self.table.row_type);
        self.options.path.join(format!("{}{:016x}.table", self.prefix(), xxh3(identity.as_bytes())))
    }

    fn prefix(&self) -> String {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '_' };
        format!("{}-", self.table.name.chars().map(plain).collect::<String>())
    }

    /// All table files that may belong to this table: its own path first.
    fn candidates(&self) -> Result<Vec<PathBuf>> {
        let (own, prefix) = (self.path(0), self.prefix());
        // Also a table file that is lost and has left its update log.
        let named = |name: &str| {
            let table = name.strip_suffix(".updates").unwrap_or(name);
            let number = table.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".table"))?;
            let is_number = number.len() == 16 && number.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_number.then(|| self.options.path.join(table))
        };
        let unreadable = |error: io::Error| {
            let path = self.options.path.display();
            let message = format!("the folder {path} can not be read: {error}");
            Error::new(Status::Io, message).about(format!("{DISK}.path"))
        };
        let mut others = Vec::new();
        match fs::read_dir(&self.options.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            items => {
                for item in items.map_err(unreadable)? {
                    let item = item.map_err(unreadable)?;
                    others.extend(item.file_name().to_str().and_then(named).filter(|path| *path != own));
                }
            }
        }
        others.sort_unstable();
        others.dedup();
        let own = Some(own).filter(|own| own.exists() || disk::update_log_path(own).exists());
        Ok(own.into_iter().chain(others).collect())
    }

    /// The row type of the options; `source` if they name none.
    fn kept(&self) -> &'static str {
        self.table.row_type.map_or("source", RowType::name)
    }

    /// The hash of the present contents of the source.
    fn content(&self) -> Result<ContentHash> {
        if self.content.get().is_none() {
            self.content.set(Some(fingerprint::content(&self.table.path)?));
        }
        Ok(self.content.get().expect("set above"))
    }

    fn owner(&self, path: &Path, note: Option<&SourceNote>) -> Owner {
        match note {
            Some(note) if note.kept != self.kept() => Owner::Other,
            Some(note) if note.source == self.source => Owner::This,
            Some(note) if self.options.path.join(&note.source).exists() => Owner::Other,
            // Its name is that of this table.
            None if *path == self.path(0) => Owner::This,
            _ => Owner::Unknown,
        }
    }

    /// Decides about the file of this table.
    fn decide(&self, path: PathBuf, note: Option<SourceNote>) -> Result<Found> {
        let Some(info) = disk::inspect(&path)? else {
            check_no_updates(&path)?;
            return Ok(Found::Missing(path, None));
        };
        let note = note.filter(|note| note.table == info.id);
        if !self.options.build || note.as_ref().is_some_and(|note| note.names == self.names) {
            return Ok(Found::Current(path));
        }
        let built_from = info.content.or(note.map(|note| note.content));
        if built_from.is_some() && built_from == Some(self.content()?) {
            self.write_note(&path, &info);
            return Ok(Found::Current(path));
        }
        let (file, from) = (path.display(), self.table.path.display());
        if self.options.read_only {
            let name = &self.table.name;
            let message = format!("table {name}: {file} was not built from what is now {from}, and read_only is set");
            let message = format!("{message}: open it once without, to build it");
            return Err(Error::new(Status::NotFound, message).about(format!("{DISK}.read_only")));
        }
        if info.updated && built_from.is_none() {
            let note = SourceNote::beside(&path);
            let message = format!("whether the table {file} was built from what is now {from} can not be told");
            let hint = format!("bring {} back, or remove {file} and {file}.updates to build it anew", note.display());
            return Err(Error::new(Status::Io, format!("{message}, and it has updates: {hint} without them")));
        }
        if info.updated && !self.options.drop_updates_on_source_change {
            let message = format!("{from} is not what the table {file} was built from, and the table has updates");
            let hint = "bring that source back, or set this option to build the table anew without them";
            return Err(Error::invalid(DROP, format!("{message}, which a new one would lose: {hint}")));
        }
        Ok(Found::Missing(path, Some((&info).into())))
    }

    /// Whether a table file of an unknown table was built from the source of this table, which was moved since.
    fn adopts(&self, path: &Path, note: Option<SourceNote>) -> Result<bool> {
        let Some(info) = disk::inspect(path)? else { return Ok(false) };
        if info.layout.row_type() != self.layout.row_type() {
            return Ok(false);
        }
        let note = note.filter(|note| note.table == info.id);
        let built_from = info.content.or(note.as_ref().map(|note| note.content));
        if built_from.is_some() && built_from == Some(self.content()?) {
            log::info!("{} is the table of {}, which was moved", path.display(), self.table.path.display());
            self.write_note(path, &info);
            return Ok(true);
        }
        if !info.updated {
            return Ok(false);
        }
        let (file, from, name) = (path.display(), self.table.path.display(), &self.table.name);
        let was = note.map_or_else(
            || "a source that is not recorded".to_owned(),
            |note| format!("{}, which is not there any more", self.options.path.join(note.source).display()),
        );
        let found = format!("{file}, with updates of a table {name:?}, was built from {was}");
        if self.options.drop_updates_on_source_change {
            log::warn!("{found}. It is left alone, and a new table is built from {from}");
            return Ok(false);
        }
        let hint = format!("if they are not for this table, remove {file} and {file}.updates, or set this option");
        Err(Error::invalid(DROP, format!("{found}, and not from what is in {from}: {hint}")))
    }

    /// Whether a table file that seems to belong to another table was built from the source of this table: the source
    /// was moved, and another one took its place.
    fn was_swapped(&self, path: &Path, note: Option<SourceNote>) -> Result<bool> {
        let Some(note) = note.filter(|note| note.kept == self.kept()) else { return Ok(false) };
        let Some(info) = disk::inspect(path)?.filter(|info| info.updated && info.content.is_some()) else {
            return Ok(false);
        };
        if info.content != Some(self.content()?) {
            return Ok(false);
        }
        let there = fingerprint::content(&self.options.path.join(&note.source));
        let swapped = there.is_ok_and(|content| Some(content) != info.content);
        if swapped {
            log::info!("{} is the table of {}, which was moved", path.display(), self.table.path.display());
            self.write_note(path, &info);
        }
        Ok(swapped)
    }

    fn write_note(&self, path: &Path, info: &TableFileInfo) {
        if self.options.read_only {
            return;
        }
        let Some(content) = info.content else { return };
        let (source, names) = (self.source.clone(), self.names.to_owned());
        SourceNote { table: info.id, content, kept: self.kept().to_owned(), source, names }.write(path);
    }

    fn build(&self, source: &Source, path: &Path, before: Option<Before>) -> Result<()> {
        let (file, from) = (path.display(), self.table.path.display());
        if self.options.read_only {
            let message = format!("table {}: {file} is not there, and read_only is set", self.table.name);
            let message = format!("{message}: open it once without, to build it");
            return Err(Error::new(Status::NotFound, message).about(format!("{DISK}.read_only")));
        }
        let replaced = path.exists();
        let row_type = self.layout.row_type();
        let allow = || {
            let now = disk::inspect(path)?.as_ref().map(Before::from);
            if now == before && (now.is_some() || !disk::update_log_path(path).exists()) {
                return Ok(());
            }
            let message = format!("the table {file} was changed by another process while it was looked at");
            Err(Error::new(Status::Busy, format!("{message}: open it again")))
        };
        disk::build_if(source, path, row_type, allow, || {
            fingerprint::unchanged(&self.table.path, self.names).map(Some)
        })?;
        if replaced {
            log::warn!("{file} was built anew, without its updates: {from} is not what it was built from");
        }
        if let Some(info) = disk::inspect(path)? {
            self.write_note(path, &info);
        }
        Ok(())
    }
}

/// Refuses a build that would remove the update log of a table file that is lost.
fn check_no_updates(path: &Path) -> Result<()> {
    let updates = disk::update_log_path(path);
    if !updates.exists() {
        return Ok(());
    }
    let (file, updates) = (path.display(), updates.display());
    let message = format!("{updates} has updates of the table {file}, which is not there");
    let hint = format!("bring it back, or remove {updates} to build the table without them");
    Err(Error::new(Status::Io, format!("{message}: {hint}")))
}

/// A path relative to a folder. Both are absolute.
fn relative(path: &Path, from: &Path) -> String {
    let mut rest = (path.components().peekable(), from.components().peekable());
    while rest.0.peek().is_some() && rest.0.peek() == rest.1.peek() {
        rest.0.next();
        rest.1.next();
    }
    let up = rest.1.map(|_| Component::ParentDir);
    up.chain(rest.0).collect::<PathBuf>().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_from_a_folder() {
        for (path, from, expected) in [
            ("/a/b/t", "/a/b/disk", "../t"),
            ("/a/b", "/a/b", ""),
            ("/a/b/t", "/a/b", "t"),
            ("/x/t", "/a/b", "../../x/t"),
        ] {
            assert_eq!(relative(Path::new(path), Path::new(from)), expected);
        }
    }
}
