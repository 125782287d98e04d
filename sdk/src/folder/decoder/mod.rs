//! Decoders of other exporters, as folders of the kind `generate`: an ONNX graph with past and present tensors beside the files of
//! its checkpoint. `sdk/docs/decoders.md` says which are taken, and how.

mod description;
mod document;
mod graph;
mod names;
mod sizes;
#[cfg(test)]
mod tests;
mod tokens;

use std::fs::File;
use std::path::{Component, Path};

use pagoda_kernels::KvFormat;
use prost::bytes::Bytes;

#[cfg(feature = "llm")]
pub(super) use self::description::description;
use self::document::{Document, wrong};
use self::graph::DecoderGraph;
use self::names::Declared;
use self::sizes::{Configs, Sizes};
use self::tokens::Texts;
pub(super) use self::tokens::template_in;
use super::check;
use super::contents::{FolderContents, FolderFile};
use super::generate::folder::{Attention, GenerateFolder, Inputs, KvLayout, Limits, Outputs, WeightFormat};
use super::generate::form::Form;
use crate::checksum::sha256_hex;
use crate::error::{Error, Result, Status};

const CONFIG: &str = "config.json";
const GENAI_CONFIG: &str = "genai_config.json";

/// The graph, in the order in which the names are tried, where genai_config.json does not name it.
const GRAPHS: [&str; 6] = [
    "model.onnx",
    "decoder_model_merged.onnx",
    "decoder_with_past_model.onnx",
    "onnx/model.onnx",
    "onnx/decoder_model_merged.onnx",
    "onnx/decoder_with_past_model.onnx",
];

/// Tokens of a page: what exported models have.
const PAGE_SIZE: u32 = 32;

/// Whether a folder is no exported one, and has the files of a checkpoint.
pub(super) fn is_foreign(path: &Path) -> bool {
    !path.join("pagoda.json").exists() && [CONFIG, GENAI_CONFIG].iter().any(|name| path.join(name).is_file())
}

/// Opens a decoder: finds its form, checks it, and hashes every file.
pub(super) fn open(path: &Path) -> Result<GenerateFolder> {
    described(path, Rings::Refused)
}

#[cfg(feature = "llm")]
/// Reads a decoder that is to be rewritten, and checks and hashes every file.
pub(super) fn read_to_convert(path: &Path) -> Result<GenerateFolder> {
    described(path, Rings::Taken)
}

/// Whether past tensors may be rings, in which the oldest tokens are overwritten. Pages have all tokens.
#[derive(Clone, Copy, PartialEq)]
enum Rings {
    Refused,
    Taken,
}

fn described(path: &Path, rings: Rings) -> Result<GenerateFolder> {
    read(path, rings)
        .map_err(|error| Error::new(error.status(), format!("{}: {}", path.display(), error.message())).about("folder"))
}

fn read(path: &Path, rings: Rings) -> Result<GenerateFolder> {
    let configs = Configs { model: Document::read(path, CONFIG)?, genai: Document::read(path, GENAI_CONFIG)? };
    let model = graph_file(path, &configs)?;
    let graph = DecoderGraph::read(mapped(path, &model)?).map_err(|message| wrong(&model, message))?;
    let declared = names::declared(&graph, configs.genai.as_ref(), rings)
        .map_err(|error| Error::new(error.status(), format!("{model}: {}", error.message())))?;
    let sizes = sizes::sizes(&configs, &declared, &model)?;
    let texts = Texts::read(path, sizes.vocab_size)?;
    let text = texts.text_files(path)?;
    let documents = [&configs.model, &configs.genai].into_iter().flatten().map(|document| document.name);
    let mut names: Vec<String> = documents.chain(texts.files()).map(str::to_owned).collect();
    names.push(model.clone());
    names.extend(text.chat_template.clone());
    names.extend(weight_files(path, &model, &graph)?);
    let attention = Attention { layers: declared.layers, heads: sizes.heads, windows: sizes.windows.clone() };
    let folder = GenerateFolder {
        contents: contents(path, model, names)?,
        architecture: sizes.architecture.clone(),
        compute: declared.element,
        weights: match graph.weight_bits {
            None => WeightFormat::Native,
            Some(..=4) => WeightFormat::Int4,
            Some(_) => WeightFormat::Int8,
        },
        vocab_size: sizes.vocab_size,
        hidden_size: sizes.hidden_size,
        attention,
        kv: kv(&declared, &sizes),
        limits: Limits { max_context: sizes.max_context },
        tokens: texts.special(&configs, sizes.vocab_size)?,
        generation: texts.generation(&configs)?,
        text,
        form: Form::PastPresent(declared.form),
        inputs: Inputs::default(),
        outputs: Outputs::default(),
        main: None,
    };
    Ok(description::described(folder))
}

fn kv(declared: &Declared, sizes: &Sizes) -> KvLayout {
    let mut layout = KvLayout {
        layers: declared.layers,
        heads: sizes.kv_heads,
        head_size: sizes.head_size,
        page_size: PAGE_SIZE,
        element: declared.element,
        format: KvFormat::Native,
        bytes_per_token: 0,
    };
    layout.bytes_per_token = layout.token_shape().bytes(layout.format) as u64;
    layout
}

/// The file with the graph.
fn graph_file(path: &Path, configs: &Configs) -> Result<String> {
    if let Some(found) = configs.genai(&["model", "decoder", "filename"]) {
        let name = found.text()?;
        return match is_plain(name) {
            true if path.join(name).is_file() => Ok(name.to_owned()),
            true => Err(missing(name, "genai_config.json names it as the graph")),
            false => Err(found.expected("the path of a file inside the folder")),
        };
    }
    GRAPHS.iter().find(|name| path.join(name).is_file()).map(|&name| name.to_owned()).ok_or_else(|| {
        let names = GRAPHS.join(", ");
        let message = format!(
            "there is neither a pagoda.json in it nor the graph of a decoder: none of {names}. Name a folder that \
             `pagoda-export` has made, or rename the graph that is to be run"
        );
        Error::new(Status::NotFound, message)
    })
}

/// The files that the graph's weights are in, as the folder has them.
fn weight_files(path: &Path, model: &str, graph: &DecoderGraph) -> Result<Vec<String>> {
    let beside = |location: &String| {
        // Others are refused with the name of their tensor, when the weights are checked.
        let name = Path::new(model).with_file_name(location).to_str().filter(|_| is_plain(location))?.to_owned();
        Some(match path.join(&name).is_file() {
            true => Ok(name),
            false => Err(missing(&name, &format!("weights of {model} are in it"))),
        })
    };
    graph.locations.iter().filter_map(beside).collect()
}

fn missing(name: &str, why: &str) -> Error {
    Error::new(Status::NotFound, format!("{name} is missing, and {why}: copy the whole folder"))
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// The contents of a folder with these files, which are hashed and checked.
fn contents(path: &Path, model: String, mut names: Vec<String>) -> Result<FolderContents> {
    names.sort_unstable();
    names.dedup();
    let files = names.into_iter().map(|name| unhashed(path, name)).collect::<Result<_>>()?;
    let mut contents = FolderContents::foreign(path, model, files);
    for (file, hash) in check::hashes(&contents)? {
        contents.files[file].sha256 = hash;
    }
    let all = contents.files.iter().map(|file| format!("{} {}\n", file.sha256, file.name));
    contents.version = sha256_hex(all.collect::<String>().as_bytes());
    Ok(contents)
}

fn unhashed(path: &Path, name: String) -> Result<FolderFile> {
    let about = std::fs::metadata(path.join(&name))
        .map_err(|error| Error::new(Status::Io, format!("{name} can not be read: {error}")))?;
    Ok(FolderFile { name, bytes: about.len(), sha256: String::new() })
}

pub(super) fn mapped(path: &Path, model: &str) -> Result<Bytes> {
    let file = unhashed(path, model.to_owned())?;
    let opened = File::open(path.join(model))
        .map_err(|error| Error::new(Status::Io, format!("{model} can not be read: {error}")))?;
    check::map(&file, &opened)
}
