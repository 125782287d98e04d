//! Reads the part of pagoda.json that folders of the kind `generate` have.

use pagoda_kernels::KvFormat;

use super::super::contents::{FolderContents, TYPES, choice, damaged, file_name};
use super::super::kv_format::FORMATS;
use super::{
    Attention, Form, Functional, GenerateFolder, Generation, Inputs, KvLayout, Limits, MainModel, Outputs,
    SpecialTokens, TextFiles, WeightFormat,
};
use crate::error::{Error, Result, Status};
use crate::json::{Field, Object};

pub(super) const WEIGHTS: [(&str, WeightFormat); 3] =
    [("native", WeightFormat::Native), ("int8", WeightFormat::Int8), ("int4", WeightFormat::Int4)];

/// The form of graphs with PagedAttention. A pagoda.json without a form means it.
const PAGED: &str = "paged";
/// The form of graphs that read pages by Gather.
const FUNCTIONAL: &str = "functional";

/// The graph's index inputs are i32.
pub(in super::super) const MOST: u32 = i32::MAX as u32;

/// Pages begin at slots that the operators can read at once.
const PAGE_SIZE_MULTIPLE: u32 = 8;

pub(in super::super) fn read(contents: FolderContents, top: &Object<'_>) -> Result<GenerateFolder> {
    let part = |key| top.value(key)?.open_object();
    let (form, inputs, outputs) = match top.get("form").map_or(Ok(PAGED), |form| form.text())? {
        PAGED => (Form::Paged, inputs(&part("inputs")?)?, outputs(&part("outputs")?)?),
        FUNCTIONAL => {
            let form = Form::Functional(functional(&part("inputs")?, &part("outputs")?)?);
            (form, Inputs::default(), Outputs::default())
        }
        other => return Err(unknown_form(other)),
    };
    let vocab_size = size(top, "vocab_size")?;
    let folder = GenerateFolder {
        contents,
        form,
        architecture: name(top, "architecture")?,
        compute: choice(&top.value("compute")?, &TYPES)?,
        weights: choice(&top.value("weights")?, &WEIGHTS)?,
        vocab_size,
        hidden_size: size(top, "hidden_size")?,
        attention: attention(&part("attention")?)?,
        kv: kv(&part("kv")?)?,
        limits: Limits { max_context: size(&part("limits")?, "max_context")? },
        tokens: tokens(&part("tokens")?, vocab_size)?,
        generation: generation(&part("generation")?)?,
        text: text_files(&part("text")?)?,
        inputs,
        outputs,
        main: top.get("main").map(|main| main_model(&main.open_object()?)).transpose()?,
    };
    agree(&folder)?;
    Ok(folder)
}

fn unknown_form(found: &str) -> Error {
    let message = format!(
        "the model has the form {found:?} and this Pagoda knows {PAGED:?} and {FUNCTIONAL:?}: export it again, or use the Pagoda \
         that it was made for"
    );
    Error::new(Status::Unsupported, format!("pagoda.json: {message}"))
}

/// A number of something that there has to be at least one of.
fn size(of: &Object<'_>, key: &'static str) -> Result<u32> {
    of.value(key)?.whole(1..=MOST)
}

fn attention(attention: &Object<'_>) -> Result<Attention> {
    let windows = attention.value("windows")?.list("windows")?;
    Ok(Attention {
        layers: size(attention, "layers")?,
        heads: size(attention, "heads")?,
        windows: windows.iter().map(|window| window.whole(0..=MOST)).collect::<Result<_>>()?,
    })
}

fn kv(kv: &Object<'_>) -> Result<KvLayout> {
    let layout = KvLayout {
        layers: size(kv, "layers")?,
        heads: size(kv, "heads")?,
        head_size: size(kv, "head_size")?,
        page_size: size(kv, "page_size")?,
        element: choice(&kv.value("type")?, &TYPES)?,
        format: choice(&kv.value("format")?, &FORMATS)?,
        bytes_per_token: kv.value("bytes_per_token")?.whole(1..=u64::MAX)?,
    };
    if !layout.page_size.is_multiple_of(PAGE_SIZE_MULTIPLE) {
        return Err(kv.value("page_size")?.expected(&format!("a multiple of {PAGE_SIZE_MULTIPLE}")));
    }
    if layout.format == KvFormat::Int4 && !layout.head_size.is_multiple_of(2) {
        return Err(kv.value("head_size")?.expected("an even number, for int4 has two numbers in a byte"));
    }
    let bytes = layout.token_shape().bytes(layout.format);
    if u128::from(layout.bytes_per_token) != bytes {
        return Err(kv.value("bytes_per_token")?.expected(&format!("{bytes}, by the other entries of `kv`")));
    }
    Ok(layout)
}

fn tokens(tokens: &Object<'_>, vocab_size: u32) -> Result<SpecialTokens> {
    let token = |field: &Field<'_>| field.whole(0..=vocab_size - 1);
    let nullable = |key| tokens.nullable(key)?.map(|field| token(&field)).transpose();
    let read = SpecialTokens {
        bos: nullable("bos")?,
        eos: tokens.value("eos")?.list("tokens")?.iter().map(token).collect::<Result<_>>()?,
        pad: nullable("pad")?,
        unk: nullable("unk")?,
        add_bos: tokens.value("add_bos")?.flag()?,
    };
    if read.add_bos && read.bos.is_none() {
        return Err(tokens.value("add_bos")?.expected("false, for `tokens.bos` is null"));
    }
    Ok(read)
}

fn generation(generation: &Object<'_>) -> Result<Generation> {
    let whole = |key, least: u32| generation.get(key).map(|field| field.whole(least..=MOST)).transpose();
    let real = |key, most| generation.get(key).map(|field| field.real(0.0..=most)).transpose();
    let read = Generation {
        do_sample: generation.get("do_sample").map(|field| field.flag()).transpose()?,
        temperature: real("temperature", f64::MAX)?,
        top_k: whole("top_k", 0)?,
        top_p: real("top_p", 1.0)?,
        min_p: real("min_p", 1.0)?,
        repetition_penalty: real("repetition_penalty", f64::MAX)?,
        no_repeat_ngram_size: whole("no_repeat_ngram_size", 0)?,
        max_new_tokens: whole("max_new_tokens", 1)?,
        min_new_tokens: whole("min_new_tokens", 0)?,
    };
    // Logits are divided by it.
    if read.repetition_penalty == Some(0.0) {
        return Err(generation.value("repetition_penalty")?.expected("a number above 0"));
    }
    match (read.min_new_tokens, read.max_new_tokens) {
        (Some(least), Some(most)) if least > most => {
            Err(generation.value("min_new_tokens")?.expected(&format!("at most `generation.max_new_tokens`, {most}")))
        }
        _ => Ok(read),
    }
}

fn text_files(files: &Object<'_>) -> Result<TextFiles> {
    Ok(TextFiles {
        tokenizer: file_name(&files.value("tokenizer")?)?,
        chat_template: files.nullable("chat_template")?.map(|file| file_name(&file)).transpose()?,
        template_tokens: template_tokens(&files.value("template_tokens")?.open_object()?)?,
    })
}

fn template_tokens(tokens: &Object<'_>) -> Result<Vec<(String, String)>> {
    tokens.members().map(|(name, text)| Ok((name.to_owned(), text.text()?.to_owned()))).collect()
}

fn inputs(inputs: &Object<'_>) -> Result<Inputs> {
    Ok(Inputs {
        input_ids: name(inputs, "input_ids")?,
        positions: inputs.nullable("positions")?.map(|field| owned(&field)).transpose()?,
        row_offsets: name(inputs, "row_offsets")?,
        cached_len: name(inputs, "cached_len")?,
        page_indptr: name(inputs, "page_indptr")?,
        page_ids: name(inputs, "page_ids")?,
        logits_rows: name(inputs, "logits_rows")?,
        kv_pools: names(inputs, "kv_pools")?,
        kv_scales: names(inputs, "kv_scales")?,
    })
}

fn functional(inputs: &Object<'_>, outputs: &Object<'_>) -> Result<Functional> {
    Ok(Functional {
        input_ids: name(inputs, "input_ids")?,
        position_ids: name(inputs, "position_ids")?,
        key_slots: name(inputs, "key_slots")?,
        value_slots: name(inputs, "value_slots")?,
        attention_mask: name(inputs, "attention_mask")?,
        kv_pools: names(inputs, "kv_pools")?,
        logits: name(outputs, "logits")?,
        new_keys: names(outputs, "new_keys")?,
        new_values: names(outputs, "new_values")?,
    })
}

fn outputs(outputs: &Object<'_>) -> Result<Outputs> {
    Ok(Outputs {
        logits: name(outputs, "logits")?,
        logits_max: outputs.get("logits_max").map(|field| owned(&field)).transpose()?,
        kv_pools: names(outputs, "kv_pools")?,
        kv_scales: names(outputs, "kv_scales")?,
    })
}

fn main_model(main: &Object<'_>) -> Result<MainModel> {
    let inputs = main.value("inputs")?.open_object()?;
    let layers = main.value("layers")?.list("layers")?;
    let read = MainModel {
        layers: layers.iter().map(|layer| layer.whole(0..=MOST)).collect::<Result<_>>()?,
        heads: size(main, "heads")?,
        head_size: size(main, "head_size")?,
        page_size: size(main, "page_size")?,
        element: choice(&main.value("type")?, &TYPES)?,
        cached_len: name(&inputs, "cached_len")?,
        page_indptr: name(&inputs, "page_indptr")?,
        page_ids: name(&inputs, "page_ids")?,
        kv_pools: names(&inputs, "kv_pools")?,
    };
    let (pools, layers) = (read.kv_pools.len(), read.layers.len());
    if pools != layers || layers == 0 {
        return Err(damaged(format!("`main.inputs.kv_pools` has {pools} names for {layers} layers")));
    }
    Ok(read)
}

fn name(of: &Object<'_>, key: &'static str) -> Result<String> {
    owned(&of.value(key)?)
}

fn names(of: &Object<'_>, key: &'static str) -> Result<Vec<String>> {
    of.value(key)?.list("names")?.iter().map(owned).collect()
}

fn owned(field: &Field<'_>) -> Result<String> {
    field.name().map(str::to_owned)
}

/// Checks that the parts agree with each other.
fn agree(folder: &GenerateFolder) -> Result<()> {
    layers_agree(folder)?;
    match &folder.form {
        Form::Functional(names) => functional_agrees(folder, names)?,
        _ => pools_agree(folder)?,
    }
    names_differ(folder)?;
    files_are_listed(folder)
}

fn layers_agree(folder: &GenerateFolder) -> Result<()> {
    let GenerateFolder { attention, kv, compute, .. } = folder;
    if kv.layers != attention.layers {
        let message = format!("`kv.layers` is {}, and `attention.layers` {}", kv.layers, attention.layers);
        return Err(damaged(message));
    }
    if attention.windows.len() != attention.layers as usize {
        let (windows, layers) = (attention.windows.len(), attention.layers);
        return Err(damaged(format!("`attention.windows` has {windows} windows for {layers} layers")));
    }
    if !attention.heads.is_multiple_of(kv.heads) {
        let message = format!("`attention.heads` is {}, which is no multiple of `kv.heads`", attention.heads);
        return Err(damaged(format!("{message}, {}", kv.heads)));
    }
    if kv.element != *compute {
        let (element, compute) = (kv.element.name(), compute.name());
        return Err(damaged(format!("`kv.type` is {element}, and keys and values are computed in {compute}")));
    }
    Ok(())
}

fn pools_agree(folder: &GenerateFolder) -> Result<()> {
    let GenerateFolder { inputs, outputs, kv, .. } = folder;
    let pools = kv.layers as usize;
    let scales = if kv.format == KvFormat::Native { 0 } else { pools };
    for (place, names, count) in [
        ("inputs.kv_pools", &inputs.kv_pools, pools),
        ("outputs.kv_pools", &outputs.kv_pools, pools),
        ("inputs.kv_scales", &inputs.kv_scales, scales),
        ("outputs.kv_scales", &outputs.kv_scales, scales),
    ] {
        if names.len() != count {
            let (found, format) = (names.len(), kv.format_name());
            let message = format!("`{place}` has {found} names, and pages of the format {format} in {pools} layers");
            return Err(damaged(format!("{message} have {count}")));
        }
    }
    Ok(())
}

/// What the paged form may have, and this one not.
fn functional_agrees(folder: &GenerateFolder, names: &Functional) -> Result<()> {
    let GenerateFolder { kv, main, .. } = folder;
    if kv.format != KvFormat::Native {
        let message =
            format!("`kv.format` is {:?}, and the form {FUNCTIONAL:?} has native pages alone", kv.format_name());
        return Err(damaged(message));
    }
    for (entry, is_there) in [("cpu_model", folder.cpu_model.is_some()), ("main", main.is_some())] {
        if is_there {
            return Err(damaged(format!("`{entry}` is for the form {PAGED:?}, and this folder has {FUNCTIONAL:?}")));
        }
    }
    let layers = kv.layers as usize;
    for (place, names) in [
        ("inputs.kv_pools", &names.kv_pools),
        ("outputs.new_keys", &names.new_keys),
        ("outputs.new_values", &names.new_values),
    ] {
        if names.len() != layers {
            return Err(damaged(format!("`{place}` has {} names for {layers} layers", names.len())));
        }
    }
    Ok(())
}

/// Each name can be bound to one tensor only.
fn names_differ(folder: &GenerateFolder) -> Result<()> {
    let (inputs, outputs) = folder.graph_names();
    differ("inputs", inputs)?;
    differ("outputs", outputs)
}

/// The names of the inputs and of the outputs of a graph in the paged form.
pub(super) fn paged_names(folder: &GenerateFolder) -> (Vec<&String>, Vec<&String>) {
    let Inputs { input_ids, positions, row_offsets, cached_len, page_indptr, page_ids, logits_rows, .. } =
        &folder.inputs;
    let single = [input_ids, row_offsets, cached_len, page_indptr, page_ids, logits_rows].into_iter().chain(positions);
    let inputs = single.chain(&folder.inputs.kv_pools).chain(&folder.inputs.kv_scales);
    let of_main = folder
        .main
        .iter()
        .flat_map(|main| [&main.cached_len, &main.page_indptr, &main.page_ids].into_iter().chain(&main.kv_pools));
    let inputs = inputs.chain(of_main);
    let logits = [&folder.outputs.logits].into_iter().chain(&folder.outputs.logits_max);
    let outputs = logits.chain(&folder.outputs.kv_pools).chain(&folder.outputs.kv_scales);
    (inputs.collect(), outputs.collect())
}

pub(in super::super) fn differ(place: &str, mut names: Vec<&str>) -> Result<()> {
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(damaged(format!("`{place}` has {:?} twice", pair[0]))),
        None => Ok(()),
    }
}

fn files_are_listed(folder: &GenerateFolder) -> Result<()> {
    let mut named = [&folder.text.tokenizer].into_iter().chain(&folder.text.chat_template);
    match named.find(|file| !folder.has(file)) {
        Some(file) => Err(damaged(format!("`files` does not have {file}"))),
        None => Ok(()),
    }
}
