//! Pages of text: lines and tables that begin with their topic.

use super::File;
use crate::words::bytes;

/// Lines that begin with their topic.
#[derive(Default)]
pub(super) struct Page(String);

impl Page {
    pub(super) fn into_text(self) -> String {
        self.0
    }

    pub(super) fn line(&mut self, name: &str, text: String) {
        self.0 += &format!("{name:<10}{text}\n");
    }

    /// Rows with aligned cells; sizes are right-aligned.
    pub(super) fn table(&mut self, name: &str, rows: &[Vec<String>]) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, at: usize| row.get(at).cloned().unwrap_or_default();
        let width = |at: usize| rows.iter().map(|row| cell(row, at).chars().count()).max().unwrap_or(0);
        for (number, row) in rows.iter().enumerate() {
            let cells = (0..columns).map(|at| {
                let (text, width) = (cell(row, at), width(at));
                if text.starts_with(|c: char| c.is_ascii_digit()) {
                    format!("{text:>width$}")
                } else {
                    format!("{text:<width$}")
                }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            self.line(if number == 0 { name } else { "" }, line.trim_end().to_owned());
        }
    }

    /// Every file with its size, and all together.
    pub(super) fn files(&mut self, files: &[File<'_>], together: u64) {
        let row = |name: &str, size: u64, word: &str| vec![name.to_owned(), bytes(size), word.to_owned()];
        let mut rows: Vec<_> = files.iter().map(|file| row(file.name, file.bytes, "whole")).collect();
        rows.push(row("together", together, ""));
        self.table("files", &rows);
    }
}

/// Names; of those that each layer has, such as `kv_pool_3`, only the first and the last.
pub(super) fn names(all: &[&str]) -> String {
    const OF_LAYERS: [&str; 7] =
        ["kv_pool_", "kv_scales_", "kv_pool.", "new_key.", "new_value.", "past_key_values.", "present."];
    let of_layers = |name: &str| OF_LAYERS.iter().any(|prefix| name.starts_with(prefix));
    let mut shown: Vec<String> = all.iter().filter(|name| !of_layers(name)).map(|name| (*name).to_owned()).collect();
    for prefix in OF_LAYERS {
        let names: Vec<&str> = all.iter().filter(|name| name.starts_with(prefix)).copied().collect();
        match names.as_slice() {
            [first, .., last] => shown.push(format!("{first} to {last}")),
            few => shown.extend(few.iter().map(|name| (*name).to_owned())),
        }
    }
    shown.join(", ")
}
