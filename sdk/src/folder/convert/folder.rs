//! A converted folder: the graph, the files that stay as they are, and a pagoda.json; whole or not at all.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use super::super::contents::FolderFile;
use super::super::decoder;
use super::super::generate::{Attention, Form, GenerateFolder, Inputs, Outputs, PastPresent, RewrittenGraphs};
use super::paged::PagedNames;
use super::{ConvertTo, Converted, Names, Sides, rewrite};
use crate::checksum::sha256_hex;
use crate::error::{Error, Result, Status};
use crate::runtime::Cancel;

const MODEL: &str = "model.onnx";
const MANIFEST: &str = "pagoda.json";
/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;
/// What stands for the version while it is computed.
const NO_VERSION: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Rewrites the decoder in the folder `from`, which another exporter wrote, as the model folder `to`, in the form `form`. Files with weights are hard links to those of `from`, where both are on one
/// file system, and else copies. `to` is made whole or not at all, and must not be there yet, or be empty.
///
/// # Errors
/// As [`GenerateFolder::open`] for `from`; UNSUPPORTED for a graph that is not recognised, with its nodes by name; INVALID_ARGUMENT if
/// `to` is there; CANCELLED if `cancel` was triggered; IO.
pub fn convert(
    from: impl AsRef<Path>,
    to: impl AsRef<Path>,
    form: ConvertTo,
    cancel: &Cancel,
) -> Result<GenerateFolder> {
    let (from, to) = (from.as_ref(), to.as_ref());
    check_free(to)?;
    if from.join(MANIFEST).exists() {
        let message = format!("{} has a {MANIFEST}: it is a model folder of Pagoda already", from.display());
        return Err(Error::invalid("from", message));
    }
    let folder = decoder::read_to_convert(from)?;
    let (converted, made) = rewritten(&folder, form)?;
    check(cancel)?;
    write(&folder, made, &converted, to, cancel)?;
    GenerateFolder::open(to)
}

impl GenerateFolder {
    /// Whether a generator that opens this decoder of another exporter rewrites its graph in memory, as [`convert`] does in files.
    ///
    /// # Errors
    /// UNSUPPORTED for a graph that is not recognised, with its nodes by name, and for a folder that needs no rewriting; MODEL for a
    /// graph that its configuration contradicts.
    pub fn is_rewritten(&self) -> Result<()> {
        rewritten(self, ConvertTo::Paged).map(drop)
    }

    /// This decoder of another exporter with its attention over pages, and its graph rewritten for them. Weights that lie outside
    /// the graph stay where they are.
    ///
    /// # Errors
    /// As [`is_rewritten`](Self::is_rewritten).
    pub(crate) fn with_paged_attention(&self) -> Result<(Self, RewrittenGraphs)> {
        let (converted, folder) = rewritten(self, ConvertTo::Paged)?;
        Ok((folder, RewrittenGraphs::one(converted.bytes)))
    }
}

/// The graph of a decoder, rewritten, and what the folder says then. Its files are still those of the decoder.
fn rewritten(folder: &GenerateFolder, to: ConvertTo) -> Result<(Converted, GenerateFolder)> {
    let Form::PastPresent(form) = &folder.form else {
        let message = format!("the model has the form {:?}, which needs no conversion", folder.form.name());
        return Err(Error::new(Status::Unsupported, message).about("from"));
    };
    let bytes = decoder::mapped(folder.path(), &folder.model)?;
    let converted = rewrite(bytes, &names(folder, form), to).map_err(|wrong| refused(folder, &wrong))?;
    if [converted.vocab_size, converted.heads] != [folder.vocab_size, folder.attention.heads].map(|size| size as usize)
    {
        let message = format!(
            "{}: its graph has {} logits and {} query heads, and its configuration {} and {}: they do not belong together",
            folder.path().display(),
            converted.vocab_size,
            converted.heads,
            folder.vocab_size,
            folder.attention.heads
        );
        return Err(Error::new(Status::Model, message).about("from"));
    }
    let mut made = folder.clone();
    let windows = converted.windows.iter().map(|&window| window as u32).collect();
    made.attention = Attention { windows, ..made.attention };
    match &converted.sides {
        Sides::Paged(names) => {
            made.form = Form::Paged;
            (made.inputs, made.outputs) = sides(names);
        }
        Sides::Functional(names) => made.form = Form::Functional(names.clone()),
    }
    Ok((converted, made))
}

fn names<'a>(folder: &'a GenerateFolder, form: &'a PastPresent) -> Names<'a> {
    Names {
        input_ids: &form.input_ids,
        attention_mask: &form.attention_mask,
        position_ids: form.position_ids.as_deref(),
        use_cache_branch: form.use_cache_branch.as_deref(),
        past_keys: &form.past_keys,
        past_values: &form.past_values,
        logits: &form.logits,
        present_keys: &form.present_keys,
        present_values: &form.present_values,
        kv_heads: folder.kv.heads as usize,
        head_size: folder.kv.head_size as usize,
        element: folder.kv.element,
        page_size: folder.kv.page_size as usize,
    }
}

fn sides(names: &PagedNames) -> (Inputs, Outputs) {
    let [input_ids, positions, row_offsets, cached_len, page_indptr, page_ids, logits_rows] = names.inputs.clone();
    let inputs = Inputs {
        input_ids,
        positions: Some(positions),
        row_offsets,
        cached_len,
        page_indptr,
        page_ids,
        logits_rows,
        kv_pools: names.pools.clone(),
        kv_scales: Vec::new(),
    };
    let kv_pools = names.pools_out.clone();
    (inputs, Outputs { logits: names.logits.clone(), logits_max: None, kv_pools, kv_scales: Vec::new() })
}

/// The error of a graph that was not recognised: each node, as far as there is room.
fn refused(folder: &GenerateFolder, wrong: &[String]) -> Error {
    const SHOWN: usize = 8;
    let mut message = format!("{}: the graph can not be rewritten:", folder.file(&folder.model).display());
    for what in wrong.iter().take(SHOWN) {
        message.push_str("\n  ");
        message.push_str(what);
    }
    if let Some(more @ 1..) = wrong.len().checked_sub(SHOWN) {
        message.push_str(&format!("\n  and {more} more"));
    }
    Error::new(Status::Unsupported, message).about("from")
}

/// Checks that a folder is not there yet, or empty.
fn check_free(to: &Path) -> Result<()> {
    match fs::read_dir(to) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => {
                Err(Error::invalid("to", format!("{} exists and is not empty: give another path", to.display())))
            }
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Err(Error::invalid(
            "to",
            format!("{} is a file: give the path of a folder that is to be made", to.display()),
        )),
        Err(error) => Err(failed(to, &error)),
    }
}

/// Writes the folder beside the place where it is to be, and moves it there.
fn write(
    from: &GenerateFolder,
    mut made: GenerateFolder,
    converted: &Converted,
    to: &Path,
    cancel: &Cancel,
) -> Result<()> {
    let parts = Unfinished::beside(to)?;
    let model = parts.path.join(MODEL);
    fs::write(&model, &converted.bytes).map_err(|error| failed(&model, &error))?;
    let mut files = vec![FolderFile {
        name: MODEL.into(),
        bytes: converted.bytes.len() as u64,
        sha256: sha256_hex(&converted.bytes),
    }];
    for location in &converted.locations {
        // It is relative to the graph, which lies in the folder itself from now on.
        let name = Path::new(&from.model).with_file_name(location);
        let file = from.files.iter().find(|file| Path::new(&file.name) == name);
        let file = file.filter(|_| location != MODEL && location != MANIFEST).ok_or_else(|| {
            let message =
                format!("{}: weights are in {location:?}, which can not be in a folder", from.path().display());
            Error::new(Status::Model, message).about("from")
        })?;
        place(&from.file(&file.name), &parts.path.join(location), true, cancel)?;
        files.push(FolderFile { name: location.clone(), ..file.clone() });
    }
    for name in [&made.text.tokenizer].into_iter().chain(&made.text.chat_template) {
        let listed = from.files.iter().find(|file| file.name == *name);
        let taken = files.iter().any(|file| file.name == *name);
        if let Some(file) = listed.filter(|_| !taken) {
            place(&from.file(name), &parts.path.join(name), false, cancel)?;
            files.push(file.clone());
        }
    }
    made.contents.model = MODEL.into();
    made.contents.files = files;
    made.contents.version = NO_VERSION.into();
    let mut text = format!("{:#}\n", decoder::description(&made));
    text = text.replacen(NO_VERSION, &sha256_hex(text.as_bytes()), 1);
    let manifest = parts.path.join(MANIFEST);
    fs::write(&manifest, text).map_err(|error| failed(&manifest, &error))?;
    check(cancel)?;
    parts.finish(to)
}

/// Puts a file into the folder: as a link to the same contents, if it may be one, or as a copy.
fn place(from: &Path, to: &Path, may_be_link: bool, cancel: &Cancel) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(|error| failed(parent, &error))?;
    }
    // A link to a symbolic link would lead elsewhere from here.
    let from = from.canonicalize().map_err(|error| failed(from, &error))?;
    if may_be_link && fs::hard_link(&from, to).is_ok() {
        return Ok(());
    }
    let mut source = File::open(&from).map_err(|error| failed(&from, &error))?;
    let mut copy = File::create(to).map_err(|error| failed(to, &error))?;
    let mut buffer = vec![0; CHUNK];
    loop {
        check(cancel)?;
        let count = source.read(&mut buffer).map_err(|error| failed(&from, &error))?;
        if count == 0 {
            return Ok(());
        }
        copy.write_all(&buffer[..count]).map_err(|error| failed(to, &error))?;
    }
}

/// A folder that is removed unless it is finished.
struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    fn beside(to: &Path) -> Result<Self> {
        let name =
            to.file_name().ok_or_else(|| Error::invalid("to", format!("{:?} is no path of a folder", to.display())))?;
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let path = parent.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        fs::create_dir(&path).map_err(|error| failed(&path, &error))?;
        Ok(Self { path })
    }

    /// Moves it to its place, where there may be an empty folder.
    fn finish(self, to: &Path) -> Result<()> {
        fs::rename(&self.path, to).map_err(|error| failed(to, &error))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Not there any more if it was finished.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn check(cancel: &Cancel) -> Result<()> {
    if cancel.is_triggered() {
        return Err(Error::new(Status::Cancelled, "the conversion was cancelled; nothing was written"));
    }
    Ok(())
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::new(Status::Io, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    /// One of `tests/data/decoders`, with its tokenizer.
    fn decoder(name: &str) -> Folder {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let folder = Folder::new();
        let own = fs::read_dir(data.join("decoders").join(name)).unwrap().map(|file| file.unwrap().path());
        for file in own.chain([data.join("llm/llama/tokenizer.json")]) {
            fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
        }
        folder
    }

    #[test]
    fn both_forms_open_with_the_sizes_of_the_decoder() {
        for name in ["llama-genai", "qwen2-genai-ring", "gemma3-optimum", "llama-1-optimum-merged"] {
            let (from, made) = (decoder(name), Folder::new());
            let before = decoder::read_to_convert(from.path()).unwrap();
            for (form, word) in [(ConvertTo::Paged, "paged"), (ConvertTo::Functional, "functional")] {
                let to = made.path().join(word);
                let after = convert(from.path(), &to, form, &Cancel::new()).unwrap();
                assert_eq!(after.form.name(), word);
                assert_eq!(
                    (&after.kv, after.vocab_size, &after.tokens),
                    (&before.kv, before.vocab_size, &before.tokens)
                );
                assert_eq!(
                    (&after.architecture, after.limits, after.hidden_size),
                    (&before.architecture, before.limits, 32)
                );
                assert_eq!(after.inputs.kv_pools.len(), if word == "paged" { after.kv.layers as usize } else { 0 });
            }
        }
    }

    #[test]
    fn nothing_is_left_of_a_conversion_that_is_cancelled_or_fails() {
        let (from, made) = (decoder("llama-genai"), Folder::new());
        let to = made.path().join("out");
        let cancel = Cancel::new();
        cancel.trigger();
        let error = convert(from.path(), &to, ConvertTo::Paged, &cancel).unwrap_err();
        assert_eq!(error.status(), Status::Cancelled);
        let folder = decoder::read_to_convert(from.path()).unwrap();
        let (mut converted, described) = rewritten(&folder, ConvertTo::Paged).unwrap();
        // Everything but one file is there already.
        converted.locations.push("missing.bin".into());
        let error = write(&folder, described, &converted, &to, &Cancel::new()).unwrap_err();
        assert!(error.message().contains("\"missing.bin\""), "{error}");
        assert_eq!(fs::read_dir(made.path()).unwrap().count(), 0);
    }
}
