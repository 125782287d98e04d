//! How requests of one model become rows: what pagoda.json says of features, by number instead of by name.

use std::ops::Range;

use crate::error::{Error, Result, Status};
use crate::folder::{ModelFolder, SourceOf};

/// The rows of one model.
pub(super) struct Layout {
    pub(super) no_key: i64,
    /// In the order of the folder.
    pub(super) features: Vec<Keys>,
    /// The features that an event has a key of, in the order in which events keep them; the time, if any, comes after the last.
    pub(super) of_event: Vec<usize>,
    /// The features that a candidate brings.
    pub(super) of_candidate: Vec<usize>,
    /// The features that a user has.
    pub(super) of_user: Vec<usize>,
    begin: Vec<Vec<Cell>>,
    event: Vec<Vec<Cell>>,
    candidate: Vec<Cell>,
    /// Whether rows have times.
    pub(super) timed: bool,
    /// What events are remembered as: those of another model with the same can be used.
    pub(super) signature: Vec<String>,
}

/// The keys that a feature can have.
pub(super) struct Keys {
    pub(super) name: String,
    /// The name of its table.
    pub(super) table: String,
    rows: i64,
    pub(super) keyed: bool,
    default: Option<i64>,
}

/// A feature that has a key in a row.
struct Cell {
    feature: usize,
    key: From,
}

/// Where the key comes from.
#[derive(Clone, Copy)]
enum From {
    /// This number of an event, a candidate or a user.
    Column(usize),
    /// It is always the same.
    Fixed(i64),
}

impl Layout {
    pub(super) fn new(folder: &ModelFolder) -> Self {
        let of = |kinds: &[SourceOf]| {
            let features = folder.features.iter().enumerate();
            features.filter(|(_, feature)| kinds.contains(&feature.source)).map(|(index, _)| index).collect::<Vec<_>>()
        };
        let of_event = of(&[SourceOf::Item, SourceOf::Action]);
        let (of_candidate, of_user) = (of(&[SourceOf::Item]), of(&[SourceOf::User]));
        let row = |names: &Vec<String>, columns: &[usize]| -> Vec<Cell> {
            let number = |name: &String| folder.features.iter().position(|feature| feature.name == *name);
            let cell = |feature: usize| match columns.iter().position(|&column| column == feature) {
                Some(column) => Cell { feature, key: From::Column(column) },
                None => {
                    let fixed = folder.features[feature].candidate_key.unwrap_or(folder.no_key);
                    Cell { feature, key: From::Fixed(fixed) }
                }
            };
            names.iter().filter_map(number).map(cell).collect()
        };
        let sequence = &folder.sequence;
        let named = |list: &[usize]| list.iter().map(|&index| folder.features[index].name.clone()).collect::<Vec<_>>();
        let timed = folder.times.is_some();
        let mut signature = named(&of_event);
        signature.push(if timed { "/timed/" } else { "//" }.to_owned());
        signature.extend(named(&of_user));
        Self {
            no_key: folder.no_key,
            features: folder.features.iter().map(|feature| Keys::new(folder, &feature.name, &feature.table)).collect(),
            begin: sequence.begin.iter().map(|names| row(names, &of_user)).collect(),
            event: sequence.event.iter().map(|names| row(names, &of_event)).collect(),
            candidate: row(&sequence.candidate, &of_candidate),
            of_event,
            of_candidate,
            of_user,
            timed,
            signature,
        }
    }

    /// Numbers that an event is kept as: its keys, and its time if rows have times.
    pub(super) fn width(&self) -> usize {
        (self.of_event.len() + usize::from(self.timed)).max(1)
    }

    /// Rows at the beginning of every history.
    pub(super) fn begin_rows(&self) -> u64 {
        self.begin.len() as u64
    }

    /// Rows of an event.
    pub(super) fn event_rows(&self) -> u64 {
        self.event.len() as u64
    }

    /// The row at which an event begins.
    pub(super) fn row_of(&self, event: u64) -> u64 {
        self.begin_rows() + event * self.event_rows()
    }

    /// How many whole events there are before a row.
    pub(super) fn event_at(&self, row: u64) -> u64 {
        row.saturating_sub(self.begin_rows()) / self.event_rows()
    }

    /// Rows of a history; `events` are those from `first` on, all that the rows are of.
    pub(super) fn history_rows<'a>(
        &'a self,
        rows: Range<u64>,
        user: &'a [i64],
        (first, events): (u64, &'a [i64]),
    ) -> HistoryRows<'a> {
        if rows.start.max(self.begin_rows()) < rows.end {
            let known = first + (events.len() / self.width()) as u64;
            assert!(self.event_at(rows.end - 1) < known, "rows up to {} of {known} events", rows.end);
        }
        HistoryRows { layout: self, rows, user, first, events }
    }

    /// Which of the rows of its event a row is.
    fn part_at(&self, row: u64) -> u64 {
        (row - self.begin_rows()) % self.event_rows()
    }

    /// Puts the keys of candidates into the columns of their features, from the place `at` on.
    pub(super) fn candidate_rows(&self, candidates: &[i64], at: usize, columns: &mut [Vec<i64>]) {
        for cell in &self.candidate {
            let to = columns[cell.feature][at..].iter_mut();
            cell.for_each(to, candidates, self.of_candidate.len(), |to, key| *to = key);
        }
    }
}

/// Rows of one user's history.
pub(super) struct HistoryRows<'a> {
    layout: &'a Layout,
    rows: Range<u64>,
    user: &'a [i64],
    /// The event that `events` begins with.
    first: u64,
    events: &'a [i64],
}

impl<'a> HistoryRows<'a> {
    /// Adds a number for each row that tells it from others: whatever the model makes of it goes into it. A feature
    /// after the other, as in [`Self::put`].
    pub(super) fn fingerprints(&self, to: &mut Vec<u64>) {
        let Self { layout, rows, .. } = self;
        for row in rows.start..rows.end.min(layout.begin_rows()) {
            let cells = layout.begin[row as usize].iter();
            let hash = cells.fold(SEED, |hash, cell| cell.mixed_into(hash, self.user));
            to.push(if layout.timed { mix(hash) } else { hash });
        }
        let Some((from, width)) = self.of_events() else { return };
        let at = to.len();
        to.resize(at + (rows.end - from) as usize, SEED);
        let step = layout.event_rows() as usize;
        for (own, number, cell) in self.cells_from(from) {
            let (hashes, numbers) = (to[at + (own - from) as usize..].iter_mut().step_by(step), self.numbers_from(own));
            if number == 0 {
                // Before their first cell all rows are the same.
                let begun = cell.begun(SEED);
                cell.for_each(hashes, numbers, width, |hash, key| *hash = mix(begun ^ key as u64));
            } else {
                cell.for_each(hashes, numbers, width, |hash, key| *hash = mix(cell.begun(*hash) ^ key as u64));
            }
        }
        if layout.timed {
            let mut times = Vec::new();
            self.times(&mut times);
            for (hash, time) in to[at..].iter_mut().zip(&times[times.len() - (rows.end - from) as usize..]) {
                *hash = mix(*hash ^ *time as u64);
            }
        }
    }

    /// Puts the keys of each row's cells into the columns of their features, from the place `at` on. A feature after
    /// the other: a row at a time takes several times as long. `known`: whether those of events are looked up as they are,
    /// see [`Keys::check`].
    pub(super) fn put(&self, at: usize, columns: &mut [Vec<i64>], known: bool) -> Result<()> {
        let Self { layout, rows, .. } = self;
        let place = |row: u64| at + (row - rows.start) as usize;
        for row in rows.start..rows.end.min(layout.begin_rows()) {
            for cell in &layout.begin[row as usize] {
                let key = layout.features[cell.feature].resolve(cell.key_in(self.user), layout.no_key)?;
                columns[cell.feature][place(row)] = key;
            }
        }
        let Some((from, width)) = self.of_events() else { return Ok(()) };
        for (own, _, cell) in self.cells_from(from) {
            let (feature, numbers) = (&layout.features[cell.feature], self.numbers_from(own));
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

    /// Adds each row's time.
    pub(super) fn times(&self, to: &mut Vec<i64>) {
        let Self { layout, rows, .. } = self;
        to.extend((rows.start..rows.end.min(layout.begin_rows())).map(|_| 0));
        let Some((from, width)) = self.of_events() else { return };
        let (step, before) = (layout.event_rows() as usize, layout.part_at(from) as usize);
        if !layout.timed {
            to.extend((from..rows.end).map(|_| 0));
            return;
        }
        let numbers = self.numbers_from(from).chunks_exact(width);
        let times = numbers.flat_map(|numbers| std::iter::repeat_n(numbers[width - 1], step));
        to.extend(times.skip(before).take((rows.end - from) as usize));
    }

    /// The first row that is an event's, if there is one, and how many numbers an event has.
    fn of_events(&self) -> Option<(u64, usize)> {
        let from = self.rows.start.max(self.layout.begin_rows());
        (from < self.rows.end).then(|| (from, self.layout.width()))
    }

    /// The cells of events' rows, each with the first row from `from` on that has it and its number there.
    fn cells_from(&self, from: u64) -> impl Iterator<Item = (u64, usize, &'a Cell)> {
        let (layout, end, step) = (self.layout, self.rows.end, self.layout.event_rows());
        let own = move |part: u64| from + (part + step - layout.part_at(from)) % step;
        let parts = (0..).map(own).zip(&layout.event).filter(move |(own, _)| *own < end);
        parts.flat_map(|(own, cells)| cells.iter().enumerate().map(move |(number, cell)| (own, number, cell)))
    }

    /// The numbers of the event that a row is of, and of all after it: who goes on from there needs no division for
    /// each row, which takes longer than all else that is done with it.
    fn numbers_from(&self, row: u64) -> &'a [i64] {
        &self.events[(self.layout.event_at(row) - self.first) as usize * self.layout.width()..]
    }
}

impl Cell {
    /// The hash of a row, with this.
    fn mixed_into(&self, hash: u64, numbers: &[i64]) -> u64 {
        mix(self.begun(hash) ^ self.key_in(numbers) as u64)
    }

    /// The hash of a row, with all of this but the key.
    fn begun(&self, hash: u64) -> u64 {
        mix(hash ^ self.feature as u64)
    }

    /// Calls `each` for each of `to` with the key that is its own, of `width` numbers each. Where the key comes from is
    /// looked at once, not for each.
    fn for_each<T>(&self, to: impl Iterator<Item = T>, numbers: &[i64], width: usize, mut each: impl FnMut(T, i64)) {
        match self.key {
            From::Fixed(key) => to.take(numbers.len() / width).for_each(|to| each(to, key)),
            // As below, but several can be looked at in one step.
            From::Column(0) if width == 1 => to.zip(numbers).for_each(|(to, &key)| each(to, key)),
            From::Column(column) => to.zip(numbers.chunks_exact(width)).for_each(|(to, row)| each(to, row[column])),
        }
    }

    fn key_in(&self, numbers: &[i64]) -> i64 {
        match self.key {
            From::Column(column) => numbers[column],
            From::Fixed(key) => key,
        }
    }
}

impl Keys {
    fn new(folder: &ModelFolder, name: &str, table: &str) -> Self {
        let found = folder.table(table).expect("a folder has the tables of its features");
        Self {
            name: name.to_owned(),
            table: table.to_owned(),
            rows: i64::try_from(found.rows).unwrap_or(i64::MAX),
            keyed: found.keyed,
            // In a keyed table a number of a row is no key: there the table knows the default.
            default: found.default_row.filter(|_| !found.keyed).map(|row| row as i64),
        }
    }

    /// Whether each of `keys` is looked up as it is; if not, there is a default, or this is an error.
    pub(super) fn check(&self, keys: &[i64], no_key: i64) -> Result<bool> {
        // Without a way out of the loop several are looked at in one step.
        let known = self.keyed || keys.iter().fold(true, |all, &key| all & ((key == no_key) | self.has_row(key)));
        if !known && self.default.is_none() {
            keys.iter().try_for_each(|&key| self.resolve(key, no_key).map(drop))?;
        }
        Ok(known)
    }

    /// Whether the table has a row of this number.
    fn has_row(&self, key: i64) -> bool {
        (key >= 0) & (key < self.rows)
    }

    /// The key to look up for `key`: itself, or the default where the table has no such row.
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

    /// Stored histories are told by these numbers: they are the same whoever computes them, and from wherever on.
    #[test]
    #[cfg_attr(miri, ignore = "opens a model")]
    fn a_row_is_told_by_its_cells_and_its_time() {
        let serving = serving(&options(), None);
        let layout = &serving.layout;
        assert!(layout.timed && layout.begin_rows() > 0 && layout.event_rows() > 1, "a model with everything");
        let (user, width): (Vec<i64>, _) = ((1..).take(layout.of_user.len()).collect(), layout.width());
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
            // From the event on that the first row is of.
            let first = layout.event_at(start);
            let tail = layout.history_rows(start..rows, &user, (first, &events[first as usize * width..]));
            let (mut hashes, mut times) = (Vec::new(), Vec::new());
            tail.fingerprints(&mut hashes);
            tail.times(&mut times);
            let expected: (Vec<u64>, Vec<i64>) = (start..rows).map(one).unzip();
            assert_eq!((hashes, times), expected, "from {start} on");
        }
        // What an older version has stored must be found.
        let mut hashes = Vec::new();
        layout.history_rows(0..rows, &user, (0, &events)).fingerprints(&mut hashes);
        assert_eq!((hashes[0], hashes[hashes.len() - 1]), (0xb46b8adc202df9ad, 0xb0c77a88c088f1e1));
    }
}
