//! The row layout of a model: the features of pagoda.json, by index instead of by name.

use std::ops::Range;

use crate::error::{Error, Result, Status};
use crate::folder::{ModelFolder, SourceOf};

/// The row layout of one model.
pub(super) struct Layout {
    pub(super) no_key: i64,
    /// In the order of the folder.
    pub(super) features: Vec<FeatureKeys>,
    /// The features of an event, in storage order. The time, if any, follows the last one.
    pub(super) event_features: Vec<usize>,
    /// The features of a candidate.
    pub(super) candidate_features: Vec<usize>,
    /// The features of a user.
    pub(super) user_features: Vec<usize>,
    begin: Vec<Vec<Cell>>,
    event: Vec<Vec<Cell>>,
    candidate: Vec<Cell>,
    /// Whether rows have times.
    pub(super) has_times: bool,
    /// The meaning of the numbers in the event log. Models with equal signatures can share the log.
    pub(super) signature: Vec<String>,
}

/// The valid keys of a feature.
pub(super) struct FeatureKeys {
    pub(super) name: String,
    /// The name of its table.
    pub(super) table: String,
    rows: i64,
    pub(super) keyed: bool,
    default: Option<i64>,
}

/// A feature with a key in a row.
struct Cell {
    feature: usize,
    key: KeySource,
}

/// The source of a key.
#[derive(Clone, Copy)]
enum KeySource {
    /// This column of an event, a candidate or a user.
    Column(usize),
    /// A constant.
    Fixed(i64),
}

impl Layout {
    pub(super) fn new(folder: &ModelFolder) -> Self {
        let of = |kinds: &[SourceOf]| {
            let features = folder.features.iter().enumerate();
            features.filter(|(_, feature)| kinds.contains(&feature.source)).map(|(index, _)| index).collect::<Vec<_>>()
        };
        let event_features = of(&[SourceOf::Item, SourceOf::Action]);
        let (candidate_features, user_features) = (of(&[SourceOf::Item]), of(&[SourceOf::User]));
        let row = |names: &Vec<String>, columns: &[usize]| -> Vec<Cell> {
            let number = |name: &String| folder.features.iter().position(|feature| feature.name == *name);
            let cell = |feature: usize| match columns.iter().position(|&column| column == feature) {
                Some(column) => Cell { feature, key: KeySource::Column(column) },
                None => {
                    let fixed = folder.features[feature].candidate_key.unwrap_or(folder.no_key);
                    Cell { feature, key: KeySource::Fixed(fixed) }
                }
            };
            names.iter().filter_map(number).map(cell).collect()
        };
        let sequence = &folder.sequence;
        let named = |list: &[usize]| list.iter().map(|&index| folder.features[index].name.clone()).collect::<Vec<_>>();
        let has_times = folder.times.is_some();
        let mut signature = named(&event_features);
        signature.push(if has_times { "/timed/" } else { "//" }.to_owned());
        signature.extend(named(&user_features));
        Self {
            no_key: folder.no_key,
            features: folder
                .features
                .iter()
                .map(|feature| FeatureKeys::new(folder, &feature.name, &feature.table))
                .collect(),
            begin: sequence.begin.iter().map(|names| row(names, &user_features)).collect(),
            event: sequence.event.iter().map(|names| row(names, &event_features)).collect(),
            candidate: row(&sequence.candidate, &candidate_features),
            event_features,
            candidate_features,
            user_features,
            has_times,
            signature,
        }
    }

    /// The number of numbers of an event: its keys, and its time if rows have times.
    pub(super) fn event_width(&self) -> usize {
        (self.event_features.len() + usize::from(self.has_times)).max(1)
    }

    /// The number of rows at the beginning of every history.
    pub(super) fn begin_rows(&self) -> u64 {
        self.begin.len() as u64
    }

    /// The number of rows of an event.
    pub(super) fn event_rows(&self) -> u64 {
        self.event.len() as u64
    }

    /// The first row of an event.
    pub(super) fn row_of(&self, event: u64) -> u64 {
        self.begin_rows() + event * self.event_rows()
    }

    /// The number of complete events before a row.
    pub(super) fn event_at(&self, row: u64) -> u64 {
        row.saturating_sub(self.begin_rows()) / self.event_rows()
    }

    /// A range of rows of a history. `events` begins at event `first` and covers all of these rows.
    pub(super) fn history_rows<'a>(
        &'a self,
        rows: Range<u64>,
        user: &'a [i64],
        (first, events): (u64, &'a [i64]),
    ) -> HistoryRows<'a> {
        if rows.start.max(self.begin_rows()) < rows.end {
            let known = first + (events.len() / self.event_width()) as u64;
            assert!(self.event_at(rows.end - 1) < known, "rows up to {} of {known} events", rows.end);
        }
        HistoryRows { layout: self, rows, user, first, events }
    }

    /// The index of a row within its event.
    fn row_in_event(&self, row: u64) -> u64 {
        (row - self.begin_rows()) % self.event_rows()
    }

    /// Writes the keys of candidates to the columns of their features, starting at index `at`.
    pub(super) fn candidate_rows(&self, candidates: &[i64], at: usize, columns: &mut [Vec<i64>]) {
        for cell in &self.candidate {
            let to = columns[cell.feature][at..].iter_mut();
            cell.for_each(to, candidates, self.candidate_features.len(), |to, key| *to = key);
        }
    }
}

/// A range of rows of one user's history.
pub(super) struct HistoryRows<'a> {
    layout: &'a Layout,
    rows: Range<u64>,
    user: &'a [i64],
    /// The position of the first of `events`.
    first: u64,
    events: &'a [i64],
}

impl<'a> HistoryRows<'a> {
    /// Appends a fingerprint for each row: a hash of everything that the model reads of it. Works feature by feature,
    /// as [`Self::write_keys`] does.
    pub(super) fn fingerprints(&self, to: &mut Vec<u64>) {
        let Self { layout, rows, .. } = self;
        for row in rows.start..rows.end.min(layout.begin_rows()) {
            let cells = layout.begin[row as usize].iter();
            let hash = cells.fold(SEED, |hash, cell| cell.mix_into(hash, self.user));
            to.push(if layout.has_times { mix(hash) } else { hash });
        }
        let Some((from, width)) = self.event_rows_start() else { return };
        let at = to.len();
        to.resize(at + (rows.end - from) as usize, SEED);
        let step = layout.event_rows() as usize;
        for (own, number, cell) in self.cells_from(from) {
            let (hashes, numbers) = (to[at + (own - from) as usize..].iter_mut().step_by(step), self.values_from(own));
            if number == 0 {
                // The hash before the first cell is the same for all rows.
                let seed = cell.mix_feature(SEED);
                cell.for_each(hashes, numbers, width, |hash, key| *hash = mix(seed ^ key as u64));
            } else {
                cell.for_each(hashes, numbers, width, |hash, key| *hash = mix(cell.mix_feature(*hash) ^ key as u64));
            }
        }
        if layout.has_times {
            let mut times = Vec::new();
            self.times(&mut times);
            for (hash, time) in to[at..].iter_mut().zip(&times[times.len() - (rows.end - from) as usize..]) {
                *hash = mix(*hash ^ *time as u64);
            }
        }
    }

    /// Writes the keys of each row to the columns of their features, starting at index `at`. Feature by feature is
    /// several times as fast as row by row. `known`: no key of an event needs a default row, see
    /// [`FeatureKeys::check`].
    pub(super) fn write_keys(&self, at: usize, columns: &mut [Vec<i64>], known: bool) -> Result<()> {
        let Self { layout, rows, .. } = self;
        let place = |row: u64| at + (row - rows.start) as usize;
        for row in rows.start..rows.end.min(layout.begin_rows()) {
            for cell in &layout.begin[row as usize] {
                let key = layout.features[cell.feature].resolve(cell.key_in(self.user), layout.no_key)?;
                columns[cell.feature][place(row)] = key;
            }
        }
        let Some((from, width)) = self.event_rows_start() else { return Ok(()) };
        for (own, _, cell) in self.cells_from(from) {
            let (feature, numbers) = (&layout.features[cell.feature], self.values_from(own));
            let column = columns[cell.feature][place(own)..place(rows.end)].iter_mut();
            let column = column.step_by(layout.event_rows() as usize);
            if known {
                cell.for_each(column, numbers, width, |to, key| *to = key);
                continue;
            }
            for (to, numbers) in column.zip(numbers.chunks_exact(width)) {
                *to = feature.resolve(cell.key_in(numbers), layout.no_key)?;
            }
        }
        Ok(())
    }

    /// Appends the time of each row.
    pub(super) fn times(&self, to: &mut Vec<i64>) {
        let Self { layout, rows, .. } = self;
        to.extend((rows.start..rows.end.min(layout.begin_rows())).map(|_| 0));
        let Some((from, width)) = self.event_rows_start() else { return };
        let (step, before) = (layout.event_rows() as usize, layout.row_in_event(from) as usize);
        if !layout.has_times {
            to.extend((from..rows.end).map(|_| 0));
            return;
        }
        let numbers = self.values_from(from).chunks_exact(width);
        let times = numbers.flat_map(|numbers| std::iter::repeat_n(numbers[width - 1], step));
        to.extend(times.skip(before).take((rows.end - from) as usize));
    }

    /// The first row of an event, if there is one, and the number of numbers of an event.
    fn event_rows_start(&self) -> Option<(u64, usize)> {
        let from = self.rows.start.max(self.layout.begin_rows());
        (from < self.rows.end).then(|| (from, self.layout.event_width()))
    }

    /// The cells of event rows, each with the first row from `from` on that has the cell, and its index in that row.
    fn cells_from(&self, from: u64) -> impl Iterator<Item = (u64, usize, &'a Cell)> {
        let (layout, end, step) = (self.layout, self.rows.end, self.layout.event_rows());
        let own = move |part: u64| from + (part + step - layout.row_in_event(from)) % step;
        let parts = (0..).map(own).zip(&layout.event).filter(move |(own, _)| *own < end);
        parts.flat_map(|(own, cells)| cells.iter().enumerate().map(move |(number, cell)| (own, number, cell)))
    }

    /// The numbers of the event of a row, and of all later events. Iterating from there avoids a division for each row,
    /// which would dominate the cost.
    fn values_from(&self, row: u64) -> &'a [i64] {
        &self.events[(self.layout.event_at(row) - self.first) as usize * self.layout.event_width()..]
    }
}

impl Cell {
    /// Mixes this cell into the hash of a row.
    fn mix_into(&self, hash: u64, numbers: &[i64]) -> u64 {
        mix(self.mix_feature(hash) ^ self.key_in(numbers) as u64)
    }

    /// Mixes the feature of this cell, without the key, into the hash of a row.
    fn mix_feature(&self, hash: u64) -> u64 {
        mix(hash ^ self.feature as u64)
    }

    /// Calls `each` for each of `to` with its key, of `width` numbers each. Branches on the source of the key once,
    /// outside the loop.
    fn for_each<T>(&self, to: impl Iterator<Item = T>, numbers: &[i64], width: usize, mut each: impl FnMut(T, i64)) {
        match self.key {
            KeySource::Fixed(key) => to.take(numbers.len() / width).for_each(|to| each(to, key)),
            // As below, but the compiler can vectorise it.
            KeySource::Column(0) if width == 1 => to.zip(numbers).for_each(|(to, &key)| each(to, key)),
            KeySource::Column(column) => {
                to.zip(numbers.chunks_exact(width)).for_each(|(to, row)| each(to, row[column]))
            }
        }
    }

    fn key_in(&self, numbers: &[i64]) -> i64 {
        match self.key {
            KeySource::Column(column) => numbers[column],
            KeySource::Fixed(key) => key,
        }
    }
}

impl FeatureKeys {
    fn new(folder: &ModelFolder, name: &str, table: &str) -> Self {
        let found = folder.table(table).expect("a folder has the tables of its features");
        Self {
            name: name.to_owned(),
            table: table.to_owned(),
            rows: i64::try_from(found.rows).unwrap_or(i64::MAX),
            keyed: found.keyed,
            // In a keyed table a row number is not a key. The table itself applies the default.
            default: found.default_row.filter(|_| !found.keyed).map(|row| row as i64),
        }
    }

    /// Whether no key needs the default row. An error if one does and there is no default.
    pub(super) fn check(&self, keys: &[i64], no_key: i64) -> Result<bool> {
        // Without an early exit the compiler can vectorise the loop.
        let known = self.keyed || keys.iter().fold(true, |all, &key| all & ((key == no_key) | self.has_row(key)));
        if !known && self.default.is_none() {
            keys.iter().try_for_each(|&key| self.resolve(key, no_key).map(drop))?;
        }
        Ok(known)
    }

    /// Whether the table has this row.
    fn has_row(&self, key: i64) -> bool {
        (key >= 0) & (key < self.rows)
    }

    /// The key to look up: `key` itself, or the default if the table has no such row.
    pub(super) fn resolve(&self, key: i64, no_key: i64) -> Result<i64> {
        if self.keyed || key == no_key || self.has_row(key) {
            return Ok(key);
        }
        self.default.ok_or_else(|| {
            let (name, table, last) = (&self.name, &self.table, self.rows - 1);
            let message = format!(
                "{name:?} has the key {key}, and table {table:?} has rows 0 to {last} and no default row: leave it out, \
                 send {no_key} for none, or export the table with a default_row"
            );
            Error::new(Status::InvalidArgument, message)
        })
    }
}

/// The hash of a row before its first cell.
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Spreads the bits of a number.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{options, serving};
    use super::*;

    /// Stored histories are identified by these hashes: they must not depend on where a range of rows begins.
    #[test]
    #[cfg_attr(miri, ignore = "opens a model")]
    fn a_fingerprint_depends_on_the_cells_and_the_time_of_a_row() {
        let serving = serving(&options(), None);
        let layout = &serving.layout;
        assert!(layout.has_times && layout.begin_rows() > 0 && layout.event_rows() > 1, "a model with everything");
        let (user, width): (Vec<i64>, _) = ((1..).take(layout.user_features.len()).collect(), layout.event_width());
        let events: Vec<i64> = (10..).take(5 * width).collect();
        let rows = layout.row_of(5);
        let one = |row: u64| {
            let numbers = row.checked_sub(layout.begin_rows()).map(|row| {
                let (event, part) = (row / layout.event_rows(), row % layout.event_rows());
                (&layout.event[part as usize], &events[event as usize * width..][..width])
            });
            let (cells, numbers) = numbers.unwrap_or_else(|| (&layout.begin[row as usize], &user));
            let time = if row < layout.begin_rows() { 0 } else { numbers[width - 1] };
            let hash = cells.iter().fold(0x9E37_79B9_7F4A_7C15, |hash, cell| {
                mix(mix(hash ^ cell.feature as u64) ^ cell.key_in(numbers) as u64)
            });
            (mix(hash ^ time as u64), time)
        };
        for start in 0..rows {
            // The event of the first row.
            let first = layout.event_at(start);
            let tail = layout.history_rows(start..rows, &user, (first, &events[first as usize * width..]));
            let (mut hashes, mut times) = (Vec::new(), Vec::new());
            tail.fingerprints(&mut hashes);
            tail.times(&mut times);
            let expected: (Vec<u64>, Vec<i64>) = (start..rows).map(one).unzip();
            assert_eq!((hashes, times), expected, "from {start} on");
        }
        // Stored histories of older releases must still match.
        let mut hashes = Vec::new();
        layout.history_rows(0..rows, &user, (0, &events)).fingerprints(&mut hashes);
        assert_eq!((hashes[0], hashes[hashes.len() - 1]), (0xb46b8adc202df9ad, 0xb0c77a88c088f1e1));
    }
}
