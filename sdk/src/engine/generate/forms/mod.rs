//! Graphs that know nothing of pages, run as they are: a step's rows are divided into calls that such a graph takes, keys and values
//! are read out of pages for it, and new ones are put there after each call.
//!
//! Pages are right at the end of each step, as with a graph in the paged form: prefixes, sessions, preemption and tiers do not know
//! the difference. All of this is in host memory, on the CPU.

mod calls;
mod functional;
mod group_query;
mod masked;
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
use super::options::GeneratorOptions;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::folder::generate::{Form, KvFormat, PastAttention};
use crate::runtime::{Model, ModelOptions, Provider};

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

/// The options of a model, for the form of its graph. Refuses what the form can not have.
pub(super) fn model_options(folder: &GenerateFolder, options: &GeneratorOptions) -> Result<ModelOptions> {
    let mut model = options.model.clone();
    if folder.form == Form::Paged {
        return Ok(model);
    }
    let refused = |option: &str, what: &str| {
        let form = folder.form.name();
        let message =
            format!("the model's graph has the form {form:?}, {what}: leave this unset, or rewrite the graph");
        Err(Error::new(Status::Unsupported, format!("{message} with `pagoda convert`")).about(option))
    };
    if options.kv_format.is_some_and(|format| format != KvFormat::Native) {
        return refused("options.kv_format", "which reads keys and values as it has made them");
    }
    if options.kv_policy.is_some() {
        return refused("options.kv_policy", "which has no slots that a policy could choose");
    }
    match model.provider {
        Provider::Cuda => {
            return refused("options.model.provider", "which runs on the CPU alone, with pages in host memory");
        }
        Provider::Auto => log::info!("the form {:?} runs on the CPU", folder.form.name()),
        Provider::Cpu => {}
    }
    model.provider = Provider::Cpu;
    Ok(model)
}

/// Checks that a graph has the inputs and the outputs that its folder names, and needs no others.
pub(super) fn check(folder: &GenerateFolder, model: &Model) -> Result<()> {
    if folder.form == Form::Paged {
        return Ok(());
    }
    let (inputs, outputs) = folder.graph_names();
    let wrong = |message: String| Err(Error::new(Status::Model, message).about("folder"));
    let has = |infos: &[crate::runtime::ValueInfo], name: &str| infos.iter().any(|info| info.name() == name);
    for (what, names, infos) in [("input", &inputs, model.inputs()), ("output", &outputs, model.outputs())] {
        if let Some(name) = names.iter().find(|name| !has(infos, name)) {
            return wrong(format!("{}: the graph has no {what} {name:?}: export the model again", folder.model));
        }
    }
    match model.inputs().iter().find(|info| !inputs.contains(&info.name())) {
        Some(info) => wrong(format!("{}: the graph has an input {:?} that is not known", folder.model, info.name())),
        None => Ok(()),
    }
}
