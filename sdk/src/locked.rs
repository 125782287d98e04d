//! Files that no one else may have open.

use std::fs::File;
use std::ops::Deref;

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
        // Closing is not enough: a process that is being started by another thread has the file open for a moment too.
        let _ = self.0.unlock();
    }
}
