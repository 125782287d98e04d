//! What can be made of a request while it waits for others: the rows that it brings.

use super::work::Work;

/// The rows that a request brings, which depend on nothing else.
pub(super) struct Own {
    /// Which row of the history is the first.
    first: u64,
    /// What tells each row of the history from others; none where nothing is kept.
    items: Vec<u64>,
    /// The keys of each feature: those of the history's rows, then those of the candidates. None where most of the history may
    /// be cached: the keys of those rows are not needed.
    keys: Option<Vec<Vec<i64>>>,
}

impl Own {
    pub(super) fn of(work: &Work) -> Self {
        let (layout, keeps) = (&work.serving.layout, work.serving.keeps);
        let first = if work.start == 0 { 0 } else { layout.row_of(work.start) };
        let user_keys = work.user_keys.as_deref().unwrap_or_default();
        let history = layout.history_rows(first..work.rows(), user_keys, (work.start, &work.events));
        let mut items = Vec::new();
        if keeps {
            history.fingerprints(&mut items);
        }
        let keys = || {
            let rows = (work.rows() - first) as usize;
            let mut keys = vec![vec![layout.no_key; rows + work.num_candidates]; layout.features.len()];
            // A key that can not be looked up is for those to say who add the rows to a batch.
            history.put(0, &mut keys).ok()?;
            layout.candidate_rows(&work.candidates, rows, &mut keys);
            Some(keys)
        };
        let keys = if keeps && work.start == 0 { None } else { keys() };
        Self { first, items, keys }
    }

    /// What tells each row of the history from others.
    pub(super) fn items(&self) -> &[u64] {
        &self.items
    }

    /// The keys of each feature from a row of the history on, those of the candidates after them; `None` if they were not made
    /// or that row is not the request's.
    pub(super) fn keys_from(&self, row: u64) -> Option<impl Iterator<Item = &[i64]>> {
        let before = row.checked_sub(self.first)? as usize;
        Some(self.keys.as_ref()?.iter().map(move |keys| &keys[before..]))
    }
}
