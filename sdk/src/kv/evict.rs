//! Making room, and removing histories on request.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Inner, Owners, Tiers, busy};
use crate::error::{Error, Result, Status};
use crate::store::{Owner, Room, Ticket};

/// How long an allocation waits at a time for pages that are being moved, and how often.
const MOMENT: Duration = Duration::from_millis(5);
const PATIENCE: usize = 400;

impl Inner {
    /// Takes `count` pages and evicts owners for them as far as need be. With `waits`, waits for pages that other threads
    /// are moving.
    pub(super) fn allocate(&self, count: usize, waits: bool) -> Result<Vec<u32>> {
        let mut pages = Vec::with_capacity(count);
        let (mut patience, moment) = if waits { (PATIENCE, MOMENT) } else { (0, Duration::ZERO) };
        loop {
            if self.table.pages().take(&mut pages, count) {
                self.wake_ahead();
                return Ok(pages);
            }
            // Nothing is evicted for a request that can not be met.
            if pages.len() + self.table.pages().available() >= count && self.evict_next() {
                continue;
            }
            // Returns what was taken, too.
            if !self.table.pages().wait(&mut pages, count, moment) || patience == 0 {
                return Err(Error::new(
                    Status::Capacity,
                    format!(
                        "{count} more pages are needed and {} are available, the rest of the {} are held by live leases: \
                         try again when those have ended, or give the cache more pages",
                        self.table.pages().available(),
                        self.table.pages().len()
                    ),
                ));
            }
            patience -= 1;
        }
    }

    fn evict_next(&self) -> bool {
        let Some(owner) = self.table.next_victim() else { return false };
        // A request does not wait for the disk: what the store does not take at once is lost, and counted.
        if let Err(error) = self.save_leaving(owner, Room::OrRefuse) {
            log::warn!("owner {owner} leaves the pool and could not be handed to the store: {error}");
            self.counters.failed_offloads.add(1);
        }
        self.leave(owner);
        true
    }

    /// Removes an owner that is marked as leaving from the pool.
    fn leave(&self, owner: Owner) {
        self.counters.evicted.add(1);
        self.table.lock(owner).change(owner, |entry| (entry.leaving, entry.tokens) = (false, 0));
    }

    pub(super) fn evict(&self, owners: Owners<'_>, tiers: Tiers) -> Result<usize> {
        let all_owners;
        let (owners, skip_leased) = match owners {
            Owners::These(owners) => {
                for &owner in owners {
                    self.not_leased(owner)?;
                }
                (owners, false)
            }
            Owners::All => {
                let mut all: HashSet<Owner> = self.table.owners().into_iter().collect();
                if let Some(store) = self.store.as_ref().filter(|_| tiers.store) {
                    all.extend(store.owners(self.space));
                }
                all_owners = all.into_iter().collect::<Vec<_>>();
                (&*all_owners, true)
            }
        };
        let (mut evicted, mut tickets) = (0, Vec::new());
        let mut outcome = owners.iter().try_for_each(|&owner| match self.evict_owner(owner, tiers, &mut tickets) {
            Ok(had) => {
                evicted += usize::from(had);
                Ok(())
            }
            Err(error) if error.status() == Status::Busy && skip_leased => Ok(()),
            Err(error) => Err(error),
        });
        if tiers.store && skip_leased {
            // Nothing lies behind this position. Its ticket is done when everything that was queued before is done, also of
            // owners that are not found any more.
            outcome = outcome.and(self.cut(Owner(0), u64::MAX).map(|ticket| tickets.extend(ticket)));
        }
        // Waits before it reports another error: what was cut is gone for good when this returns.
        let waited = Ticket::wait_all(&tickets);
        outcome.and(waited).map(|()| evicted)
    }

    fn not_leased(&self, owner: Owner) -> Result<()> {
        match self.table.lock(owner).get(owner).filter(|entry| entry.leased()) {
            Some(_) => Err(busy(owner, "is held by a live lease: commit or abort it first")),
            None => Ok(()),
        }
    }

    /// Evicts one owner; says whether there was anything. `tickets` gets what to wait for.
    pub(super) fn evict_owner(&self, owner: Owner, tiers: Tiers, tickets: &mut Vec<Ticket>) -> Result<bool> {
        // Also where nothing is found: what made it so may be queued still, or have failed.
        let cut = |tickets: &mut Vec<Ticket>| -> Result<()> {
            if tiers.store {
                tickets.extend(self.cut(owner, 0)?);
            }
            Ok(())
        };
        loop {
            let mut locked = self.table.lock(owner).wait_while(owner, |entry| entry.leaving || entry.copying);
            let stored = tiers.store && self.found(owner).is_some();
            let Some(entry) = locked.get(owner) else {
                // Under the lock, so that no other thread brings it into the pool meanwhile.
                cut(tickets)?;
                return Ok(stored);
            };
            if entry.leased() {
                return Err(busy(owner, "is held by a live lease: commit or abort it first"));
            }
            if let Some(onload) = &entry.loading {
                let onload = Arc::clone(onload);
                drop(locked);
                // It is evicted whether or not that went well.
                let _ = onload.wait_all();
                continue;
            }
            cut(tickets)?;
            if !tiers.resident {
                locked.change(owner, |entry| entry.saved = false);
                return Ok(stored);
            }
            if tiers.store {
                self.counters.evicted.add(1);
                locked.change(owner, |entry| entry.tokens = 0);
            } else {
                locked.change(owner, |entry| entry.leaving = true);
                drop(locked);
                if let Err(error) = self.save_leaving(owner, Room::Wait) {
                    self.table.lock(owner).change(owner, |entry| entry.leaving = false);
                    return Err(error);
                }
                self.leave(owner);
            }
            return Ok(true);
        }
    }
}
