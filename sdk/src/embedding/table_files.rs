//! Which file holds a table: found again when folders were moved, built when there is none or the source has changed, and
//! never replaced where that would lose updates unasked.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::config::{DiskConfig, TableConfig};
use super::disk::{self, Facts};
use super::origin::{self, Note};
use super::row::{Layout, RowType};
use super::source::Source;
use crate::error::{Error, Result, Status};
use crate::files::make_folder;
use crate::store::checksum;

/// The option that lets updates go.
const DROP: &str = "persistent_db.drop_updates_on_source_change";

/// The table file of a table, built if need be.
pub(super) fn prepare(
    config: &DiskConfig,
    source: &Source,
    table: &TableConfig,
    layout: Layout,
    names: &str,
) -> Result<PathBuf> {
    if !config.read_only {
        make_folder(&config.path).map_err(|error| {
            Error::new(Status::Io, format!("the folder {} can not be made: {error}", config.path.display()))
                .about("persistent_db.path")
        })?;
    }
    let search = Search {
        config,
        table,
        layout,
        names,
        source: relative(&table.path, &fs::canonicalize(&config.path).unwrap_or_else(|_| config.path.clone())),
        content: Cell::new(None),
    };
    match search.run()? {
        Found::Current(path) => Ok(path),
        // Disk::open says that it is not there.
        Found::Missing(path, _) if !config.load => Ok(path),
        Found::Missing(path, before) => {
            search.build(source, &path, before)?;
            Ok(path)
        }
    }
}

/// Whether a table file that is open was made from what its source is now.
pub(super) fn is_current(config: &DiskConfig, table: &TableConfig, path: &Path, number: u64) -> Result<bool> {
    // What can not be read is for the next one who opens it to say.
    let Ok(Some(facts)) = disk::look(path) else { return Ok(true) };
    if facts.number != number {
        return Ok(false);
    }
    // What is not loaded from the source does not change with it.
    if !config.load {
        return Ok(true);
    }
    let note = Note::read(path)?.filter(|note| note.table == number);
    if note.as_ref().is_some_and(|note| origin::names(&table.path).is_ok_and(|names| names == note.names)) {
        return Ok(true);
    }
    let expected = facts.content.or(note.map(|note| note.content));
    Ok(expected == Some(origin::content(&table.path)?))
}

enum Found {
    /// A table file that was built from the source as it is.
    Current(PathBuf),
    /// There is none; this is where it belongs. One that is there was built from something else, and may be replaced as
    /// long as it is the one that was looked at.
    Missing(PathBuf, Option<Before>),
}

/// The table that is to be replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Before {
    number: u64,
    updated: bool,
}

impl From<&Facts> for Before {
    fn from(facts: &Facts) -> Self {
        Self { number: facts.number, updated: facts.updated }
    }
}

/// Whose a table file is.
#[derive(PartialEq)]
enum Owner {
    This,
    /// A table with another source that is there, or with rows of another type.
    Other,
    /// Its source is not where it was, or nobody knows where that was.
    Gone,
}

struct Search<'a> {
    config: &'a DiskConfig,
    table: &'a TableConfig,
    layout: Layout,
    names: &'a str,
    /// Where the source lies, from the folder of table files: both may be moved together.
    source: String,
    content: Cell<Option<u64>>,
}

impl Search<'_> {
    fn run(&self) -> Result<Found> {
        let (mut gone, mut others) = (Vec::new(), Vec::new());
        for path in self.candidates()? {
            let note = Note::read(&path)?;
            match self.owner(&path, note.as_ref()) {
                Owner::This => return self.decide(path, note),
                Owner::Gone => gone.push((path, note)),
                Owner::Other => others.push((path, note)),
            }
        }
        // All are looked at before one that can not be this table's is an error.
        let mut refused = None;
        for (path, note) in gone {
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
        let free = |path: &PathBuf| !path.exists() && !disk::updates_of(path).exists();
        // Another table may lie where this one belongs: it was there before its source was moved.
        let path = (0..100).map(|place| self.path(place)).find(free).unwrap_or_else(|| self.path(0));
        Ok(Found::Missing(path, None))
    }

    /// Where a new table file goes. Models that share the table share the file.
    fn path(&self, place: u32) -> PathBuf {
        let place = if place == 0 { String::new() } else { format!("\0{place}") };
        let identity = format!("{}\0{}\0{:?}{place}", self.table.name, self.source, self.table.row_type);
        self.config.path.join(format!("{}{:016x}.table", self.prefix(), checksum(identity.as_bytes())))
    }

    fn prefix(&self) -> String {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '_' };
        format!("{}-", self.table.name.chars().map(plain).collect::<String>())
    }

    /// Every table file that may be this table's: where it belongs first.
    fn candidates(&self) -> Result<Vec<PathBuf>> {
        let (own, prefix) = (self.path(0), self.prefix());
        // Also one that is lost and has left its updates.
        let named = |name: &str| {
            let table = name.strip_suffix(".updates").unwrap_or(name);
            let number = table.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".table"))?;
            let is_number = number.len() == 16 && number.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_number.then(|| self.config.path.join(table))
        };
        let unreadable = |error: io::Error| {
            let path = self.config.path.display();
            Error::new(Status::Io, format!("the folder {path} can not be read: {error}")).about("persistent_db.path")
        };
        let mut others = Vec::new();
        match fs::read_dir(&self.config.path) {
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
        let own = Some(own).filter(|own| own.exists() || disk::updates_of(own).exists());
        Ok(own.into_iter().chain(others).collect())
    }

    /// As what rows are kept, as far as the configuration says so.
    fn kept(&self) -> &'static str {
        self.table.row_type.map_or("source", RowType::name)
    }

    /// The checksum of what the source is now.
    fn content(&self) -> Result<u64> {
        if self.content.get().is_none() {
            self.content.set(Some(origin::content(&self.table.path)?));
        }
        Ok(self.content.get().expect("set above"))
    }

    fn owner(&self, path: &Path, note: Option<&Note>) -> Owner {
        match note {
            Some(note) if note.kept != self.kept() => Owner::Other,
            Some(note) if note.source == self.source => Owner::This,
            Some(note) if self.config.path.join(&note.source).exists() => Owner::Other,
            // By its name it is.
            None if *path == self.path(0) => Owner::This,
            _ => Owner::Gone,
        }
    }

    /// What to do with the table's own file.
    fn decide(&self, path: PathBuf, note: Option<Note>) -> Result<Found> {
        let Some(facts) = disk::look(&path)? else {
            check_no_updates(&path)?;
            return Ok(Found::Missing(path, None));
        };
        let note = note.filter(|note| note.table == facts.number);
        if !self.config.load || note.as_ref().is_some_and(|note| note.names == self.names) {
            return Ok(Found::Current(path));
        }
        let built_from = facts.content.or(note.map(|note| note.content));
        if built_from.is_some() && built_from == Some(self.content()?) {
            self.note(&path, &facts);
            return Ok(Found::Current(path));
        }
        let (file, from) = (path.display(), self.table.path.display());
        if self.config.read_only {
            let message = format!("{file} was not built from what is now {from}, and read_only is set");
            let message = format!("{message}: open it once without, to build it");
            return Err(Error::new(Status::NotFound, message).about("persistent_db.read_only"));
        }
        if facts.updated && built_from.is_none() {
            let note = Note::beside(&path);
            let message = format!("whether the table {file} was built from what is now {from} can not be told");
            let hint = format!("bring {} back, or remove {file} and {file}.updates to build it anew", note.display());
            return Err(Error::new(Status::Io, format!("{message}, and it has updates: {hint} without them")));
        }
        if facts.updated && !self.config.drop_updates_on_source_change {
            let message = format!("{from} is not what the table {file} was built from, and the table has updates");
            let hint = "bring that source back, or set this option to build the table anew without them";
            return Err(Error::invalid(DROP, format!("{message}, which a new one would lose: {hint}")));
        }
        Ok(Found::Missing(path, Some((&facts).into())))
    }

    /// Whether a table file whose source is gone was built from this table's source, which was moved then.
    fn adopts(&self, path: &Path, note: Option<Note>) -> Result<bool> {
        let Some(facts) = disk::look(path)? else { return Ok(false) };
        if facts.layout.row_type() != self.layout.row_type() {
            return Ok(false);
        }
        let note = note.filter(|note| note.table == facts.number);
        let built_from = facts.content.or(note.as_ref().map(|note| note.content));
        if built_from.is_some() && built_from == Some(self.content()?) {
            log::info!("{} is the table of {}, which was moved", path.display(), self.table.path.display());
            self.note(path, &facts);
            return Ok(true);
        }
        if !facts.updated {
            return Ok(false);
        }
        let (file, from, name) = (path.display(), self.table.path.display(), &self.table.name);
        let was = note.map_or_else(
            || "a source that nobody knows any more".to_owned(),
            |note| format!("{}, which is not there any more", self.config.path.join(note.source).display()),
        );
        let found = format!("{file}, with updates of a table {name:?}, was built from {was}");
        if self.config.drop_updates_on_source_change {
            log::warn!("{found}. It is left alone, and a new table is built from {from}");
            return Ok(false);
        }
        let hint = format!("if they are not for this table, remove {file} and {file}.updates, or set this option");
        Err(Error::invalid(DROP, format!("{found}, and not from what is in {from}: {hint}")))
    }

    /// Whether a table file that seems to be another's was built from this table's source, which was moved before something
    /// else was put where it was.
    fn was_swapped(&self, path: &Path, note: Option<Note>) -> Result<bool> {
        let Some(note) = note.filter(|note| note.kept == self.kept()) else { return Ok(false) };
        let Some(facts) = disk::look(path)?.filter(|facts| facts.updated && facts.content.is_some()) else {
            return Ok(false);
        };
        if facts.content != Some(self.content()?) {
            return Ok(false);
        }
        let there = origin::content(&self.config.path.join(&note.source));
        let swapped = there.is_ok_and(|content| Some(content) != facts.content);
        if swapped {
            log::info!("{} is the table of {}, which was moved", path.display(), self.table.path.display());
            self.note(path, &facts);
        }
        Ok(swapped)
    }

    fn note(&self, path: &Path, facts: &Facts) {
        if self.config.read_only {
            return;
        }
        let Some(content) = facts.content else { return };
        let (source, names) = (self.source.clone(), self.names.to_owned());
        Note { table: facts.number, content, kept: self.kept().to_owned(), source, names }.write(path);
    }

    fn build(&self, source: &Source, path: &Path, before: Option<Before>) -> Result<()> {
        let (file, from) = (path.display(), self.table.path.display());
        if self.config.read_only {
            let message = format!("{file} is not there, and read_only is set: open it once without, to build it");
            return Err(Error::new(Status::NotFound, message).about("persistent_db.read_only"));
        }
        let replaced = path.exists();
        let row_type = self.layout.row_type();
        let allow = || {
            let now = disk::look(path)?.as_ref().map(Before::from);
            if now == before && (now.is_some() || !disk::updates_of(path).exists()) {
                return Ok(());
            }
            let message = format!("the table {file} was changed by another process while it was looked at");
            Err(Error::new(Status::Busy, format!("{message}: open it again")))
        };
        disk::build_if(source, path, row_type, allow, || origin::unchanged(&self.table.path, self.names).map(Some))?;
        if replaced {
            log::warn!("{file} was built anew, without its updates: {from} is not what it was built from");
        }
        if let Some(facts) = disk::look(path)? {
            self.note(path, &facts);
        }
        Ok(())
    }
}

/// A build would remove the updates of a table file that is lost.
fn check_no_updates(path: &Path) -> Result<()> {
    let updates = disk::updates_of(path);
    if !updates.exists() {
        return Ok(());
    }
    let (file, updates) = (path.display(), updates.display());
    let message = format!("{updates} has updates of the table {file}, which is not there");
    let hint = format!("bring it back, or remove {updates} to build the table without them");
    Err(Error::new(Status::Io, format!("{message}: {hint}")))
}

/// A path as it is found from a folder; both are absolute.
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
