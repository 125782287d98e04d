//! How requests of one model become rows: what pagoda.json says of features, by number instead of by name.

use std::ops::Range;

use super::folder::{ModelFolder, SourceOf};
use crate::error::{Error, Result, Status};

/// The rows of one model.
pub(super) struct Layout {
    pub(super) no_key: i64,
    /// In the order of the folder.
    pub(super) features: Vec<Keys>,
    /// The features that an event has a key of, in the order in which events keep them; the time comes after the last.
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

    /// Numbers that an event is kept as: its keys, and its time.
    pub(super) fn width(&self) -> usize {
        self.of_event.len() + 1
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

    /// Calls `put` with the feature and the key of every cell of a history's row. `events` has the numbers of the
    /// events from `first` on.
    pub(super) fn history_row(
        &self,
        row: u64,
        user: &[i64],
        (first, events): (u64, &[i64]),
        mut put: impl FnMut(usize, i64),
    ) -> i64 {
        let (cells, numbers, time) = match row.checked_sub(self.begin_rows()) {
            None => (&self.begin[row as usize], user, 0),
            Some(row) => {
                let (event, part) = (row / self.event_rows() - first, row % self.event_rows());
                let numbers = &events[event as usize * self.width()..][..self.width()];
                (&self.event[part as usize], numbers, numbers[self.width() - 1])
            }
        };
        for cell in cells {
            put(cell.feature, cell.key_in(numbers));
        }
        time
    }

    /// Rows of a history, to be put into columns.
    pub(super) fn history_rows<'a>(
        &'a self,
        rows: Range<u64>,
        user: &'a [i64],
        (first, events): (u64, &'a [i64]),
    ) -> HistoryRows<'a> {
        HistoryRows { layout: self, rows, user, first, events }
    }

    /// Puts the keys of candidates into the columns of their features, from the place `at` on.
    pub(super) fn candidate_rows(&self, candidates: &[i64], at: usize, columns: &mut [Vec<i64>]) {
        for cell in &self.candidate {
            let to = &mut columns[cell.feature][at..];
            for (to, numbers) in to.iter_mut().zip(candidates.chunks_exact(self.of_candidate.len())) {
                *to = cell.key_in(numbers);
            }
        }
    }

    /// A number that tells a row from others: whatever the model makes of it goes into it.
    pub(super) fn fingerprint(&self, row: u64, user: &[i64], events: (u64, &[i64])) -> u64 {
        let mut hash = 0x9E37_79B9_7F4A_7C15;
        let time = self.history_row(row, user, events, |feature, key| {
            hash = mix(hash ^ feature as u64);
            hash = mix(hash ^ key as u64);
        });
        if self.timed { mix(hash ^ time as u64) } else { hash }
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

impl HistoryRows<'_> {
    /// Puts the keys of each row's cells into the columns of their features, from the place `at` on, and adds its time. A
    /// feature after the other: a row at a time takes several times as long.
    pub(super) fn put(&self, at: usize, columns: &mut [Vec<i64>], times: &mut Vec<i64>) -> Result<()> {
        let Self { layout, rows, .. } = self;
        let (begin, step, width) = (layout.begin_rows(), layout.event_rows(), layout.width());
        let place = |row: u64| at + (row - rows.start) as usize;
        for row in rows.start..rows.end.min(begin) {
            for cell in &layout.begin[row as usize] {
                let key = layout.features[cell.feature].resolve(cell.key_in(self.user), layout.no_key)?;
                columns[cell.feature][place(row)] = key;
            }
            times.push(0);
        }
        let from = rows.start.max(begin);
        if from >= rows.end {
            return Ok(());
        }
        let numbers = |row: u64| &self.events[((row - begin) / step - self.first) as usize * width..][..width];
        for (part, cells) in (0..).zip(&layout.event) {
            // The first row from there on that is this part of an event.
            let own = from + (part + step - (from - begin) % step) % step;
            for cell in cells {
                let (feature, column) = (&layout.features[cell.feature], &mut columns[cell.feature]);
                for row in (own..rows.end).step_by(step as usize) {
                    column[place(row)] = feature.resolve(cell.key_in(numbers(row)), layout.no_key)?;
                }
            }
        }
        times.extend((from..rows.end).map(|row| numbers(row)[width - 1]));
        Ok(())
    }
}

impl Cell {
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

    /// The key to look up for `key`: itself, or the default where the table has no such row.
    pub(super) fn resolve(&self, key: i64, no_key: i64) -> Result<i64> {
        if self.keyed || key == no_key || (0..self.rows).contains(&key) {
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

/// Spreads the bits of a number.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}
