//! The report as text.

use super::super::page::{Page, names};
use super::Report;
use crate::words::{bytes, count, counted};

impl Report<'_> {
    /// All of it, section by section.
    pub(in super::super) fn text(&self) -> String {
        let mut page = Page::default();
        page.line("model", format!("{}, version {}", self.folder, self.version));
        page.line("blocks", self.blocks());
        if self.form != "paged" {
            page.line("form", format!("{}: {}", self.form, self.taken_as));
            self.notes.iter().for_each(|note| page.line("", note.clone()));
        }
        page.line("weights", self.weights());
        let context = counted(self.limits.max_context.into(), "token");
        page.line("limits", format!("{context} a sequence, a vocabulary of {}", count(self.vocab_size.into())));
        page.line("tokens", self.tokens());
        page.line("text", self.templates());
        page.line("defaults", self.defaults());
        page.line("cache", self.cache());
        page.line("inputs", names(&self.inputs));
        page.line("outputs", names(&self.outputs));
        page.files(&self.files, self.bytes_on_disk);
        page.table("memory", &self.memory());
        page.into_text()
    }

    fn blocks(&self) -> String {
        let (attention, kv) = (&self.attention, &self.kv);
        let layers = counted(attention.layers.into(), "layer");
        let heads = format!("{} of {}", counted(attention.heads.into(), "head"), kv.head_size);
        let shared = match kv.heads == attention.heads {
            true => String::new(),
            false => format!(" over {}", counted(kv.heads.into(), "kv head")),
        };
        let blocks = format!("{}, {layers} with {heads}{shared}, rows of {}", self.architecture, self.hidden_size);
        format!("{blocks}{}", self.windows())
    }

    /// How many layers see only the last tokens.
    fn windows(&self) -> String {
        let mut sizes: Vec<u32> = self.attention.windows.iter().copied().filter(|&window| window > 0).collect();
        let sliding = sizes.len();
        sizes.sort_unstable();
        sizes.dedup();
        if sliding == 0 {
            return String::new();
        }
        let of = if sliding == self.attention.windows.len() {
            "all layers".to_owned()
        } else {
            counted(sliding as u64, "layer")
        };
        let sizes: Vec<String> = sizes.iter().map(|&size| count(size.into())).collect();
        format!(", windows of {} tokens in {of}", sizes.join(" or "))
    }

    fn weights(&self) -> String {
        match self.weights {
            "native" => format!("{}, computed in {}", self.compute, self.compute),
            quantised => {
                format!("{quantised} in blocks of 32, the rest {}, computed in {}", self.compute, self.compute)
            }
        }
    }

    fn tokens(&self) -> String {
        let tokens = &self.tokens;
        let mut parts = Vec::new();
        if let Some(bos) = tokens.bos {
            let added = if tokens.add_bos { "before every text" } else { "not added" };
            parts.push(format!("bos {bos} ({added})"));
        }
        if !tokens.eos.is_empty() {
            let eos: Vec<String> = tokens.eos.iter().map(ToString::to_string).collect();
            parts.push(format!("eos {}", eos.join(" or ")));
        }
        let others = [("pad", tokens.pad), ("unk", tokens.unk)];
        parts.extend(others.into_iter().filter_map(|(name, token)| Some(format!("{name} {}", token?))));
        if parts.is_empty() { "none with a meaning".to_owned() } else { parts.join(", ") }
    }

    fn templates(&self) -> String {
        match self.text.chat_template {
            Some(_) => "a tokenizer and a chat template".to_owned(),
            None => "a tokenizer, no chat template".to_owned(),
        }
    }

    /// By the names of requests.
    fn defaults(&self) -> String {
        let generation = &self.generation;
        let whole = |number: Option<u32>| number.map(|number| number.to_string());
        let real = |number: Option<f64>| number.map(|number| number.to_string());
        let all = [
            ("do_sample", generation.do_sample.map(|flag| flag.to_string())),
            ("temperature", real(generation.temperature)),
            ("top_k", whole(generation.top_k)),
            ("top_p", real(generation.top_p)),
            ("min_p", real(generation.min_p)),
            ("repetition_penalty", real(generation.repetition_penalty)),
            ("no_repeat_ngram_size", whole(generation.no_repeat_ngram_size)),
            ("max_new_tokens", whole(generation.max_new_tokens)),
            ("min_new_tokens", whole(generation.min_new_tokens)),
        ];
        let set: Vec<String> = all.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value?))).collect();
        if set.is_empty() { "the model sets none".to_owned() } else { set.join(", ") }
    }

    fn cache(&self) -> String {
        let kv = &self.kv;
        let numbers = if kv.format == "native" { kv.element } else { kv.format };
        format!("{numbers} keys and values, {} a token, pages of {} tokens", bytes(kv.bytes_per_token), kv.page_size)
    }

    fn memory(&self) -> Vec<Vec<String>> {
        let memory = &self.memory;
        let row = |name: &str, size: u64, word: &str| vec![name.to_owned(), bytes(size), word.to_owned()];
        let longest = format!("of a sequence of {}", counted(self.limits.max_context.into(), "token"));
        vec![
            row("weights", memory.session_weights, "more where ONNX Runtime keeps a second copy in another order"),
            row("keys and values of a token", memory.kv_per_token, &memory.kv_per_token_by_format.text()),
            row("of 1,000 tokens", memory.kv_per_1000_tokens, ""),
            row(&longest, memory.kv_of_longest_sequence, "in whole pages"),
        ]
    }
}
