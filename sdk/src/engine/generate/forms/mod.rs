//! Graphs that know nothing of pages, run as they are: a step's rows are divided into calls that such a graph takes, keys and values
//! are read out of pages for it, and new ones are put there after each call.
//!
//! Pages are right at the end of each step, as with a graph in the paged form: prefixes, sessions, preemption and tiers do not know
//! the difference. All of this is in host memory, on the CPU.

mod calls;
mod functional;
mod group_query;
mod masked;
pub(super) mod options;
mod outputs;
mod rows;
mod step;
#[cfg(test)]
mod tests;

pub(super) use self::step::{SequenceKey, Step};

use self::functional::FunctionalRunner;
use self::group_query::GroupQueryRunner;
use self::masked::MaskedRunner;
use super::open_model::OpenModel;
use crate::error::Result;
use crate::folder::generate::{Form, PastAttention};

/// Runs steps of a graph in another form than the paged one.
pub(super) enum FormRunner {
    Functional(FunctionalRunner),
    GroupQuery(GroupQueryRunner),
    Masked(MaskedRunner),
}

impl FormRunner {
    /// `None` for a graph in the paged form.
    pub(super) fn new(model: &OpenModel) -> Option<Self> {
        match &model.folder.form {
            Form::Paged => None,
            Form::Functional(_) => Some(Self::Functional(FunctionalRunner::default())),
            Form::PastPresent(names) => Some(match names.attention {
                PastAttention::GroupQuery => Self::GroupQuery(GroupQueryRunner::default()),
                PastAttention::Masked | PastAttention::ByColumn => Self::Masked(MaskedRunner::default()),
            }),
        }
    }

    /// Runs a step: writes the logits that it asks for, and puts new keys and values into its pages.
    pub(super) fn run(&mut self, model: &OpenModel, step: &Step<'_>, logits: &mut [f32]) -> Result<()> {
        match (self, &model.folder.form) {
            (Self::Functional(runner), Form::Functional(names)) => runner.run(model, names, step, logits),
            (Self::GroupQuery(runner), Form::PastPresent(names)) => runner.run(model, names, step, logits),
            (Self::Masked(runner), Form::PastPresent(names)) => runner.run(model, names, step, logits),
            _ => unreachable!("the form of a folder does not change"),
        }
    }
}
