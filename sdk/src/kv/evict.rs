//! Making room, and removing histories on request.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Inner, Tiers, Users, busy};
use crate::error::{Error, Result, Status};
use crate::store::{Room, Ticket};

/// How long to wait at a time for pages that others are moving, and how often.
const MOMENT: Duration = Duration::from_millis(5);
const PATIENCE: usize = 400;

impl Inner {
    /// Takes `count` pages, evicting the least recently used users as far as need be. Whoever `waits` does so for pages
    /// that others are moving.
    pub(super) fn allocate(&self, count: usize, waits: bool) -> Result<Vec<u32>> {
        let mut pages = Vec::with_capacity(count);
        let (mut patience, moment) = if waits { (PATIENCE, MOMENT) } else { (0, Duration::ZERO) };
        loop {
            if self.table.take_pages(&mut pages, count) {
                self.wake_ahead();
                return Ok(pages);
            }
            // Nothing is evicted for a request that can not be met anyhow.
            if pages.len() + self.table.available() >= count && self.evict_least_recent() {
                continue;
            }
            // Gives back what was taken, too.
            if !self.table.wait_for_pages(&mut pages, count, moment) || patience == 0 {
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
            patience -= 1;
        }
    }

    fn evict_least_recent(&self) -> bool {
        let Some(user) = self.table.least_recent() else { return false };
        // A request does not wait for the disk: what the store can not take at once is lost, and counted.
        if let Err(error) = self.save_leaving(user, Room::OrRefuse) {
            log::warn!("user {user} leaves the pool and could not be handed to the store: {error}");
            self.counters.failed_offloads.add(1);
        }
        self.leave(user);
        true
    }

    /// Takes a user who is marked as leaving out of the pool.
    fn leave(&self, user: u64) {
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
        let (mut evicted, mut tickets) = (0, Vec::new());
        let mut outcome = users.iter().try_for_each(|&user| match self.evict_user(user, tiers, &mut tickets) {
            Ok(had) => {
                evicted += usize::from(had);
                Ok(())
            }
            Err(error) if error.status() == Status::Busy && skip_leased => Ok(()),
            Err(error) => Err(error),
        });
        if tiers.store && skip_leased {
            // Nothing lies behind this position: it is for what was queued before, also of users whom nobody finds any more.
            outcome = outcome.and(self.cut(0, u64::MAX).map(|ticket| tickets.extend(ticket)));
        }
        // What has been cut is gone for good before anyone hears of anything else.
        let waited = Ticket::wait_all(&tickets);
        outcome.and(waited).map(|()| evicted)
    }

    fn not_leased(&self, user: u64) -> Result<()> {
        match self.table.lock(user).get(user).filter(|entry| entry.leased()) {
            Some(_) => Err(busy(user, "is held by a live lease: commit or abort it first")),
            None => Ok(()),
        }
    }

    /// Evicts one user; says whether there was anything. `tickets` gets what to wait for.
    pub(super) fn evict_user(&self, user: u64, tiers: Tiers, tickets: &mut Vec<Ticket>) -> Result<bool> {
        // Also where nothing is found: what made it so may be queued still, or have failed.
        let cut = |tickets: &mut Vec<Ticket>| -> Result<()> {
            if tiers.store {
                tickets.extend(self.cut(user, 0)?);
            }
            Ok(())
        };
        loop {
            let mut locked = self.table.lock(user).wait_while(user, |entry| entry.leaving || entry.copying);
            let stored = tiers.store && self.found(user).is_some();
            let Some(entry) = locked.get(user) else {
                // Under the lock, so that no one brings it into the pool meanwhile.
                cut(tickets)?;
                return Ok(stored);
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
            cut(tickets)?;
            if !tiers.resident {
                locked.change(user, |entry| entry.saved = false);
                return Ok(stored);
            }
            if tiers.store {
                self.counters.evicted.add(1);
                locked.change(user, |entry| entry.tokens = 0);
            } else {
                locked.change(user, |entry| entry.leaving = true);
                drop(locked);
                if let Err(error) = self.save_leaving(user, Room::Wait) {
                    self.table.lock(user).change(user, |entry| entry.leaving = false);
                    return Err(error);
                }
                self.leave(user);
            }
            return Ok(true);
        }
    }
}
