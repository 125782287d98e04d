//! Guesses by a second, smaller model with the same tokens.
//!
//! It has a KV cache of its own. Its rows are committed when the main model has verified them: as many as were right. Its graph may
//! read the main model's pages too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::open_model::OpenModel;
use super::super::options::GeneratorOptions;
use super::super::plan::Precedence;
use super::super::sampling::Scratch;
use super::super::sequence::Sequence;
use super::super::workspace::Workspace;
use super::main_pages::MainPages;
use crate::engine::batching::catch_panic;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::kv::{KvCache, KvLease, KvRequest, KvSize, Owner};

/// The weight of a new measurement.
const WEIGHT: f64 = 0.2;

/// The rows of a sequence in a run that drafts: the token that it drafted last, or the last two that the main model has taken.
const MOST_ROWS: usize = 2;

/// After so many steps in a row for which the model failed, it drafts no more.
const MOST_FAILURES: u32 = 8;

/// A model that drafts, and what it has computed for the step that runs.
pub(in super::super) struct DraftModel {
    model: Arc<OpenModel>,
    workspace: Workspace,
    scratch: Scratch,
    max_rows: usize,
    /// Seconds of a run that drafts.
    run_time: Option<f64>,
    /// The time of all runs of the last step.
    took: Duration,
    unverified: Option<Unverified>,
    /// The last steps in a row for which it failed.
    failures: u32,
}

/// Rows that the model has computed, and that are not committed yet.
struct Unverified {
    lease: KvLease,
    sequences: Vec<Rows>,
}

/// The rows of a sequence.
struct Rows {
    key: Precedence,
    /// The first token that is not cached.
    start: usize,
    /// The tokens whose rows are computed.
    computed: Vec<u32>,
    /// How many tokens are to be drafted, and those that are.
    wanted: usize,
    drafted: Vec<u32>,
}

impl DraftModel {
    /// Opens the model that drafts for `main`, if the options name one.
    pub(in super::super) fn open(main: &Arc<OpenModel>, options: &GeneratorOptions) -> Result<Option<Self>> {
        let Some(path) = &options.draft_model else { return Ok(None) };
        let folder = GenerateFolder::open(path)?;
        let own = GeneratorOptions {
            kv_size: KvSize::Bytes(options.draft_kv_bytes),
            kv_policy: None,
            kv_format: None,
            share_prefixes: false,
            ..options.clone()
        };
        let model = OpenModel::open(folder, &own, None).map_err(|error| match error.argument() {
            Some("options.kv_size") => error.about("options.draft_kv_bytes"),
            _ => error,
        })?;
        check_same_tokens(main, &model)?;
        let max_rows = options.max_batch_tokens as usize;
        // Its logits come to the host: a batch of 1 has none on the GPU.
        let mut workspace = Workspace::new(&model, 1, max_rows);
        workspace.main = model.folder.main.as_ref().map(|read| MainPages::new(main, &model, read)).transpose()?;
        let model = Arc::new(model);
        Ok(Some(Self {
            model,
            workspace,
            scratch: Scratch::default(),
            max_rows,
            run_time: None,
            took: Duration::ZERO,
            unverified: None,
            failures: 0,
        }))
    }

    /// Seconds that a drafted token takes in this model, if any was measured.
    pub(in super::super) fn seconds(&self) -> f64 {
        self.run_time.unwrap_or(0.0)
    }

    /// Forgets what drafts cost, and that they failed.
    pub(in super::super) fn forget_costs(&mut self) {
        self.run_time = None;
        self.failures = 0;
    }

    /// The time that drafting for the last step took.
    pub(in super::super) fn took(&self) -> Duration {
        self.took
    }

    /// The drafts of a step are not verified, because it has failed.
    pub(in super::super) fn abandon(&mut self) {
        self.unverified = None;
    }

    /// Drafts for the sequences that want it, with at most `prompt_rows` rows of what it has not computed yet of them. What can not be
    /// drafted is not.
    pub(in super::super) fn draft(
        &mut self,
        main: &KvCache,
        running: &mut BTreeMap<Precedence, Sequence>,
        prompt_rows: usize,
    ) {
        self.unverified = None;
        let begun = Instant::now();
        let drafted = match self.failures {
            MOST_FAILURES => Ok(false),
            _ => catch_panic(|| self.try_draft(main, running, prompt_rows)).map(|()| true),
        };
        match drafted {
            Ok(true) => self.failures = 0,
            Ok(false) => self.draft_nothing(running),
            Err(error) => {
                self.failed(&error);
                self.draft_nothing(running);
            }
        }
        self.took = begun.elapsed();
    }

    fn draft_nothing(&mut self, running: &mut BTreeMap<Precedence, Sequence>) {
        self.unverified = None;
        running.values_mut().for_each(|sequence| drop(sequence.drop_draft()));
    }

    /// Full pools pass. What else fails again and again is not tried for ever.
    fn failed(&mut self, error: &Error) {
        if matches!(error.status(), Status::Capacity | Status::Busy) {
            log::debug!("nothing is drafted for this step: {error}");
            return;
        }
        self.failures += 1;
        match self.failures {
            1 => log::warn!("the draft model failed, and nothing is drafted for this step: {error}"),
            MOST_FAILURES => log::warn!(
                "the draft model failed {MOST_FAILURES} times in a row, and drafts no more until speculation is cleared: {error}"
            ),
            _ => log::debug!("nothing is drafted for this step: {error}"),
        }
    }

    fn try_draft(
        &mut self,
        main: &KvCache,
        running: &mut BTreeMap<Precedence, Sequence>,
        mut prompt_rows: usize,
    ) -> Result<()> {
        let mut sequences = Vec::new();
        let mut left = self.max_rows;
        let context = self.model.folder.limits.max_context as usize;
        for (&key, sequence) in running.iter() {
            let Some(wanted) = sequence.wants_draft() else { continue };
            let start = self.model.kv.matching(sequence.owner, sequence.cacheable()) as usize;
            let missing = sequence.tokens.len() - start;
            let is_behind = missing > MOST_ROWS;
            let rows = missing.min(left).min(if is_behind { prompt_rows } else { MOST_ROWS });
            if rows == 0 || sequence.tokens.len() + wanted > context {
                continue;
            }
            left -= rows;
            prompt_rows -= if is_behind { rows } else { 0 };
            // Until it has computed the prompt, it drafts nothing.
            let wanted = if rows == missing { wanted } else { 0 };
            let computed = sequence.tokens[start..start + rows].to_vec();
            sequences.push(Rows { key, start, computed, wanted, drafted: Vec::new() });
        }
        let lease = loop {
            if sequences.is_empty() {
                return Ok(());
            }
            match self.lease(running, &sequences) {
                Ok(lease) => break lease,
                // There are not pages enough for all: for the others, then.
                Err(error) if error.status() == Status::Capacity && sequences.len() > 1 => drop(sequences.pop()),
                Err(error) => return Err(error),
            }
        };
        let of_main = self.workspace.main.is_some().then(|| lease_of_main(main, running, &sequences)).transpose()?;
        self.run(running, &lease, of_main.as_ref(), &mut sequences)?;
        for rows in &sequences {
            if let Some(sequence) = running.get_mut(&rows.key) {
                sequence.set_draft(&rows.drafted);
            }
        }
        self.unverified = Some(Unverified { lease, sequences });
        Ok(())
    }

    /// Takes pages for the rows and for what is drafted after them.
    fn lease(&self, running: &BTreeMap<Precedence, Sequence>, sequences: &[Rows]) -> Result<KvLease> {
        // The items of what will be drafted are known when it is committed.
        let items: Vec<_> = sequences.iter().map(|rows| rows.items(&running[&rows.key])).collect();
        let requests = sequences.iter().zip(&items).map(|(rows, items)| KvRequest {
            owner: running[&rows.key].owner,
            start: rows.start as u64,
            tokens: (items.len() - rows.start) as u32,
            items,
            recompute: true,
            ..KvRequest::default()
        });
        self.model.kv.prepare_for_run(&requests.collect::<Vec<_>>())
    }

    /// Computes the rows, and a token after another for each sequence that wants one.
    fn run(
        &mut self,
        running: &BTreeMap<Precedence, Sequence>,
        lease: &KvLease,
        of_main: Option<&KvLease>,
        all: &mut [Rows],
    ) -> Result<()> {
        let vocab = self.model.folder.vocab_size as usize;
        let pages_of_main: Vec<Vec<u32>> =
            of_main.into_iter().flat_map(KvLease::pages_of_owners).map(Iterator::collect).collect();
        for step in 0.. {
            let begun = Instant::now();
            self.workspace.begin();
            self.workspace.main.iter_mut().for_each(MainPages::begin);
            let (mut in_step, mut rows_in_step) = (Vec::new(), 0);
            for ((index, rows), pages) in all.iter().enumerate().zip(lease.pages_of_owners()) {
                if step > 0 && rows.drafted.len() >= rows.wanted {
                    continue;
                }
                let from = if step == 0 { 0 } else { rows.computed.len() - 1 };
                let tokens = &rows.computed[from..];
                let logits_from = if rows.wanted > 0 { tokens.len() - 1 } else { tokens.len() };
                let begin = rows.start + from;
                let sequence = running.get(&rows.key);
                let key = (rows.key, sequence.map_or(Owner(0), |sequence| sequence.owner));
                self.workspace.push(key, tokens.iter().copied(), begin, begin, logits_from, pages);
                if let (Some(main), Some(sequence)) = (&mut self.workspace.main, sequence) {
                    main.push(sequence.cached, &pages_of_main[index]);
                }
                rows_in_step += tokens.len();
                in_step.push(index);
            }
            if in_step.is_empty() {
                return Ok(());
            }
            self.workspace.finish();
            self.workspace.run(&self.model)?;
            lease.wait(None)?;
            let mut logits = self.workspace.logits.chunks_exact(vocab);
            for &index in &in_step {
                let rows = &mut all[index];
                if rows.wanted == 0 {
                    continue;
                }
                let (Some(sequence), Some(logits)) = (running.get(&rows.key), logits.next()) else { continue };
                // With the seed of its place: the two models draw the same token more often than by chance.
                let position = sequence.next_position() + rows.drafted.len() as u64;
                let Ok(token) = sequence.sampler.sample(logits, position, None, &mut self.scratch) else {
                    rows.wanted = rows.drafted.len();
                    continue;
                };
                rows.drafted.push(token);
                // The last one is never computed here.
                if rows.drafted.len() < rows.wanted {
                    rows.computed.push(token);
                }
            }
            // A run over more rows computes what the main model has computed before.
            if rows_in_step <= MOST_ROWS * in_step.len() {
                let took = begun.elapsed().as_secs_f64();
                self.run_time = Some(self.run_time.map_or(took, |old| old + WEIGHT * (took - old)));
            }
        }
        Ok(())
    }

    /// The main model has verified the drafts: commits the rows that were right.
    pub(in super::super) fn verified(&mut self, running: &BTreeMap<Precedence, Sequence>) {
        let Some(Unverified { mut lease, sequences }) = self.unverified.take() else { return };
        for (index, rows) in sequences.iter().enumerate() {
            let Some(sequence) = running.get(&rows.key) else { return };
            let taken = &sequence.tokens[rows.start..];
            let right = rows.computed.iter().zip(taken).take_while(|(computed, taken)| computed == taken).count();
            lease.keep_first(index, &sequence.items.get()[rows.start..rows.start + right]);
        }
        if let Err(error) = lease.commit() {
            log::debug!("what the draft model has computed is computed again: {error}");
        }
    }

    /// A sequence has ended.
    pub(in super::super) fn forget(&self, owner: Owner) {
        if let Err(error) = self.model.kv.forget(owner, &mut Vec::new()) {
            log::debug!("the draft model keeps the keys and values of a sequence until they are evicted: {error}");
        }
    }
}

/// Holds what the main model has cached of the sequences, for the time of a draft.
fn lease_of_main(main: &KvCache, running: &BTreeMap<Precedence, Sequence>, sequences: &[Rows]) -> Result<KvLease> {
    let requests: Vec<_> = sequences.iter().map(|rows| running[&rows.key].kv_request(0)).collect();
    // The graph's operators do not wait for pages that are on their way.
    let lease = main.prepare_uncounted(&requests)?;
    lease.wait(None)?;
    Ok(lease)
}

impl Rows {
    /// The items of the sequence up to the last row that may be computed.
    fn items(&self, sequence: &Sequence) -> Vec<u64> {
        let mut items = sequence.items.get()[..self.start + self.computed.len()].to_vec();
        items.resize(items.len() + self.wanted.saturating_sub(1), 0);
        items
    }
}

/// Whether both models mean the same by every token.
fn check_same_tokens(main: &OpenModel, draft: &OpenModel) -> Result<()> {
    let wrong = |message: String| Err(Error::invalid("options.draft_model", message));
    let (size, own) = (main.folder.vocab_size, draft.folder.vocab_size);
    if size != own {
        return wrong(format!(
            "it has {own} tokens, and the model that it drafts for has {size}: use one with the same tokenizer"
        ));
    }
    let differs = |id: &u32| main.tokenizer.token_bytes(*id) != draft.tokenizer.token_bytes(*id);
    match (0..size).find(differs) {
        None => Ok(()),
        Some(id) => {
            let (own, other) = (draft.tokenizer.token(id), main.tokenizer.token(id));
            wrong(format!("its token {id} is {own:?}, not {other:?}: use a model with the same tokenizer"))
        }
    }
}
