//! The page allocator: which pages are free, how many owners share each of the others, and how many eviction could free.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard};

/// The pages of an owner in order of position. The first ones may be shared with other owners; those are only read.
#[derive(Default)]
pub(super) struct PageList {
    pages: Vec<u32>,
    /// How many at the front are counted by the allocator, one by one. The others have no other owner.
    counted: usize,
}

impl PageList {
    /// Moves the first `count` pages to `to`.
    pub(super) fn drop_front(&mut self, count: usize, to: &mut Vec<u32>) {
        to.extend(self.pages.drain(..count));
        self.counted = self.counted.saturating_sub(count);
    }

    /// Moves all but the first `len` pages to `to`.
    pub(super) fn truncate(&mut self, len: usize, to: &mut Vec<u32>) {
        to.extend(self.pages.drain(len..));
        self.counted = self.counted.min(len);
    }

    /// Adds pages of which this owner is the only one.
    pub(super) fn append(&mut self, pages: &mut Vec<u32>) {
        // Histories grow by a page now and then: no room for twice as many.
        self.pages.reserve_exact(pages.len());
        self.pages.append(pages);
    }
}

impl PageList {
    /// The pages that may be shared with other owners.
    pub(super) fn shared(&self) -> &[u32] {
        &self.pages[..self.counted]
    }

    /// The pages of which this owner is the only one.
    pub(super) fn own(&self) -> &[u32] {
        &self.pages[self.counted..]
    }
}

impl From<Vec<u32>> for PageList {
    /// Pages of which this owner is the only one.
    fn from(pages: Vec<u32>) -> Self {
        Self { pages, counted: 0 }
    }
}

impl Deref for PageList {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.pages
    }
}

/// Every page of a pool.
pub(super) struct PageAllocator {
    state: Mutex<State>,
    /// Pages were returned.
    returned: Condvar,
    pages: usize,
    /// Pages that are free once every idle owner is evicted.
    evictable: AtomicUsize,
    /// Pages of owners without a lease that are being copied from or to the store, or changed; a shared page counts for each
    /// owner.
    moving: AtomicUsize,
    /// Pages of allocations that do not have all they need yet.
    collecting: AtomicUsize,
}

struct State {
    free: Vec<u32>,
    /// How many threads wait for pages: none is woken where none waits, which would be a system call.
    waiting: usize,
    /// Of each page that is shared, or was.
    references: Vec<References>,
    /// How many pages have references.
    counted: usize,
    /// How many pages have more than one owner.
    shared: usize,
}

/// The references to a page that is shared, or was.
#[derive(Clone, Copy, Default)]
struct References {
    owners: u32,
    /// How many of the owners can not be evicted now. The page is evictable while there are none.
    busy: u32,
}

impl PageAllocator {
    pub(super) fn new(pages: u32) -> Self {
        let state = State {
            // The last one is taken first.
            free: (0..pages).rev().collect(),
            waiting: 0,
            references: vec![References::default(); pages as usize],
            counted: 0,
            shared: 0,
        };
        Self {
            state: Mutex::new(state),
            returned: Condvar::new(),
            pages: pages as usize,
            evictable: AtomicUsize::new(0),
            moving: AtomicUsize::new(0),
            collecting: AtomicUsize::new(0),
        }
    }

    /// How many pages there are.
    pub(super) fn len(&self) -> usize {
        self.pages
    }

    pub(super) fn free(&self) -> usize {
        self.lock().free.len()
    }

    /// How many pages more than one owner has.
    pub(super) fn shared(&self) -> usize {
        self.lock().shared
    }

    /// Pages that are free, or that eviction could free.
    pub(super) fn available(&self) -> usize {
        self.free() + self.evictable.load(Ordering::Relaxed)
    }

    /// Moves free pages to `to` until it has `count`. False if there are not enough.
    pub(super) fn take(&self, to: &mut Vec<u32>, count: usize) -> bool {
        let mut state = self.lock();
        let had = to.len();
        let left = state.free.len().saturating_sub(count - had);
        to.extend(state.free.drain(left..).rev());
        // Counted inside the lock: a page is never neither free nor counted.
        if to.len() == count {
            self.collecting.fetch_sub(had, Ordering::Relaxed);
            return true;
        }
        self.collecting.fetch_add(to.len() - had, Ordering::Relaxed);
        false
    }

    /// Returns what [`Self::take`] took and was not enough. Waits for `timeout` if other threads could return all that is
    /// needed; otherwise says no.
    pub(super) fn wait(&self, taken: &mut Vec<u32>, count: usize, timeout: Duration) -> bool {
        let mut state = self.lock();
        self.collecting.fetch_sub(taken.len(), Ordering::Relaxed);
        self.release(&mut state, taken);
        let [evictable, moving, collecting] =
            [&self.evictable, &self.moving, &self.collecting].map(|pages| pages.load(Ordering::Relaxed));
        if state.free.len() + evictable + moving + collecting < count {
            return false;
        }
        state.waiting += 1;
        let _ = self.returned.wait_for(&mut state, timeout);
        state.waiting -= 1;
        true
    }

    /// Drops one reference to each page: that of a busy owner, or of an allocation. A page without references is free.
    pub(super) fn give(&self, pages: &mut Vec<u32>) {
        if !pages.is_empty() {
            self.release(&mut self.lock(), pages);
        }
    }

    /// As [`Self::give`], of all pages of an owner.
    pub(super) fn give_list(&self, list: &mut PageList) {
        list.counted = 0;
        self.give(&mut list.pages);
    }

    /// Another owner for the first `count` pages of a list, whose owner is busy. The new owner is too.
    pub(super) fn share(&self, list: &mut PageList, count: usize) -> PageList {
        let mut state = self.lock();
        let State { references, counted, shared, .. } = &mut *state;
        for &page in &list.pages[list.counted.min(count)..count] {
            references[page as usize] = References { owners: 1, busy: 1 };
            *counted += 1;
        }
        list.counted = list.counted.max(count);
        for &page in &list.pages[..count] {
            let of_page = &mut references[page as usize];
            *shared += usize::from(of_page.owners == 1);
            of_page.owners += 1;
            of_page.busy += 1;
        }
        PageList { pages: list.pages[..count].to_vec(), counted: count }
    }

    /// An owner of these pages can be evicted from now on.
    pub(super) fn idle(&self, list: &PageList) {
        self.evictable.fetch_add(list.pages.len() - list.counted, Ordering::Relaxed);
        if list.counted > 0 {
            let mut state = self.lock();
            for &page in &list.pages[..list.counted] {
                let of_page = &mut state.references[page as usize];
                of_page.busy -= 1;
                self.evictable.fetch_add(usize::from(of_page.busy == 0), Ordering::Relaxed);
            }
        }
    }

    /// An owner of these pages can not be evicted any more.
    pub(super) fn busy(&self, list: &PageList) {
        self.evictable.fetch_sub(list.pages.len() - list.counted, Ordering::Relaxed);
        if list.counted > 0 {
            let mut state = self.lock();
            for &page in &list.pages[..list.counted] {
                let of_page = &mut state.references[page as usize];
                self.evictable.fetch_sub(usize::from(of_page.busy == 0), Ordering::Relaxed);
                of_page.busy += 1;
            }
        }
    }

    /// An owner of so many pages is being moved, which ends soon.
    pub(super) fn begin_moving(&self, pages: usize) {
        self.moving.fetch_add(pages, Ordering::Relaxed);
    }

    pub(super) fn end_moving(&self, pages: usize) {
        self.moving.fetch_sub(pages, Ordering::Relaxed);
    }

    fn release(&self, state: &mut State, pages: &mut Vec<u32>) {
        if state.counted == 0 {
            state.free.append(pages);
        } else {
            let State { free, references, counted, shared, .. } = state;
            for page in pages.drain(..) {
                let of_page = &mut references[page as usize];
                if of_page.owners == 0 {
                    free.push(page);
                    continue;
                }
                of_page.owners -= 1;
                of_page.busy -= 1;
                match of_page {
                    References { owners: 0, .. } => {
                        *counted -= 1;
                        free.push(page);
                    }
                    References { owners, busy } => {
                        *shared -= usize::from(*owners == 1);
                        self.evictable.fetch_add(usize::from(*busy == 0), Ordering::Relaxed);
                    }
                }
            }
        }
        if state.waiting > 0 {
            self.returned.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pages: &PageAllocator, count: usize) -> PageList {
        let mut list = Vec::new();
        assert!(pages.take(&mut list, count));
        list.into()
    }

    #[test]
    fn a_shared_page_is_free_when_its_last_owner_has_left() {
        let pages = PageAllocator::new(10);
        let mut first = taken(&pages, 4);
        let mut second = pages.share(&mut first, 3);
        let mut third = pages.share(&mut second, 2);
        assert_eq!((&second[..], &third[..]), (&first[..3], &first[..2]));
        assert_eq!((pages.free(), pages.shared()), (6, 3));
        pages.give_list(&mut first);
        assert_eq!((pages.free(), pages.shared()), (7, 2), "the page that was not shared");
        pages.give_list(&mut second);
        assert_eq!((pages.free(), pages.shared()), (8, 0));
        pages.give_list(&mut third);
        assert_eq!((pages.free(), pages.shared(), pages.available()), (10, 0, 10));
        // As new.
        let mut again = taken(&pages, 10);
        pages.give_list(&mut again);
        assert_eq!(pages.free(), 10);
    }

    #[test]
    fn a_shared_page_is_evictable_while_all_its_owners_are_idle() {
        let pages = PageAllocator::new(10);
        let mut first = taken(&pages, 4);
        let mut second = pages.share(&mut first, 3);
        pages.idle(&first);
        assert_eq!(pages.available(), 6 + 1, "the other owner is busy");
        pages.idle(&second);
        assert_eq!(pages.available(), 10);
        pages.busy(&first);
        assert_eq!(pages.available(), 6);
        pages.give_list(&mut first);
        assert_eq!((pages.free(), pages.available()), (7, 10), "the other owner is idle");
        pages.busy(&second);
        assert_eq!(pages.available(), 7);
        pages.give_list(&mut second);
        assert_eq!(pages.available(), 10);
    }

    #[test]
    fn pages_that_leave_a_list_are_counted_no_more() {
        let pages = PageAllocator::new(10);
        let mut first = taken(&pages, 5);
        let mut second = pages.share(&mut first, 4);
        let mut gone = Vec::new();
        second.drop_front(1, &mut gone);
        second.truncate(2, &mut gone);
        pages.give(&mut gone);
        assert_eq!((pages.free(), pages.shared()), (5, 2));
        second.append(&mut taken(&pages, 2).pages);
        pages.idle(&second);
        assert_eq!(pages.available(), 3 + 2);
        pages.busy(&second);
        pages.give_list(&mut second);
        pages.give_list(&mut first);
        assert_eq!((pages.free(), pages.available()), (10, 10));
    }
}
