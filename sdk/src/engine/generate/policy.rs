//! Sequences whose keys and values have a fixed number of slots, and a policy that says which tokens stay in them.

use std::sync::Arc;

use super::kv_policy::KvPolicy;
use super::options::GeneratorOptions;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::folder::generate::SlotNames;
use crate::kv::KvFormat;
use crate::kv::policy::{CachePolicy, LayerSlots, Needs, SlotState, named};

/// A policy as a sequence has it.
#[derive(Debug)]
pub(super) struct ChosenPolicy {
    pub(super) policy: Box<dyn CachePolicy>,
    /// The most rows of a step that is not the first.
    chunk: usize,
    /// What the state of slots depends on, beside their number.
    pub(super) kind: String,
}

/// The slots of a generator's sequences, the policy of those that choose none, and the graph's names for the slots.
pub(super) struct OpenPolicy {
    default: Arc<ChosenPolicy>,
    options: KvPolicy,
    pub(super) names: Vec<SlotNames>,
    pub(super) heads: usize,
    /// The slots of each layer.
    pub(super) lens: Vec<usize>,
    /// The most rows of a sequence in one step.
    room: usize,
}

impl OpenPolicy {
    /// Checks the options; `None` if all tokens stay. The names are set when the graph is rewritten.
    pub(super) fn open(options: &GeneratorOptions, folder: &GenerateFolder) -> Result<Option<Self>> {
        let Some(chosen) = options.kv_policy.as_ref().filter(|chosen| !chosen.is_dense()) else { return Ok(None) };
        let policy = named(&chosen.name, &chosen.options()).map_err(about)?;
        let format = options.kv_format.unwrap_or(folder.kv.format);
        if policy.needs().errors && format == KvFormat::Native {
            let message = format!(
                "{} keeps what quantisation has damaged least, and the pages are native: set options.kv_format to int8, int4 or \
                 fp8, or take {}",
                chosen.name,
                chosen.name.trim_start_matches('q')
            );
            return Err(Error::new(Status::Unsupported, message).about("options.kv_policy.name"));
        }
        let heads = folder.kv.heads as usize;
        let lens = lens(chosen, folder.kv.layers as usize)?;
        if chosen.chunk_size == 0 {
            return Err(Error::invalid(
                "options.kv_policy.chunk_size",
                "0 tokens a step read no prompt; expected 1 or more",
            ));
        }
        for &len in &lens {
            LayerSlots::new(&*policy, heads, len).map_err(about)?;
        }
        // Chunks do not depend on what else runs: there is always room for this many beside sequences that decode.
        let room = options.max_batch_tokens.saturating_sub(options.max_batch).max(1) as usize;
        let default = Arc::new(ChosenPolicy::new(policy, chosen, room));
        Ok(Some(Self { default, options: chosen.clone(), names: Vec::new(), heads, lens, room }))
    }

    /// The policy of a request: its own, or the generator's. `first_message`: how many tokens of the prompt are the first message.
    ///
    /// # Errors
    /// UNSUPPORTED for a policy that needs what the generator's graph does not return. INVALID_ARGUMENT for invalid options.
    pub(super) fn choose(&self, own: Option<&KvPolicy>, first_message: Option<usize>) -> Result<Arc<ChosenPolicy>> {
        let chosen = own.unwrap_or(&self.options);
        let protect = first_message.filter(|_| chosen.protect_first_message);
        if own.is_none() && protect.is_none() {
            return Ok(Arc::clone(&self.default));
        }
        let of_request = |error: Error| about(error.clone()).about(within(error.argument().unwrap_or("name")));
        let mut options = chosen.options();
        options.protect = protect.or(options.protect);
        let policy = named(&chosen.name, &options).map_err(of_request)?;
        let (needs, has) = (policy.needs(), self.needs());
        if needs.weights && !has.weights || needs.lengths && !has.lengths || needs.errors && !has.errors {
            let message = format!(
                "{} needs weights, lengths or errors that the model does not return for {}, which the generator was opened with",
                chosen.name, self.options.name
            );
            return Err(Error::new(Status::Unsupported, message).about("kv_policy.name"));
        }
        let lens = lens(chosen, self.lens.len())?;
        if lens != self.lens && (chosen.cache_length, chosen.cache_lengths.len()) != (0, 0) {
            let message = "the slots of all sequences are those that the generator was opened with: leave this 0";
            return Err(Error::new(Status::Unsupported, message).about("kv_policy.cache_length"));
        }
        if chosen.chunk_size == 0 {
            return Err(Error::invalid("kv_policy.chunk_size", "0 tokens a step read no prompt; expected 1 or more"));
        }
        for &len in &self.lens {
            LayerSlots::new(&*policy, self.heads, len).map_err(of_request)?;
        }
        let mut chosen = ChosenPolicy::new(policy, chosen, self.room);
        chosen.kind.push_str(&format!(", {:?}", options.protect));
        Ok(Arc::new(chosen))
    }

    /// Whether the first message of a chat is protected, where a request does not say otherwise.
    pub(super) fn protects_first_message(&self, own: Option<&KvPolicy>) -> bool {
        own.unwrap_or(&self.options).protect_first_message
    }

    /// Whether the slots that steps write are logged.
    pub(super) fn has_log(&self) -> bool {
        self.options.replay_log
    }

    /// Whether a GPU can decide, too.
    pub(super) fn has_device_rule(&self) -> bool {
        self.lens.iter().all(|&len| self.default.policy.device_rule(len).is_some())
    }

    /// What the graph returns for the policy.
    pub(super) fn needs(&self) -> Needs {
        self.default.policy.needs()
    }

    /// Whether the graph returns the lengths of values and the errors of their format.
    pub(super) fn needs_norms(&self) -> bool {
        self.needs().lengths || self.needs().errors
    }

    /// What all stored slots depend on, beside the model and the format.
    pub(super) fn kind(&self) -> String {
        format!("slots, {:?}", self.lens)
    }

    /// The slots of the layer that has the most: they say how many pages a sequence has.
    fn longest(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// The tokens whose pages a sequence of so many tokens takes.
    pub(super) fn slots_of(&self, tokens: usize) -> usize {
        tokens.min(self.longest())
    }

    /// The slots of each layer whose state is kept; of all layers at once where they do not differ.
    pub(super) fn state_lens(&self) -> &[usize] {
        let differ = self.needs().weights || self.lens.iter().any(|&len| len != self.lens[0]);
        if differ { &self.lens } else { &self.lens[..1] }
    }

    /// Free slots for a sequence.
    pub(super) fn slots(&self, chosen: &Arc<ChosenPolicy>) -> Result<Slots> {
        let layer = |&len: &usize| LayerSlots::new(&*chosen.policy, self.heads, len);
        let layers = self.state_lens().iter().map(layer).collect::<Result<_>>()?;
        Ok(Slots { chosen: Arc::clone(chosen), layers, state: None })
    }

    /// How many of the rows that are left the next step of a sequence computes: as many as every layer can take.
    pub(super) fn rows(&self, slots: &Slots, left: usize) -> usize {
        let most = if slots.seen() == 0 { self.room } else { slots.chosen.chunk };
        slots.layers.iter().fold(left.min(most), |rows, layer| layer.most_rows(&*slots.chosen.policy, rows))
    }
}

impl ChosenPolicy {
    fn new(policy: Box<dyn CachePolicy>, chosen: &KvPolicy, room: usize) -> Self {
        let kind = format!("{}, {:?}", chosen.name, chosen.options());
        Self { policy, chunk: (chosen.chunk_size as usize).min(room), kind }
    }
}

/// An error of the policy itself, about the option that it came from.
fn about(error: Error) -> Error {
    let argument = format!("options.{}", within(error.argument().unwrap_or("name")));
    error.about(argument)
}

/// The option that an argument of a policy comes from.
fn within(argument: &str) -> String {
    format!("kv_policy.{}", argument.replace("policy", "name"))
}

/// The slots of each layer.
fn lens(chosen: &KvPolicy, layers: usize) -> Result<Vec<usize>> {
    if chosen.cache_lengths.is_empty() {
        return Ok(vec![chosen.cache_length as usize; layers]);
    }
    if chosen.cache_lengths.len() != layers {
        let message =
            format!("{} numbers for a model of {layers} layers: give one for each", chosen.cache_lengths.len());
        return Err(Error::invalid("options.kv_policy.cache_lengths", message));
    }
    Ok(chosen.cache_lengths.iter().map(|&len| len as usize).collect())
}

/// The slots of one sequence.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) chosen: Arc<ChosenPolicy>,
    pub(super) layers: Vec<LayerSlots>,
    /// Where the slots are on the GPU. Then `layers` counts tokens alone: what is in the slots is there.
    pub(super) state: Option<SlotState>,
}

impl Slots {
    /// Tokens that came so far.
    pub(super) fn seen(&self) -> usize {
        self.layers[0].seen()
    }

    /// Slots that are in use, of the layer that has the most.
    pub(super) fn used(&self) -> usize {
        self.layers.iter().map(LayerSlots::used).max().unwrap_or(0)
    }

    /// The slots that so many more tokens fill, of that layer.
    pub(super) fn filled_by(&self, rows: usize) -> usize {
        let longest = self.layers.iter().map(LayerSlots::len).max().unwrap_or(0);
        rows.min(longest - self.used())
    }
}
