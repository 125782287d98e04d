//! A pointer for tasks on several threads.

/// A pointer that tasks share; each task keeps to places of its own.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Shared<T>(pub *mut T);

// SAFETY: only a pointer to elements that may be sent; each dereference says why no other thread is there.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The method, unlike the field, makes a closure capture the whole wrapper.
    pub fn pointer(self) -> *mut T {
        self.0
    }
}
