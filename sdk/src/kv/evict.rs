//! Making room, and removing histories on request.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Inner, Tiers, Users, busy};
use crate::config::Offload;
use crate::error::{Error, Result, Status};

impl Inner {
    /// Takes `count` pages, evicting the least recently used users as far as need be.
    pub(super) fn allocate(&self, count: usize) -> Result<Vec<u32>> {
        let mut pages = Vec::with_capacity(count);
        loop {
            self.table.take_pages(&mut pages, count);
            if pages.len() == count {
                return Ok(pages);
            }
            // Nothing is evicted for a request that can not be met anyhow.
            if pages.len() + self.table.available() < count || !self.evict_least_recent() {
                self.table.give_pages(&mut pages);
                return Err(Error::new(
                    Status::Capacity,
                    format!(
                        "{count} more pages are needed and {} are available, the rest of the {} are held by live leases: \
                         try again when those have ended, or give the cache more pages",
                        self.table.available(),
                        self.table.pages()
                    ),
                ));
            }
        }
    }

    pub(super) fn evict_least_recent(&self) -> bool {
        let Some(user) = self.table.least_recent() else { return false };
        self.leave(user);
        true
    }

    /// Sees a user off who is marked as leaving: to the store if the options say so, then out of the pool.
    pub(super) fn leave(&self, user: u64) {
        if self.offload != Offload::ByHand && self.store.is_some() {
            self.save_leaving(user);
        }
        self.counters.evicted.add(1);
        self.table.lock(user).change(user, |entry| (entry.leaving, entry.tokens) = (false, 0));
    }

    pub(super) fn evict(&self, users: Users<'_>, tiers: Tiers) -> Result<usize> {
        let everyone;
        let (users, skip_leased) = match users {
            Users::These(users) => {
                for &user in users {
                    self.not_leased(user)?;
                }
                (users, false)
            }
            Users::All => {
                let mut all: HashSet<u64> = self.table.users().into_iter().collect();
                if let Some(store) = self.store.as_ref().filter(|_| tiers.store) {
                    all.extend(store.users(self.space));
                }
                everyone = all.into_iter().collect::<Vec<_>>();
                (&*everyone, true)
            }
        };
        let mut evicted = 0;
        for &user in users {
            match self.evict_user(user, tiers) {
                Ok(had) => evicted += usize::from(had),
                Err(error) if error.status() == Status::Busy && skip_leased => {}
                Err(error) => return Err(error),
            }
        }
        if tiers.store
            && let Some(store) = &self.store
        {
            store.flush()?;
        }
        Ok(evicted)
    }

    pub(super) fn not_leased(&self, user: u64) -> Result<()> {
        match self.table.lock(user).get(user).filter(|entry| entry.leased()) {
            Some(_) => Err(busy(user, "is held by a live lease: commit or abort it first")),
            None => Ok(()),
        }
    }

    /// Evicts one user; says whether there was anything.
    pub(super) fn evict_user(&self, user: u64, tiers: Tiers) -> Result<bool> {
        loop {
            let mut locked = self.table.lock(user).wait_while(user, |entry| entry.leaving || entry.copying);
            let stored = tiers.store && self.found(user).is_some();
            let Some(entry) = locked.get(user) else {
                // Under the lock, so that no one brings it into the pool meanwhile.
                return if stored { self.cut(user, 0).map(|()| true) } else { Ok(false) };
            };
            if entry.leased() {
                return Err(busy(user, "is held by a live lease: commit or abort it first"));
            }
            if let Some(onload) = &entry.loading {
                let onload = Arc::clone(onload);
                drop(locked);
                // Whether it went well does not matter to someone who is about to leave.
                let _ = onload.wait_all();
                continue;
            }
            if stored {
                self.cut(user, 0)?;
            }
            if !tiers.resident {
                return Ok(stored);
            }
            if tiers.store {
                self.counters.evicted.add(1);
                locked.change(user, |entry| entry.tokens = 0);
            } else {
                locked.change(user, |entry| entry.leaving = true);
                drop(locked);
                self.leave(user);
            }
            return Ok(true);
        }
    }
}
