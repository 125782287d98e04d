//! What a graph in another form than the paged one asks of a generator's options, and of its own inputs and outputs.

use super::super::options::GeneratorOptions;
use crate::error::{Error, Result, Status};
use crate::folder::GenerateFolder;
use crate::folder::generate::{Form, KvFormat};
use crate::runtime::{Model, ModelOptions, Provider};

/// The options of a model, for the form of its graph. Refuses what the form can not have.
pub(in super::super) fn model_options(folder: &GenerateFolder, options: &GeneratorOptions) -> Result<ModelOptions> {
    let mut model = options.model.clone();
    if folder.form == Form::Paged {
        return Ok(model);
    }
    let otherwise = match folder.form {
        Form::Functional(_) => "export the model without --form functional",
        _ => "see `pagoda inspect`, which says why the graph is not rewritten for pages",
    };
    let refused = |option: &str, what: &str| {
        let form = folder.form.name();
        let message = format!("the model's graph has the form {form:?}, {what}: leave this unset, or {otherwise}");
        Err(Error::new(Status::Unsupported, message).about(option))
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
pub(in super::super) fn check(folder: &GenerateFolder, model: &Model) -> Result<()> {
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
