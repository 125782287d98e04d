//! An open model folder: its model, its KV cache, and its text files.

use std::sync::{Arc, OnceLock};

use super::super::exec::{Graphs, Shape};
use super::draft;
use super::forms::options as form_options;
use super::grammar::GrammarCompiler;
use super::options::GeneratorOptions;
use super::policy::OpenPolicy;
use super::request::{Chat, Prompt};
use crate::device::Gpu;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::folder::generate::{Form, PagesForm, RewrittenGraphs};
use crate::kv::{Edited, KvCache, KvOptions, Offload, Overlap};
use crate::runtime::{self, Model, ModelOptions, Provider};
use crate::store::Store;
use crate::tensor::ElementType;
use crate::text::{ChatInput, ChatTemplate, Tokenizer};

/// The fewest pages of a decode batch that has a CUDA graph of its own.
const LEAST_PAGES: u32 = 64;

/// The environment variables that keep graphs as they are, with the value 0: that do not fuse dense nodes, and do not rewrite
/// decoders of other exporters.
const FUSED: &str = "PAGODA_FUSED";
const REWRITTEN: &str = "PAGODA_REWRITTEN";

/// An open model.
pub(super) struct OpenModel {
    pub(super) folder: GenerateFolder,
    pub(super) model: Arc<Model>,
    /// Present if decode batches run as CUDA graphs. Dropped before `kv`: the graphs refer to its pools.
    pub(super) graphs: Option<Graphs>,
    pub(super) kv: KvCache,
    /// The GPU that runs the model and all of its operators.
    pub(super) device_id: Option<u32>,
    /// The pages of the pool.
    pub(super) pages: u64,
    pub(super) tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// Made for the first request with a grammar.
    grammars: OnceLock<Result<GrammarCompiler>>,
    pub(super) version: Arc<str>,
    /// Present if sequences have a fixed number of slots.
    pub(super) policy: Option<OpenPolicy>,
    /// With a policy: where its sessions are stored. The cache has no store then.
    pub(super) slot_store: Option<Arc<dyn Store>>,
}

/// What turns texts into tokens.
struct Texts {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl Texts {
    fn open(folder: &GenerateFolder) -> Result<Self> {
        let tokenizer = Arc::new(Tokenizer::from_file(folder.file(&folder.text.tokenizer))?);
        let template = folder.chat_template()?;
        let template = template.map(|source| ChatTemplate::new(&source, &folder.text.template_tokens)).transpose()?;
        Ok(Self { tokenizer, template })
    }
}

impl OpenModel {
    /// Opens a folder and everything under it. A decoder of another exporter is rewritten for pages, where its graph is recognised.
    pub(super) fn open(
        folder: GenerateFolder,
        options: &GeneratorOptions,
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self> {
        if matches!(folder.form, Form::PastPresent(_)) && is_asked(REWRITTEN) {
            let path = folder.path().display();
            match folder.with_paged_attention() {
                Ok((rewritten, graphs)) => {
                    log::info!("{path} is rewritten for pages; {REWRITTEN}=0 runs it as it is");
                    let texts = Texts::open(&rewritten)?;
                    match Self::open_as(rewritten, texts, Some(graphs), options, store.clone()) {
                        // Of the graph: the texts are open.
                        Err(error) if error.status() == Status::Model => {
                            log::warn!(
                                "{path} is run as it is, because its rewritten graph can not be opened: {error}"
                            );
                        }
                        outcome => return outcome,
                    }
                }
                Err(error) => log::info!("{path} is run as it is: {error}"),
            }
        }
        Self::open_as_it_is(folder, options, store)
    }

    /// Opens a folder with the graph that it has.
    pub(super) fn open_as_it_is(
        folder: GenerateFolder,
        options: &GeneratorOptions,
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self> {
        if folder.form != Form::Paged {
            let (path, form, notes) = (folder.path().display(), folder.form.name(), folder.form.notes().join("; "));
            log::info!("{path} is run in the form {form}: {notes}");
        }
        let texts = Texts::open(&folder)?;
        Self::open_as(folder, texts, None, options, store)
    }

    /// Opens a folder with its graph, or `graphs` in its place. An error with the status MODEL is about the graph.
    fn open_as(
        folder: GenerateFolder,
        Texts { tokenizer, template }: Texts,
        graphs: Option<RewrittenGraphs>,
        options: &GeneratorOptions,
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self> {
        let model_options = form_options::model_options(&folder, options)?;
        let mut policy = OpenPolicy::open(options, &folder)?;
        let form = PagesForm {
            format: options.kv_format.unwrap_or(folder.kv.format),
            slots: policy.is_some(),
            weights: policy.as_ref().is_some_and(|policy| policy.needs().weights),
            norms: policy.as_ref().is_some_and(OpenPolicy::needs_norms),
        };
        let rewritten = if folder.form == Form::Paged { folder.with_pages(graphs.as_ref(), form)? } else { None };
        let (folder, graphs) = match rewritten {
            Some((folder, graphs)) => (folder, Some(graphs)),
            None => (folder, graphs),
        };
        if let (Some(policy), Some(graphs)) = (&mut policy, &graphs) {
            policy.names.clone_from(&graphs.slots);
        }
        let model = open_fastest(&folder, graphs.as_ref(), &model_options)?;
        // The bytes of graphs, which may have weights in them.
        drop(graphs);
        form_options::check(&folder, &model)?;
        let device_id = model.operators_on_gpu().then_some(options.model.device_id);
        let (store, slot_store) = if policy.is_some() { (None, store) } else { (store, None) };
        let kv = open_kv(&folder, options, policy.is_some(), device_id, store)?;
        let pages = kv.stats().pages;
        let device_id = device_id.filter(|_| model.provider() == Provider::Cuda);
        let graphs = device_id.filter(|_| folder.main.is_none()).map(|device| {
            let context = folder.limits.max_context as usize;
            let context = policy.as_ref().map_or(context, |policy| policy.slots_of(context)) as u64;
            let context = context.div_ceil(folder.kv.page_size.into());
            Graphs::new(device, &decode_shapes(options.max_batch, context, pages), context, pages)
        });
        let version = folder.version.as_str().into();
        Ok(Self {
            folder,
            model,
            graphs,
            kv,
            device_id,
            pages,
            tokenizer,
            template,
            grammars: OnceLock::new(),
            version,
            policy,
            slot_store,
        })
    }

    /// The tokens of a prompt.
    pub(super) fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Tokens(tokens) => {
                let vocab = self.folder.vocab_size;
                match tokens.iter().position(|&token| token >= vocab) {
                    None => Ok(tokens.clone()),
                    Some(at) => {
                        let message = format!("{} is no token: the model has {vocab}, from 0 on", tokens[at]);
                        Err(Error::invalid(format!("prompt[{at}]"), message))
                    }
                }
            }
            Prompt::Text(text) => self.tokenizer.encode(text, true),
            Prompt::Chat(chat) => self.chat_tokens(chat, &chat.messages, chat.add_generation_prompt),
        }
    }

    /// Compiles grammars for the model's vocabulary.
    pub(super) fn grammars(&self) -> Result<&GrammarCompiler> {
        let made = self.grammars.get_or_init(|| {
            GrammarCompiler::new(&self.tokenizer, self.folder.vocab_size as usize, &self.folder.tokens.eos)
        });
        made.as_ref().map_err(Error::clone)
    }

    /// How many of a chat's tokens are its first message, as the template writes it; `None` if it is the only one, or the template
    /// does not write it alone.
    pub(super) fn first_message(&self, chat: &Chat, tokens: &[u32]) -> Option<usize> {
        let [first, _, ..] = &chat.messages[..] else { return None };
        let alone = self.chat_tokens(chat, std::slice::from_ref(first), false).ok()?;
        let same = alone.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        (same > 0).then_some(same)
    }

    fn chat_tokens(
        &self,
        chat: &Chat,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            let message = "the model folder has no chat template: send the prompt as a text";
            return Err(Error::new(Status::Unsupported, message).about("prompt"));
        };
        let input = ChatInput {
            messages,
            tools: chat.tools.as_ref(),
            add_generation_prompt,
            extra: Some(&chat.variables),
            ..ChatInput::default()
        };
        // The template has written the special tokens.
        self.tokenizer.encode(&template.render(&input)?, false)
    }

    /// The output that has the maxima of blocks of logits, where the graph that runs has one.
    pub(super) fn logits_max(&self) -> Option<&str> {
        let on_cpu = self.folder.cpu_model.is_some() && self.model.provider() == Provider::Cpu;
        self.folder.outputs.logits_max.as_deref().filter(|_| on_cpu)
    }

    /// The pages of a sequence of so many tokens.
    pub(super) fn pages_of(&self, tokens: usize) -> u64 {
        let tokens = self.policy.as_ref().map_or(tokens, |policy| policy.slots_of(tokens));
        (tokens as u64).div_ceil(self.folder.kv.page_size.into())
    }
}

/// Opens the graph with its dense nodes as the kernels of the device do best.
fn open_fastest(folder: &GenerateFolder, graphs: Option<&RewrittenGraphs>, model: &ModelOptions) -> Result<Arc<Model>> {
    if is_asked(FUSED) {
        if is_for_hopper(folder, model)? {
            let model = ModelOptions { provider: Provider::Cuda, ..model.clone() };
            if let Some(opened) = open_changed(folder, folder.with_fused(graphs)?, &model) {
                return Ok(opened);
            }
        }
        if may_have_blocks(folder.compute, &folder.form, model)
            && let Some(opened) = open_changed(folder, folder.with_blocks_on_cpu(graphs)?, model)
        {
            return Ok(opened);
        }
    }
    open_graph(folder, graphs, model)
}

/// Opens a changed graph. `None` if there is none, or if ONNX Runtime does not take it: the caller opens the other one.
fn open_changed(folder: &GenerateFolder, changed: Option<RewrittenGraphs>, model: &ModelOptions) -> Option<Arc<Model>> {
    let opened = open_graph(folder, Some(&changed?), model);
    let file = folder.file(&folder.model);
    opened
        .inspect_err(|error| {
            log::warn!("{}: opened without fusing its nodes, because that failed: {error}", file.display());
        })
        .ok()
}

fn is_for_hopper(folder: &GenerateFolder, model: &ModelOptions) -> Result<bool> {
    Ok(may_fuse(folder.compute, &folder.form, model)
        && runtime::has_cuda(runtime::api(model.onnxruntime_path.as_deref())?)?
        && Gpu::shared(model.device_id as usize).is_ok_and(Gpu::is_hopper))
}

/// Whether an environment variable does not say 0.
fn is_asked(variable: &str) -> bool {
    std::env::var_os(variable).is_none_or(|value| value != "0")
}

/// Whether a GPU, if there is one, may run a fused graph: with pools in host memory our operators run on the CPU.
fn may_fuse(compute: ElementType, form: &Form, model: &ModelOptions) -> bool {
    let is_half = matches!(compute, ElementType::F16 | ElementType::Bf16);
    is_half && *form == Form::Paged && model.provider != Provider::Cpu && !model.host_pools
}

/// Whether the CPU, if the model runs there, may have products of its own for weights in blocks.
fn may_have_blocks(compute: ElementType, form: &Form, model: &ModelOptions) -> bool {
    compute == ElementType::F32 && *form == Form::Paged && model.provider != Provider::Cuda
}

/// Opens the folder's graph, or one of `graphs` in its place.
fn open_graph(folder: &GenerateFolder, graphs: Option<&RewrittenGraphs>, model: &ModelOptions) -> Result<Arc<Model>> {
    let file = folder.file(&folder.model);
    let on_cpu = folder.cpu_model.as_ref().map_or_else(|| file.clone(), |name| folder.file(name));
    // A graph that reads another model's pages has operators on the CPU, which follow the page tables.
    let captures = model.provider != Provider::Cpu && !model.host_pools && folder.main.is_none();
    let opened = match graphs {
        Some(graphs) => Model::open_graphs(graphs.bytes(), &file, model, captures),
        None => Model::open_file(&file, &on_cpu, model, captures),
    };
    opened.map(Arc::new)
}

/// Decode batches of up to 1, 2, 4, … sequences; and as many rows of fewer sequences, as drafts have them. By steps of a third or a
/// half they have more pages, up to those of `context` for each sequence, of `pages` in all: the attention has blocks for all pages
/// of a shape.
fn decode_shapes(max_batch: u32, context: u64, pages: u64) -> Vec<Shape> {
    let sizes = std::iter::successors(Some(1), |&size: &u32| size.checked_mul(2)).take_while(|&size| size < max_batch);
    let of_size = |sequences: u32| {
        let most = context.saturating_mul(sequences.into()).min(pages).min(i32::MAX as u64) as u32;
        let doubled = std::iter::successors(Some(sequences.max(LEAST_PAGES)), |&pages| pages.checked_mul(2));
        let steps = doubled.flat_map(|pages| [pages, pages.saturating_add(pages / 2)]);
        steps.take_while(move |&pages| pages < most).chain([most]).flat_map(move |pages| {
            let shape = |longest| Shape { sequences, rows: sequences, outputs: sequences, pages, longest };
            [shape(1), shape(0)]
        })
    };
    sizes.chain([max_batch]).flat_map(of_size).collect()
}

fn open_kv(
    folder: &GenerateFolder,
    options: &GeneratorOptions,
    has_slots: bool,
    device_id: Option<u32>,
    store: Option<Arc<dyn Store>>,
) -> Result<KvCache> {
    let layout = &folder.kv;
    let kv = KvOptions {
        layers: layout.layers,
        heads: layout.heads,
        head_size: layout.head_size,
        page_size: layout.page_size,
        element_type: layout.element,
        format: layout.format,
        size: options.kv_size,
        device_id,
        model_version: folder.version.clone(),
        overlap: Overlap::Trim,
        // Slots are overwritten: what was there is no history that could be continued.
        edited: if has_slots { Edited::Unnoticed } else { Edited::Invalidate },
        offload: Offload::OnEviction,
        index_prefixes: options.share_prefixes && !has_slots,
        ..KvOptions::default()
    };
    KvCache::open(&kv, store).map_err(|error| match error.argument() {
        Some("size") => error.about("options.kv_size"),
        Some("device_id") => error.about("options.model.device_id"),
        _ => error,
    })
}

/// Checks the options that a generator adds to those of its parts.
pub(super) fn check(options: &GeneratorOptions) -> Result<()> {
    let numbers = [
        ("options.max_batch", options.max_batch),
        ("options.max_batch_tokens", options.max_batch_tokens),
        ("options.queue", options.queue),
    ];
    if let Some((name, _)) = numbers.iter().find(|(_, number)| *number == 0) {
        return Err(Error::invalid(*name, "0 would admit no request; expected 1 or more"));
    }
    let stretch = options.max_stretch;
    if stretch != 0.0 && !(1.1..=1000.0).contains(&stretch) {
        return Err(Error::invalid("options.max_stretch", format!("{stretch} is neither 0 nor between 1.1 and 1000")));
    }
    draft::check("options.max_draft", options.max_draft)?;
    if options.model.tables.is_some() {
        return Err(Error::invalid("options.model.tables", "language models have no tables: leave this unset"));
    }
    Ok(())
}

/// The options of a model that runs where a generator's does, for messages.
pub(super) fn provider(model: &Model, options: &ModelOptions) -> super::super::EngineProvider {
    let provider = model.provider();
    super::super::EngineProvider {
        provider,
        device_id: (provider == Provider::Cuda).then_some(options.device_id),
        reason: model.provider_reason().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_batches_have_shapes_of_about_as_many_pages_as_they_need() {
        let shapes = decode_shapes(4, 100, 250);
        assert!(shapes.iter().all(|shape| (shape.rows, shape.outputs) == (shape.sequences, shape.sequences)));
        for longest in [1, 0] {
            let pages_of = |sequences| -> Vec<u32> {
                let those = shapes.iter().filter(|shape| (shape.sequences, shape.longest) == (sequences, longest));
                those.map(|shape| shape.pages).collect()
            };
            assert_eq!(
                [1, 2, 4].map(pages_of),
                [vec![64, 96, 100], vec![64, 96, 128, 192, 200], vec![64, 96, 128, 192, 250],]
            );
        }
        // A pool that is smaller than the first step, and one as large as can be counted.
        assert_eq!(decode_shapes(1, 9, 5).iter().map(|shape| shape.pages).collect::<Vec<_>>(), [5, 5]);
        assert_eq!(decode_shapes(1, u64::MAX, u64::MAX).last().map(|shape| shape.pages), Some(i32::MAX as u32));
    }

    #[test]
    fn half_precision_with_pools_on_a_gpu_may_be_fused() {
        let options = ModelOptions::default();
        assert!(
            may_fuse(ElementType::Bf16, &Form::Paged, &options) && may_fuse(ElementType::F16, &Form::Paged, &options)
        );
        assert!(!may_fuse(ElementType::F32, &Form::Paged, &options));
        for others in [
            ModelOptions { host_pools: true, ..options.clone() },
            ModelOptions { provider: Provider::Cpu, ..options.clone() },
        ] {
            assert!(!may_fuse(ElementType::Bf16, &Form::Paged, &others));
        }
    }

    #[test]
    fn a_graph_in_f32_that_may_run_on_the_cpu_may_have_blocks() {
        let of = |provider| ModelOptions { provider, ..ModelOptions::default() };
        for provider in [Provider::Cpu, Provider::Auto] {
            assert!(may_have_blocks(ElementType::F32, &Form::Paged, &of(provider)));
            assert!(!may_have_blocks(ElementType::F16, &Form::Paged, &of(provider)));
        }
        assert!(!may_have_blocks(ElementType::F32, &Form::Paged, &of(Provider::Cuda)));
    }
}
