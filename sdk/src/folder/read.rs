//! From the text of pagoda.json to what it means.

use std::path::{Component, Path};

use serde_json::Value;

use super::json::{At, damaged};
use super::{
    Feature, FolderFile, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence,
    SourceOf, Task, Times,
};
use crate::error::{Error, Result, Status};
use crate::tensor::ElementType;

/// The format that this reads.
const FORMAT: u64 = 1;

/// Reads the text of the pagoda.json in `folder`; no other file is looked at.
pub(super) fn read(folder: &Path, text: &str) -> Result<ModelFolder> {
    let value: Value = serde_json::from_str(text).map_err(|error| damaged(format!("not JSON: {error}")))?;
    let top = At::top(&value);
    let format: u64 = top.get("format")?.count()?;
    if format != FORMAT {
        let message = format!(
            "pagoda.json: this folder has format {format} and this Pagoda reads format {FORMAT}: export the model \
             again, or use the Pagoda that it was made for"
        );
        return Err(Error::new(Status::Unsupported, message));
    }
    let made = ModelFolder {
        path: folder.to_owned(),
        json: text.to_owned(),
        version: top.get("version")?.text()?.to_owned(),
        model: file_name(&top.get("model")?)?,
        block: top.get("block")?.text()?.to_owned(),
        compute: top.find("compute")?.map_or(Ok(ElementType::F32), |at| at.choice(&TYPES))?,
        embedding_size: top.get("embedding_size")?.count()?,
        lookup: top.get("lookup")?.choice(&[("bag", Lookup::Bag), ("gather", Lookup::Gather)])?,
        no_key: top.get("no_key")?.key()?,
        features: top.get("features")?.list()?.iter().map(feature).collect::<Result<_>>()?,
        tables: top.get("tables")?.list()?.iter().map(table).collect::<Result<_>>()?,
        sequence: sequence(&top.get("sequence")?)?,
        positions: choice(top.get("positions")?, &POSITIONS)?,
        times: choice(top.get("times")?, &TIMES)?,
        tasks: tasks(&top.get("tasks")?)?,
        kv: kv(&top.get("kv")?)?,
        limits: limits(&top.get("limits")?)?,
        inputs: inputs(&top.get("inputs")?)?,
        outputs: Outputs {
            scores: top.get("outputs")?.get("scores")?.text()?.to_owned(),
            kv_pools: top.get("outputs")?.get("kv_pools")?.texts()?,
        },
        files: files(&top.get("files")?)?,
    };
    agree(&made)?;
    Ok(made)
}

const POSITIONS: [(&str, Positions); 2] = [("from_start", Positions::FromStart), ("from_end", Positions::FromEnd)];
const TIMES: [(&str, Times); 2] = [("absolute", Times::Absolute), ("before_request", Times::BeforeRequest)];
const SOURCES: [(&str, SourceOf); 3] =
    [("item", SourceOf::Item), ("action", SourceOf::Action), ("user", SourceOf::User)];
const TYPES: [(&str, ElementType); 3] =
    [("f32", ElementType::F32), ("f16", ElementType::F16), ("bf16", ElementType::Bf16)];

fn choice<T: Copy>(at: At<'_>, choices: &[(&str, T)]) -> Result<Option<T>> {
    at.given().map(|at| at.choice(choices)).transpose()
}

/// A path that stays in the folder.
fn file_name(at: &At<'_>) -> Result<String> {
    let name = at.text()?;
    let inside = !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if inside { Ok(name.to_owned()) } else { Err(at.expected("the path of a file inside the folder")) }
}

fn feature(at: &At<'_>) -> Result<Feature> {
    Ok(Feature {
        name: at.get("name")?.text()?.to_owned(),
        source: at.get("source")?.choice(&SOURCES)?,
        table: at.get("table")?.text()?.to_owned(),
        input: at.get("input")?.text()?.to_owned(),
        candidate_key: at.get("candidate_key")?.given().map(|at| at.key()).transpose()?,
    })
}

fn table(at: &At<'_>) -> Result<FolderTable> {
    let table = FolderTable {
        name: at.get("name")?.text()?.to_owned(),
        file: at.get("file")?.given().map(|at| file_name(&at)).transpose()?,
        rows: at.get("rows")?.count()?,
        dim: at.get("dim")?.count()?,
        keyed: at.get("keyed")?.flag()?,
        default_row: at.get("default_row")?.given().map(|at| at.count()).transpose()?,
    };
    if table.default_row.is_some_and(|row| row >= table.rows) {
        return Err(at.get("default_row")?.expected(&format!("one of the {} rows", table.rows)));
    }
    Ok(table)
}

fn sequence(at: &At<'_>) -> Result<Sequence> {
    let rows = |key| at.get(key)?.list()?.iter().map(At::texts).collect::<Result<Vec<_>>>();
    let (begin, event, candidate) = (rows("begin")?, rows("event")?, rows("candidate")?);
    let [candidate] = <[_; 1]>::try_from(candidate).map_err(|_| damaged("`sequence.candidate`: expected one row"))?;
    if event.is_empty() {
        return Err(damaged("`sequence.event`: an event has no rows"));
    }
    Ok(Sequence { begin, event, candidate, interleaved: at.get("interleaved")?.flag()? })
}

fn tasks(at: &At<'_>) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for task in at.list()? {
        let index: usize = task.get("index")?.count()?;
        if index != tasks.len() {
            return Err(task.get("index")?.expected(&format!("{}, for tasks stand in order", tasks.len())));
        }
        let (name, activation) = (task.get("name")?.text()?.to_owned(), task.get("activation")?.text()?.to_owned());
        tasks.push(Task { name, activation });
    }
    if tasks.is_empty() { Err(at.expected("at least one task")) } else { Ok(tasks) }
}

fn kv(at: &At<'_>) -> Result<KvLayout> {
    Ok(KvLayout {
        cache: at.get("cache")?.flag()?,
        reason: at.get("reason")?.given().map(|at| at.text().map(str::to_owned)).transpose()?,
        layers: at.get("layers")?.count()?,
        heads: at.get("heads")?.count()?,
        head_size: at.get("head_size")?.count()?,
        page_size: at.get("page_size")?.count()?,
        element: at.get("type")?.choice(&TYPES)?,
        bytes_per_token: at.get("bytes_per_token")?.count()?,
    })
}

fn limits(at: &At<'_>) -> Result<Limits> {
    Ok(Limits {
        max_history: at.get("max_history")?.count()?,
        max_candidates: at.get("max_candidates")?.count()?,
        max_history_rows: at.get("max_history_rows")?.count()?,
    })
}

fn inputs(at: &At<'_>) -> Result<Inputs> {
    let name = |key| at.get(key)?.text().map(str::to_owned);
    let maybe = |key| at.get(key)?.given().map(|at| at.text().map(str::to_owned)).transpose();
    Ok(Inputs {
        positions: maybe("positions")?,
        times: maybe("times")?,
        row_offsets: name("row_offsets")?,
        num_candidates: name("num_candidates")?,
        num_contextual: maybe("num_contextual")?,
        cached_len: maybe("cached_len")?,
        page_indptr: maybe("page_indptr")?,
        page_ids: maybe("page_ids")?,
        candidate_rows: name("candidate_rows")?,
        kv_pools: at.get("kv_pools")?.texts()?,
    })
}

fn files(at: &At<'_>) -> Result<Vec<FolderFile>> {
    let mut files = Vec::new();
    for (name, about) in at.members()? {
        let path = Value::String(name.to_owned());
        file_name(&At::top(&path)).map_err(|_| about.expected("under the path of a file inside the folder"))?;
        let sha256 = about.get("sha256")?.text()?.to_owned();
        files.push(FolderFile { name: name.to_owned(), bytes: about.get("bytes")?.count()?, sha256 });
    }
    Ok(files)
}

/// What one part says of another holds.
fn agree(folder: &ModelFolder) -> Result<()> {
    let listed = |file: &String| folder.files.iter().any(|known| known.name == *file);
    if let Some(file) =
        [&folder.model].into_iter().chain(folder.tables.iter().filter_map(|t| t.file.as_ref())).find(|f| !listed(f))
    {
        return Err(damaged(format!("`files` does not have {file}")));
    }
    for feature in &folder.features {
        if folder.table(&feature.table).is_none() {
            let message = format!(
                "feature {:?} is looked up in table {:?}, which `tables` does not have",
                feature.name, feature.table
            );
            return Err(damaged(message));
        }
    }
    if let Some(table) = folder.tables.iter().find(|table| table.file.is_some() != (folder.lookup == Lookup::Bag)) {
        return Err(damaged(format!("table {:?}: `file` does not go with `lookup`", table.name)));
    }
    let Sequence { begin, event, candidate, .. } = &folder.sequence;
    let kinds = [(begin, &[SourceOf::User][..]), (event, &[SourceOf::Item, SourceOf::Action])];
    let kinds = kinds.into_iter().flat_map(|(rows, kinds)| rows.iter().map(move |row| (row, kinds)));
    for (row, kinds) in kinds.chain([(candidate, &[SourceOf::Item, SourceOf::Action][..])]) {
        for name in row {
            if !folder.features.iter().any(|feature| feature.name == *name && kinds.contains(&feature.source)) {
                return Err(damaged(format!("`sequence` names {name:?}, which is no feature that can stand there")));
            }
        }
    }
    for name in candidate {
        let action = folder.features.iter().find(|feature| feature.name == *name && feature.source == SourceOf::Action);
        let Some(action) = action else { continue };
        let Some(key) = action.candidate_key else {
            return Err(damaged(format!("`sequence.candidate` names {name:?}, which has no `candidate_key`")));
        };
        // It is not looked at with each request, as keys of events are.
        let table = folder.table(&action.table).filter(|table| !table.keyed);
        if let Some(table) = table.filter(|table| !u64::try_from(key).is_ok_and(|key| key < table.rows)) {
            let (table, rows) = (&table.name, table.rows);
            let message = format!("`candidate_key` of {name:?} is {key}, and table {table:?} has {rows} rows");
            return Err(damaged(message));
        }
    }
    // Wide enough for whatever a file says.
    let rows = begin.len() as u128 + u128::from(folder.limits.max_history) * event.len() as u128;
    if u128::from(folder.limits.max_history_rows) != rows {
        let said = folder.limits.max_history_rows;
        return Err(damaged(format!("`limits.max_history_rows` is {said}, and {rows} by the sequence")));
    }
    let Inputs { cached_len, page_indptr, page_ids, kv_pools, .. } = &folder.inputs;
    let paged = [cached_len, page_indptr, page_ids].iter().all(|name| name.is_some() == folder.kv.cache);
    let pools = if folder.kv.cache { folder.kv.layers as usize } else { 0 };
    if !paged || kv_pools.len() != pools || folder.outputs.kv_pools.len() != pools {
        return Err(damaged(format!("`inputs` and `outputs` do not have the {pools} pools that `kv` says")));
    }
    Ok(())
}
