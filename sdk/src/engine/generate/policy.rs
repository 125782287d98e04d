//! Sequences whose keys and values have a fixed number of slots, and a policy that says which tokens stay in them.

use super::options::GeneratorOptions;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::folder::generate::SlotNames;
use crate::kv::policy::{CachePolicy, LayerSlots, named};

/// A policy that is in use, and the graph's names for its slots.
pub(super) struct OpenPolicy {
    pub(super) policy: Box<dyn CachePolicy>,
    pub(super) names: Vec<SlotNames>,
    pub(super) heads: usize,
    pub(super) len: usize,
    /// The most rows of a sequence's first step, and of a later one.
    first_chunk: usize,
    chunk: usize,
}

impl OpenPolicy {
    /// Checks the options. The names are set when the graph is rewritten.
    pub(super) fn open(options: &GeneratorOptions, folder: &GenerateFolder) -> Result<Option<Self>> {
        let Some(chosen) = &options.kv_policy else { return Ok(None) };
        let about = |error: Error| {
            let argument =
                format!("options.kv_policy.{}", error.argument().unwrap_or("name").replace("policy", "name"));
            error.about(argument)
        };
        if options.store.is_some() || options.host_bytes > 0 {
            let message = format!(
                "slots of {} change in place, and can not go to host memory or a store: leave options.store and \
                 options.host_bytes unset",
                chosen.name
            );
            return Err(Error::new(Status::Unsupported, message).about("options.kv_policy"));
        }
        if chosen.name.starts_with("qh2o") || chosen.name == "h2o-vlen" {
            let message = format!(
                "{} needs the lengths of values, or the errors of quantisation, which generators do not know: take lastrec, \
                 smart-lastrec or h2o",
                chosen.name
            );
            return Err(Error::new(Status::Unsupported, message).about("options.kv_policy.name"));
        }
        let policy = named(&chosen.name, &chosen.options()).map_err(about)?;
        let (heads, len) = (folder.kv.heads as usize, chosen.cache_length as usize);
        if chosen.chunk_size == 0 {
            return Err(Error::invalid(
                "options.kv_policy.chunk_size",
                "0 tokens a step read no prompt; expected 1 or more",
            ));
        }
        LayerSlots::new(&*policy, heads, len).map_err(about)?;
        // Chunks do not depend on what else runs: there is always room for this many beside sequences that decode.
        let room = options.max_batch_tokens.saturating_sub(options.max_batch).max(1) as usize;
        let chunk = (chosen.chunk_size as usize).min(room);
        Ok(Some(Self { policy, names: Vec::new(), heads, len, first_chunk: len.min(room), chunk }))
    }

    /// Whether the graph returns the weights of slots.
    pub(super) fn needs_weights(&self) -> bool {
        self.policy.needs_weights()
    }

    /// The tokens whose pages a sequence of so many tokens takes.
    pub(super) fn slots_of(&self, tokens: usize) -> usize {
        tokens.min(self.len)
    }

    /// Free slots for a sequence: of each layer, or of all layers at once where they do not differ.
    pub(super) fn slots(&self) -> Result<Slots> {
        let layers = if self.needs_weights() { self.names.len() } else { 1 };
        let layer = || LayerSlots::new(&*self.policy, self.heads, self.len);
        Ok(Slots { layers: (0..layers).map(|_| layer()).collect::<Result<_>>()? })
    }

    /// How many of the rows that are left the next step of a sequence computes.
    pub(super) fn rows(&self, slots: &Slots, left: usize) -> usize {
        let first = &slots.layers[0];
        let most = if first.seen() == 0 { self.first_chunk } else { self.chunk };
        first.most_rows(&*self.policy, left.min(most))
    }
}

/// The slots of one sequence.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub(super) layers: Vec<LayerSlots>,
}

impl Slots {
    /// Slots that are in use.
    pub(super) fn used(&self) -> usize {
        self.layers[0].used()
    }

    /// The slots that so many more tokens fill.
    pub(super) fn filled_by(&self, rows: usize) -> usize {
        rows.min(self.layers[0].len() - self.used())
    }
}
