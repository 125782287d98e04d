//! The report as text.

use super::super::page::{Page, names};
use super::{Feature, Report};
use crate::words::{bytes, counted};

impl Report<'_> {
    /// All of it, section by section.
    pub(in super::super) fn text(&self) -> String {
        let mut page = Page::default();
        page.line("model", format!("{}, version {}", self.folder, self.version));
        let shape = format!("{} of {} × {}", counted(self.layers.into(), "layer"), self.heads, self.head_size);
        page.line("blocks", format!("{}, {shape}, rows of {}", self.block, self.embedding_size));
        let tasks = self.tasks.iter().map(|task| format!("{} ({})", task.name, task.activation));
        page.line("tasks", tasks.collect::<Vec<_>>().join(", "));
        page.table("features", &self.features());
        page.line("history", self.history());
        let candidates = counted(self.limits.max_candidates, "candidate");
        page.line("limits", format!("{} and {candidates}", counted(self.limits.max_history, "event")));
        page.line("cache", self.cache());
        page.line("inputs", names(&self.inputs));
        page.line("outputs", names(&self.outputs));
        page.files(&self.files, self.bytes_on_disk);
        page.table("memory", &self.memory());
        page.line("request", self.example.clone());
        page.into_text()
    }

    fn features(&self) -> Vec<Vec<String>> {
        self.features.iter().map(|feature| self.feature(feature)).collect()
    }

    fn feature(&self, feature: &Feature<'_>) -> Vec<String> {
        let of = if feature.of == "user" { "of the user".to_owned() } else { format!("of an {}", feature.of) };
        let Some(table) = self.tables.iter().find(|table| table.name == feature.table) else {
            return vec![feature.name.to_owned(), of, format!("table {}", feature.table)];
        };
        let size = format!("{} of {}", counted(table.rows, "row"), table.dim);
        let keys = if table.keyed { "keys of its own" } else { "keys are row numbers" };
        let others = match table.default_row {
            Some(row) => format!("others get row {row}"),
            None => "others are refused".to_owned(),
        };
        vec![feature.name.to_owned(), of, format!("table {}", table.name), size, format!("{keys}, {others}")]
    }

    fn history(&self) -> String {
        let rows = |rows: &[Vec<String>]| {
            let rows: Vec<String> = rows.iter().map(|row| row.join(" + ")).collect();
            format!("{} ({})", counted(rows.len() as u64, "row"), rows.join(", "))
        };
        let mut parts = vec![format!("{} an event", rows(self.sequence.event))];
        if !self.sequence.begin.is_empty() {
            parts.insert(0, format!("{} of the user first", rows(self.sequence.begin)));
        }
        parts.extend(self.positions.map(|counted| format!("positions counted {}", counted.replace('_', " the "))));
        parts.extend(self.times.map(|times| format!("times {}", times.replace('_', " the "))));
        parts.join(", ")
    }

    fn cache(&self) -> String {
        let Some(reason) = self.kv.reason.filter(|_| !self.kv.cache) else {
            let size = bytes(self.kv.bytes_per_token);
            return format!("{} keys and values, {size} a row, pages of {} rows", self.kv.element, self.kv.page_size);
        };
        format!("none, every request computes its whole history: {reason}")
    }

    fn memory(&self) -> Vec<Vec<String>> {
        let memory = &self.memory;
        let row = |name: &str, size: u64, word: &str| vec![name.to_owned(), bytes(size), word.to_owned()];
        let tables = if self.lookup == "bag" {
            "and up to one and a half times as much for their caches"
        } else {
            "they are in the weights"
        };
        let mut rows = vec![
            row("weights", memory.session_weights, "more where ONNX Runtime keeps a second copy in another order"),
            row("tables", memory.tables, tables),
        ];
        if let Some(by_format) = &memory.kv_per_row_by_format {
            rows.push(row("keys and values of a row", memory.kv_per_row, &by_format.text()));
            rows.push(row("of 1,000 events", memory.kv_per_1000_events, ""));
            let users = format!("of {} with {} each", counted(memory.users, "user"), counted(memory.events, "event"));
            rows.push(row(&users, memory.kv_of_users, "what memory has no room for goes to the store"));
        }
        rows
    }
}
