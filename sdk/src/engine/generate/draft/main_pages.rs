//! The main model's pages, as inputs of a draft model that attends to them.

use std::sync::Arc;

use super::super::super::exec::{Dim, Input, Values};
use super::super::open_model::OpenModel;
use crate::error::{Error, Result};
use crate::folder::generate::{KvFormat, MainModel};
use crate::tensor::Tensor;

/// The pages of the sequences of a run. The draft model's graph reads them; the run writes none.
pub(in super::super) struct MainPages {
    main: Arc<OpenModel>,
    cached_len: Vec<i32>,
    page_indptr: Vec<i32>,
    page_ids: Vec<i32>,
}

impl MainPages {
    /// For a graph that reads this of `main`.
    pub(super) fn new(main: &Arc<OpenModel>, draft: &OpenModel, read: &MainModel) -> Result<Self> {
        check(main, read)?;
        check_graph(main, draft, read)?;
        Ok(Self { main: Arc::clone(main), cached_len: Vec::new(), page_indptr: Vec::new(), page_ids: Vec::new() })
    }

    /// Removes all sequences.
    pub(super) fn begin(&mut self) {
        self.cached_len.clear();
        self.page_ids.clear();
        self.page_indptr.clear();
        self.page_indptr.push(0);
    }

    /// Adds a sequence: its number of cached tokens, and its pages.
    pub(super) fn push(&mut self, cached: usize, pages: &[u32]) {
        self.cached_len.push(cached as i32);
        self.page_ids.extend(pages.iter().map(|&page| page as i32));
        self.page_indptr.push(self.page_ids.len() as i32);
    }

    /// The tables, under the names that the graph has for them.
    pub(in super::super) fn inputs<'a>(&'a self, names: &'a MainModel) -> impl Iterator<Item = Input<'a>> {
        let input = |(name, numbers, dim): (&'a String, &'a Vec<i32>, Dim)| Input {
            name,
            numbers: Values::I32(numbers),
            dim,
            inner: &[],
        };
        let all = [
            (&names.cached_len, &self.cached_len, Dim::Sequences),
            (&names.page_indptr, &self.page_indptr, Dim::Bounds),
            (&names.page_ids, &self.page_ids, Dim::Pages),
        ];
        all.into_iter().map(input)
    }

    /// The pools that the graph reads, under its names.
    pub(in super::super) fn pools<'a>(&'a self, names: &'a MainModel) -> Result<Vec<(&'a str, &'a Arc<Tensor>)>> {
        let pools = names.kv_pools.iter().zip(&names.layers);
        pools.map(|(name, &layer)| Ok((name.as_str(), self.main.kv.pool(layer)?))).collect()
    }
}

/// Checks that the graph has the inputs, and runs where the pages are.
fn check_graph(main: &OpenModel, draft: &OpenModel, read: &MainModel) -> Result<()> {
    let wrong = |message: String| Err(Error::invalid("options.draft_model", message));
    let (own, other) = (draft.model.provider(), main.model.provider());
    if own != other || draft.model.operators_on_gpu() != main.model.operators_on_gpu() {
        return wrong(format!(
            "it reads the main model's pages, and runs on {own:?} while that model runs on {other:?}: give both the same provider"
        ));
    }
    let tables = [&read.cached_len, &read.page_indptr, &read.page_ids];
    let has = |name: &str| draft.model.inputs().iter().any(|input| input.name() == name);
    match tables.into_iter().chain(&read.kv_pools).find(|name| !has(name)) {
        Some(name) => wrong(format!("its pagoda.json names the input {name:?} under `main`, and its graph has none")),
        None => Ok(()),
    }
}

/// Checks that the main model has pages as the graph reads them.
fn check(main: &OpenModel, read: &MainModel) -> Result<()> {
    let wrong = |message: String| Err(Error::invalid("options.draft_model", message));
    if main.policy.is_some() {
        return wrong(
            "it reads the main model's pages, which have other tokens under a cache policy: leave kv_policy unset"
                .into(),
        );
    }
    let kv = &main.folder.kv;
    if kv.format != KvFormat::Native {
        let format = kv.format_name();
        return wrong(format!("it reads the main model's pages, which are {format}: open the model with native pages"));
    }
    if let Some(layer) = read.layers.iter().find(|&&layer| layer >= kv.layers) {
        return wrong(format!("it reads layer {layer} of the main model, which has {} layers, from 0 on", kv.layers));
    }
    for (what, expected, found) in [
        ("heads", read.heads, kv.heads),
        ("numbers a head", read.head_size, kv.head_size),
        ("tokens a page", read.page_size, kv.page_size),
    ] {
        if expected != found {
            return wrong(format!(
                "it reads keys and values with {expected} {what}, and the main model has {found}: use the model that it was \
                 made for"
            ));
        }
    }
    if read.element != kv.element {
        let (expected, found) = (read.element.name(), kv.element.name());
        return wrong(format!("it reads keys and values in {expected}, and the main model has {found}"));
    }
    Ok(())
}
