//! What a request does to one owner's history, worked out before anything is changed.

use super::KvRequest;
use super::fingerprint::extend;
use super::options::{Edited, Overlap};
use crate::error::{Error, Result};

/// The part of the options that decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) page_size: u32,
    /// 0 = no window.
    pub(super) max_history: u32,
    pub(super) overlap: Overlap,
    pub(super) edited: Edited,
}

/// What is cached of one owner.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cached<'a> {
    /// The position of the first token.
    pub(super) start: u64,
    pub(super) tokens: u32,
    /// The hash of the history before each page, if histories are hashed.
    pub(super) hashes: &'a [u64],
    /// The hash of the whole.
    pub(super) end_hash: u64,
}

impl Cached<'_> {
    pub(super) fn end(&self) -> u64 {
        self.start + u64::from(self.tokens)
    }
}

/// What a request does to one owner's history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Where the history begins, as the model sees it.
    pub(super) start: u64,
    /// Pages that leave at the front, when the lease is committed.
    pub(super) dropped_pages: u32,
    /// Cached tokens that the model sees, after those pages.
    pub(super) cached: u32,
    /// Whether cached tokens after those leave, when the lease is committed.
    pub(super) cut: bool,
    /// Rows at the beginning of the request that are cached already.
    pub(super) trimmed: u32,
    /// New tokens.
    pub(super) tokens: u32,
    /// Pages that leave at the front after the new tokens came, because these alone are more than the window.
    pub(super) dropped_after: u32,
}

impl Plan {
    /// Pages of the cached tokens that the model sees.
    pub(super) fn cached_pages(&self, page_size: u32) -> usize {
        self.cached.div_ceil(page_size) as usize
    }

    /// Pages that are needed beside those.
    pub(super) fn new_pages(&self, page_size: u32) -> usize {
        (u64::from(self.cached) + u64::from(self.tokens)).div_ceil(page_size.into()) as usize
            - self.cached_pages(page_size)
    }

    /// Whether a commit changes the history.
    pub(super) fn changes(&self) -> bool {
        self.tokens > 0 || self.dropped_pages > 0 || self.cut
    }
}

/// Works out what `request` does to what is cached.
pub(super) fn plan(cached: Cached<'_>, request: &KvRequest<'_>, rules: Rules) -> Result<Plan> {
    let page_size = u64::from(rules.page_size);
    let mut valid = valid_end(cached, request, rules)?;
    if request.recompute && request.start < valid {
        let kept = request.start.saturating_sub(cached.start) / page_size * page_size;
        valid = valid.min(cached.start + kept);
    }
    let mut plan = Plan { start: cached.start, cut: valid < cached.end(), ..Plan::default() };
    let mut kept = valid - cached.start;
    let fills_window = rules.max_history > 0 && request.tokens >= rules.max_history;
    let fresh = request.start > valid && fills_window || request.start < valid && kept == 0;
    if fresh {
        // Nothing of what came before is in the window any more, so nothing is missing in it; or nothing of what is
        // cached is of use, so the history may begin anew, also before it.
        (kept, plan.start, plan.cut) = (0, request.start, cached.tokens > 0);
    } else if request.start > valid {
        return Err(gap("missing", valid, request.start - 1));
    } else if request.start < valid {
        if rules.overlap == Overlap::Refuse {
            return Err(gap("overlapping", request.start, valid - 1));
        }
        plan.trimmed = (valid - request.start).min(request.tokens.into()) as u32;
    }
    plan.tokens = request.tokens - plan.trimmed;
    let history = kept + u64::from(plan.tokens);
    if rules.max_history > 0 && history > rules.max_history.into() {
        let leaving = (history - u64::from(rules.max_history)).div_ceil(page_size) * page_size;
        let of_cached = leaving.min(kept.next_multiple_of(page_size));
        plan.dropped_pages = (of_cached / page_size) as u32;
        plan.start += of_cached.min(kept);
        kept -= of_cached.min(kept);
        if kept == 0 {
            let excess = plan.tokens.saturating_sub(rules.max_history);
            plan.dropped_after = excess.div_ceil(rules.page_size);
        }
    }
    // Both fit: the history was cached, which is no longer than 2^31 tokens.
    plan.cached = kept as u32;
    Ok(plan)
}

/// How many of the first items of a request, which begins at 0, are cached and agree.
pub(super) fn matching(cached: Cached<'_>, request: &KvRequest<'_>, rules: Rules) -> u32 {
    let rules = Rules { edited: Edited::Invalidate, ..rules };
    match valid_end(cached, request, rules) {
        // No more than what is cached, which is a u32.
        Ok(valid) if cached.start == 0 && !cached.hashes.is_empty() => valid as u32,
        _ => 0,
    }
}

fn gap(what: &str, from: u64, to: u64) -> Error {
    Error::invalid("start", format!("The input sequence has {what} tokens from {from} to {to} (both inclusive)."))
}

/// Up to where the cached history agrees with the items of the request.
fn valid_end(cached: Cached<'_>, request: &KvRequest<'_>, rules: Rules) -> Result<u64> {
    if rules.edited == Edited::Unnoticed {
        return Ok(cached.end());
    }
    let end = request.start + u64::from(request.tokens);
    let Some(items_start) = end.checked_sub(request.items.len() as u64) else {
        let message =
            format!("{} items are more than the {end} tokens up to the end of this request", request.items.len());
        return Err(Error::invalid("items", message));
    };
    if request.items.len() < request.tokens as usize {
        let message = format!(
            "{} items for {} new tokens: give the item of every new token, and of as many before as are to be checked",
            request.items.len(),
            request.tokens
        );
        return Err(Error::invalid("items", message));
    }
    let page_size = u64::from(rules.page_size);
    // The first page boundary that the items reach back to.
    let skipped = items_start.saturating_sub(cached.start).div_ceil(page_size);
    for (page, &before) in cached.hashes.iter().enumerate().skip(skipped as usize) {
        let from = cached.start + page as u64 * page_size;
        let (to, expected) = match cached.hashes.get(page + 1) {
            Some(&hash) => (from + page_size, hash),
            None => (cached.end(), cached.end_hash),
        };
        if to > end {
            break;
        }
        let items = &request.items[(from - items_start) as usize..(to - items_start) as usize];
        if extend(before, items) != expected {
            return edited(rules, from, to);
        }
    }
    if end < cached.end() {
        // The history has become shorter: the page in which it ends, and all after it, have items that are gone.
        let whole = end.saturating_sub(cached.start) / page_size * page_size;
        return edited(rules, cached.start + whole, cached.end());
    }
    Ok(cached.end())
}

/// What is cached from `from` to before `to` is not what the history has there, or has not any more.
fn edited(rules: Rules, from: u64, to: u64) -> Result<u64> {
    if rules.edited == Edited::Invalidate {
        return Ok(from);
    }
    let message = format!(
        "the history was edited: its items from {from} to {} (both inclusive) are not those that are cached. Evict the owner \
         and send the whole history, or have edited histories invalidated",
        to - 1
    );
    Err(Error::invalid("items", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Owner;

    const RULES: Rules = Rules { page_size: 8, max_history: 0, overlap: Overlap::Refuse, edited: Edited::Unnoticed };

    fn request(start: u64, tokens: u32) -> KvRequest<'static> {
        KvRequest { owner: Owner(7), start, tokens, candidates: 0, items: &[], ..KvRequest::default() }
    }

    fn cached(start: u64, tokens: u32) -> Cached<'static> {
        Cached { start, tokens, ..Cached::default() }
    }

    #[test]
    fn the_words_for_gaps_and_overlaps() {
        let error = plan(cached(0, 10), &request(20, 5), RULES).unwrap_err();
        assert_eq!(error.message(), "The input sequence has missing tokens from 10 to 19 (both inclusive).");
        let error = plan(cached(0, 10), &request(5, 15), RULES).unwrap_err();
        assert_eq!(error.message(), "The input sequence has overlapping tokens from 5 to 9 (both inclusive).");
        let error = plan(cached(0, 0), &request(1, 1), RULES).unwrap_err();
        assert_eq!(error.message(), "The input sequence has missing tokens from 0 to 0 (both inclusive).");
    }

    #[test]
    fn an_overlap_is_trimmed_if_asked() {
        let rules = Rules { overlap: Overlap::Trim, ..RULES };
        let some = plan(cached(0, 10), &request(5, 15), rules).unwrap();
        assert_eq!((some.cached, some.trimmed, some.tokens), (10, 5, 10));
        let all = plan(cached(0, 10), &request(2, 3), rules).unwrap();
        assert_eq!((all.cached, all.trimmed, all.tokens, all.changes()), (10, 3, 0, false));
    }

    #[test]
    fn pages_are_counted() {
        for (held, new, pages) in [(0, 0, 0), (0, 1, 1), (7, 1, 0), (8, 1, 1), (10, 14, 1), (10, 15, 2)] {
            let plan = plan(cached(0, held), &request(held.into(), new), RULES).unwrap();
            assert_eq!(plan.new_pages(8), pages, "{held} + {new}");
        }
    }

    #[test]
    fn a_window_moves_by_pages() {
        let rules = Rules { max_history: 20, ..RULES };
        let within = plan(cached(0, 18), &request(18, 2), rules).unwrap();
        assert_eq!((within.dropped_pages, within.cached), (0, 18));
        let beyond = plan(cached(16, 18), &request(34, 3), rules).unwrap();
        assert_eq!((beyond.dropped_pages, beyond.start, beyond.cached), (1, 24, 10));
        let all = plan(cached(0, 18), &request(18, 20), rules).unwrap();
        assert_eq!((all.dropped_pages, all.start, all.cached, all.dropped_after), (3, 18, 0, 0));
        let more = plan(cached(0, 18), &request(18, 30), rules).unwrap();
        assert_eq!((more.start, more.cached, more.tokens, more.dropped_after), (18, 0, 30, 2));
    }

    #[test]
    fn whatever_fills_the_window_may_begin_anywhere() {
        let rules = Rules { max_history: 20, ..RULES };
        let fresh = plan(cached(0, 0), &request(500, 20), rules).unwrap();
        assert_eq!((fresh.start, fresh.cached, fresh.tokens, fresh.cut), (500, 0, 20, false));
        let after = plan(cached(0, 10), &request(500, 20), rules).unwrap();
        assert_eq!((after.start, after.cached, after.cut), (500, 0, true));
        assert!(plan(cached(0, 10), &request(500, 19), rules).is_err());
    }

    #[test]
    fn a_history_that_became_shorter_was_edited() {
        let items: Vec<u64> = (100..130).collect();
        let hashes: Vec<u64> = (0..3).map(|page| extend(0, &items[..page * 8])).collect();
        let cached = Cached { start: 0, tokens: 20, hashes: &hashes, end_hash: extend(0, &items[..20]) };
        let request = |start: u64, end: usize| KvRequest {
            owner: Owner(7),
            start,
            tokens: (end as u64 - start) as u32,
            candidates: 0,
            items: &items[..end],
            ..KvRequest::default()
        };
        let trim = Rules { overlap: Overlap::Trim, ..RULES };
        let refuse = Rules { edited: Edited::Refuse, ..trim };
        let invalidate = Rules { edited: Edited::Invalidate, ..trim };
        for end in 0..20 {
            let error = plan(cached, &request(0, end), refuse).unwrap_err();
            assert!(error.message().contains("to 19"), "{error}");
            let shorter = plan(cached, &request(0, end), invalidate).unwrap();
            let kept = end as u32 / 8 * 8;
            assert_eq!((shorter.start, shorter.cached, shorter.cut), (0, kept, true));
            assert_eq!((shorter.trimmed, shorter.tokens), (kept, end as u32 - kept));
        }
        assert!(plan(cached, &request(0, 20), refuse).is_ok());
    }

    #[test]
    fn nothing_valid_means_nothing_cached() {
        let items: Vec<u64> = (0..80).collect();
        let cached = Cached { start: 64, tokens: 100, hashes: &[1; 13], end_hash: 2 };
        let request =
            KvRequest { owner: Owner(7), start: 0, tokens: 80, candidates: 0, items: &items, ..KvRequest::default() };
        for overlap in [Overlap::Refuse, Overlap::Trim] {
            let rules = Rules { max_history: 100, overlap, edited: Edited::Invalidate, ..RULES };
            let anew = plan(cached, &request, rules).unwrap();
            assert_eq!((anew.start, anew.cached, anew.tokens, anew.trimmed, anew.cut), (0, 0, 80, 0, true));
        }
    }

    #[test]
    fn an_edit_is_found_by_page() {
        let items: Vec<u64> = (100..130).collect();
        let hashes: Vec<u64> = (0..3).map(|page| extend(0, &items[..page * 8])).collect();
        let cached = Cached { start: 0, tokens: 20, hashes: &hashes, end_hash: extend(0, &items[..20]) };
        fn asked(start: u64, tokens: u32, items: &[u64]) -> KvRequest<'_> {
            KvRequest { owner: Owner(7), start, tokens, candidates: 0, items, ..KvRequest::default() }
        }
        let refused = Rules { edited: Edited::Refuse, ..RULES };
        let invalidated = Rules { edited: Edited::Invalidate, ..RULES };

        let same = plan(cached, &asked(20, 10, &items), refused).unwrap();
        assert_eq!((same.cached, same.cut), (20, false));
        // Only the new items: nothing can be said of the others.
        assert!(plan(cached, &asked(20, 10, &items[20..]), refused).is_ok());
        assert!(plan(cached, &asked(20, 10, &items[21..]), refused).is_err());
        assert!(plan(cached, &asked(0, 10, &items), refused).is_err(), "more items than tokens");

        for edit in 0..20 {
            let mut edited = items.clone();
            edited[edit] += 1;
            let error = plan(cached, &asked(20, 10, &edited), refused).unwrap_err();
            assert!(error.message().contains("edited"), "{error}");
            let from = edit as u64 / 8 * 8;
            let error = plan(cached, &asked(20, 10, &edited), invalidated).unwrap_err();
            assert!(error.message().contains(&format!("missing tokens from {from} to 19")), "{error}");
            let again = plan(cached, &asked(from, 30 - from as u32, &edited), invalidated).unwrap();
            assert_eq!((u64::from(again.cached), again.cut), (from, true));
            // Items that begin inside the edited page can not tell of it.
            let short = &edited[from as usize + 1..];
            assert!(plan(cached, &asked(20, 10, short), refused).is_ok());
        }
    }
}
