//! Files, beyond the standard library: locks that end with their holder, names and contents that survive a loss of
//! power.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A file that is locked while this lives.
pub(crate) struct Locked(pub(crate) File);

impl Deref for Locked {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing is not enough: a process that another thread is starting has a copy of the file open until its exec.
        let _ = self.0.unlock();
    }
}

/// Makes the creation or removal of a file or folder durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Makes a folder, and those above it that are missing, durably.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    let missing = path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.is_dir()).count();
    fs::create_dir_all(path)?;
    // Its own name in any case: an earlier process may have been killed after it made the folder and before this.
    path.ancestors().take(missing.max(1)).try_for_each(sync_parent)
}

/// A path with a suffix appended to its file name.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Replaces a small file: after a crash it has the old contents or the new ones, and when this returns the new ones.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let new = beside(path, ".new");
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(contents)?;
        file.sync_all()
    });
    let replaced = written.and_then(|()| fs::rename(&new, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&new);
    }
    replaced.and_then(|()| sync_parent(path))
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = Folder::new();
        let path = folder.path().join("a/b/file");
        make_folder(path.parent().unwrap()).unwrap();
        replace(&path, b"old").unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(replace(path.parent().unwrap(), b"a folder is there").is_err());
        assert_eq!(fs::read_dir(folder.path().join("a")).unwrap().count(), 1, "nothing is left behind");
    }
}
