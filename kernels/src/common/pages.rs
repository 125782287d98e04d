//! The pages of a call, and the offsets of jagged rows: every check of them.

use std::ops::Range;

use super::input_error::{InputError, refuse};

/// Where the users' pages lie in a layer's pool `[pool_pages, 2, page_size, H, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// `[B]`: how many tokens of each user are in the cache.
    pub cached_len: &'a [i32],
    /// `[B + 1]`: where each user's page list begins in `page_ids`.
    pub page_indptr: &'a [i32],
    /// Pages in order of position. Entries that no token needs may hold anything.
    pub page_ids: &'a [i32],
    /// How many pages the pool has.
    pub pool_pages: usize,
    /// How many tokens a page holds; a multiple of 8.
    pub page_size: usize,
}

impl<'a> Pages<'a> {
    /// The page list of one user. Only after `check`.
    pub(crate) fn of(&self, user: usize) -> &'a [i32] {
        &self.page_ids[self.page_indptr[user] as usize..self.page_indptr[user + 1] as usize]
    }

    /// Checks everything but the page ids that tokens need. `row`: the heads of a token, and the numbers of a head.
    pub(crate) fn check(&self, users: usize, row: [usize; 2], pool_len: Option<usize>) -> Result<(), InputError> {
        let page_size = self.page_size;
        if page_size == 0 || !page_size.is_multiple_of(8) {
            let message = format!("page_size {page_size}, expected a multiple of 8");
            return refuse("kv_pool", None, message);
        }
        self.check_pool(row, pool_len)?;
        if self.cached_len.len() != users {
            let message = format!("{} lengths, expected {}, one a user", self.cached_len.len(), users);
            return refuse("cached_len", None, message);
        }
        if let Some(user) = self.cached_len.iter().position(|&len| len < 0) {
            let message = format!("length {}, expected 0 or more", self.cached_len[user]);
            return refuse("cached_len", Some(user), message);
        }
        check_offsets("page_indptr", self.page_indptr, users, self.page_ids.len(), "page ids")
    }

    /// Checks that the pool's shape is possible and, where the caller has the pool, that it is that long.
    pub(crate) fn check_pool(&self, [heads, width]: [usize; 2], pool_len: Option<usize>) -> Result<(), InputError> {
        let shape = [self.pool_pages, 2, self.page_size, heads, width];
        let elements = shape.iter().rev().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
        if elements.is_none() || pool_len.is_some_and(|len| elements != Some(len)) {
            let len = pool_len.map_or("too many".to_owned(), |len| len.to_string());
            return refuse("kv_pool", None, format!("{len} elements do not make the shape {shape:?}"));
        }
        Ok(())
    }

    /// Checks that the tokens of one user at `positions` have pages inside the pool.
    pub(crate) fn check_tokens(&self, user: usize, positions: Range<usize>) -> Result<(), InputError> {
        if positions.is_empty() {
            return Ok(());
        }
        let Pages { pool_pages, page_size, .. } = *self;
        let list = self.of(user);
        let needed = positions.end.div_ceil(page_size);
        if list.len() < needed {
            let message =
                format!("{} pages of {page_size}, expected {needed} for {} tokens", list.len(), positions.end);
            return refuse("page_ids", Some(user), message);
        }
        let first = positions.start / page_size;
        for (at, &page) in list[first..needed].iter().enumerate() {
            if usize::try_from(page).is_ok_and(|page| page < pool_pages) {
                continue;
            }
            let position = ((first + at) * page_size).max(positions.start);
            let message = format!("page {page} for position {position} lies outside the pool of {pool_pages} pages");
            return refuse("page_ids", Some(user), message);
        }
        Ok(())
    }
}

/// Offsets of jagged data: one more than users, from 0 up to `total`, never down.
pub(crate) fn check_offsets(
    tensor: &'static str,
    offsets: &[i32],
    users: usize,
    total: usize,
    what: &str,
) -> Result<(), InputError> {
    if offsets.len() != users + 1 {
        let message = format!("{} offsets, expected {} for {users} users", offsets.len(), users + 1);
        return refuse(tensor, None, message);
    }
    if offsets[0] != 0 {
        return refuse(tensor, None, format!("first offset {}, expected 0", offsets[0]));
    }
    for (user, pair) in offsets.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return refuse(tensor, Some(user), format!("offset goes down from {} to {}", pair[0], pair[1]));
        }
    }
    let last = offsets[users];
    if usize::try_from(last) != Ok(total) {
        return refuse(tensor, None, format!("last offset {last}, expected {total}, the number of {what}"));
    }
    Ok(())
}
