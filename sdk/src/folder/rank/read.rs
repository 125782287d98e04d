//! Reads the part of pagoda.json that folders of the kind `rank` have.

use pagoda_kernels::KvFormat;

use super::super::contents::{FolderContents, TYPES, choice, count, damaged, file_name, texts};
use super::{
    Feature, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence, SourceOf, Task,
    Times,
};
use crate::error::Result;
use crate::json::{Field, Object};
use crate::tensor::ElementType;

const LOOKUPS: [(&str, Lookup); 2] = [("bag", Lookup::Bag), ("gather", Lookup::Gather)];
const POSITIONS: [(&str, Positions); 2] = [("from_start", Positions::FromStart), ("from_end", Positions::FromEnd)];
const TIMES: [(&str, Times); 2] = [("absolute", Times::Absolute), ("before_request", Times::BeforeRequest)];
const SOURCES: [(&str, SourceOf); 3] =
    [("item", SourceOf::Item), ("action", SourceOf::Action), ("user", SourceOf::User)];

pub(in super::super) fn read(contents: FolderContents, top: &Object<'_>) -> Result<ModelFolder> {
    let part = |key| top.value(key)?.open_object();
    let folder = ModelFolder {
        contents,
        block: text(top, "block")?,
        // Folders from before it was there compute in f32.
        compute: top.get("compute").map_or(Ok(ElementType::F32), |field| choice(&field, &TYPES))?,
        embedding_size: count(&top.value("embedding_size")?)?,
        lookup: choice(&top.value("lookup")?, &LOOKUPS)?,
        no_key: top.value("no_key")?.i64()?,
        features: top.value("features")?.list("features")?.iter().map(feature).collect::<Result<_>>()?,
        tables: top.value("tables")?.list("tables")?.iter().map(table).collect::<Result<_>>()?,
        sequence: sequence(&part("sequence")?)?,
        positions: top.nullable("positions")?.map(|field| choice(&field, &POSITIONS)).transpose()?,
        times: top.nullable("times")?.map(|field| choice(&field, &TIMES)).transpose()?,
        tasks: tasks(&top.value("tasks")?)?,
        kv: kv(&part("kv")?)?,
        limits: limits(&part("limits")?)?,
        inputs: inputs(&part("inputs")?)?,
        outputs: outputs(&part("outputs")?)?,
    };
    agree(&folder)?;
    Ok(folder)
}

fn text(of: &Object<'_>, key: &'static str) -> Result<String> {
    of.value(key)?.text().map(str::to_owned)
}

fn nullable_text(of: &Object<'_>, key: &'static str) -> Result<Option<String>> {
    of.nullable(key)?.map(|field| field.text().map(str::to_owned)).transpose()
}

fn feature(field: &Field<'_>) -> Result<Feature> {
    let feature = field.open_object()?;
    Ok(Feature {
        name: text(&feature, "name")?,
        source: choice(&feature.value("source")?, &SOURCES)?,
        table: text(&feature, "table")?,
        input: text(&feature, "input")?,
        candidate_key: feature.nullable("candidate_key")?.map(|key| key.i64()).transpose()?,
    })
}

fn table(field: &Field<'_>) -> Result<FolderTable> {
    let object = field.open_object()?;
    let table = FolderTable {
        name: text(&object, "name")?,
        file: object.nullable("file")?.map(|file| file_name(&file)).transpose()?,
        rows: count(&object.value("rows")?)?,
        dim: count(&object.value("dim")?)?,
        keyed: object.value("keyed")?.flag()?,
        default_row: object.nullable("default_row")?.map(|row| count(&row)).transpose()?,
    };
    if table.default_row.is_some_and(|row| row >= table.rows) {
        return Err(object.value("default_row")?.expected(&format!("one of the {} rows", table.rows)));
    }
    Ok(table)
}

fn sequence(sequence: &Object<'_>) -> Result<Sequence> {
    let rows = |key| sequence.value(key)?.list("rows")?.iter().map(texts).collect::<Result<Vec<_>>>();
    let (begin, event, candidate) = (rows("begin")?, rows("event")?, rows("candidate")?);
    let [candidate] = <[_; 1]>::try_from(candidate).map_err(|_| damaged("`sequence.candidate`: expected one row"))?;
    if event.is_empty() {
        return Err(damaged("`sequence.event`: an event has no rows"));
    }
    Ok(Sequence { begin, event, candidate, interleaved: sequence.value("interleaved")?.flag()? })
}

fn tasks(field: &Field<'_>) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for task in field.list("tasks")? {
        let task = task.open_object()?;
        let index: usize = count(&task.value("index")?)?;
        if index != tasks.len() {
            return Err(task.value("index")?.expected(&format!("{}, for tasks stand in order", tasks.len())));
        }
        tasks.push(Task { name: text(&task, "name")?, activation: text(&task, "activation")? });
    }
    if tasks.is_empty() { Err(field.expected("at least one task")) } else { Ok(tasks) }
}

fn kv(kv: &Object<'_>) -> Result<KvLayout> {
    Ok(KvLayout {
        cache: kv.value("cache")?.flag()?,
        reason: nullable_text(kv, "reason")?,
        layers: count(&kv.value("layers")?)?,
        heads: count(&kv.value("heads")?)?,
        head_size: count(&kv.value("head_size")?)?,
        page_size: count(&kv.value("page_size")?)?,
        element: choice(&kv.value("type")?, &TYPES)?,
        format: KvFormat::Native,
        bytes_per_token: count(&kv.value("bytes_per_token")?)?,
    })
}

fn limits(limits: &Object<'_>) -> Result<Limits> {
    Ok(Limits {
        max_history: count(&limits.value("max_history")?)?,
        max_candidates: count(&limits.value("max_candidates")?)?,
        max_history_rows: count(&limits.value("max_history_rows")?)?,
    })
}

fn inputs(inputs: &Object<'_>) -> Result<Inputs> {
    Ok(Inputs {
        positions: nullable_text(inputs, "positions")?,
        times: nullable_text(inputs, "times")?,
        row_offsets: text(inputs, "row_offsets")?,
        num_candidates: text(inputs, "num_candidates")?,
        num_contextual: nullable_text(inputs, "num_contextual")?,
        cached_len: nullable_text(inputs, "cached_len")?,
        page_indptr: nullable_text(inputs, "page_indptr")?,
        page_ids: nullable_text(inputs, "page_ids")?,
        candidate_rows: text(inputs, "candidate_rows")?,
        kv_pools: texts(&inputs.value("kv_pools")?)?,
        kv_scales: Vec::new(),
    })
}

fn outputs(outputs: &Object<'_>) -> Result<Outputs> {
    let kv_pools = texts(&outputs.value("kv_pools")?)?;
    Ok(Outputs { scores: text(outputs, "scores")?, kv_pools, kv_scales: Vec::new() })
}

/// Checks that the parts agree with each other.
fn agree(folder: &ModelFolder) -> Result<()> {
    tables_agree(folder)?;
    rows_agree(folder)?;
    candidates_agree(folder)?;
    limits_agree(folder)?;
    pools_agree(folder)
}

fn tables_agree(folder: &ModelFolder) -> Result<()> {
    let mut files = folder.tables.iter().filter_map(|table| table.file.as_ref());
    if let Some(file) = files.find(|file| !folder.has(file)) {
        return Err(damaged(format!("`files` does not have {file}")));
    }
    for Feature { name, table, .. } in &folder.features {
        if folder.table(table).is_none() {
            let message = format!("feature {name:?} is looked up in table {table:?}, which `tables` does not have");
            return Err(damaged(message));
        }
    }
    match folder.tables.iter().find(|table| table.file.is_some() != (folder.lookup == Lookup::Bag)) {
        Some(table) => Err(damaged(format!("table {:?}: `file` does not go with `lookup`", table.name))),
        None => Ok(()),
    }
}

fn rows_agree(folder: &ModelFolder) -> Result<()> {
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
    Ok(())
}

fn candidates_agree(folder: &ModelFolder) -> Result<()> {
    for name in &folder.sequence.candidate {
        let action = folder.features.iter().find(|feature| feature.name == *name && feature.source == SourceOf::Action);
        let Some(action) = action else { continue };
        let Some(key) = action.candidate_key else {
            return Err(damaged(format!("`sequence.candidate` names {name:?}, which has no `candidate_key`")));
        };
        // Checked once, here: requests bring keys of events, and this one is added to each.
        let table = folder.table(&action.table).filter(|table| !table.keyed);
        if let Some(table) = table.filter(|table| !u64::try_from(key).is_ok_and(|key| key < table.rows)) {
            let (table, rows) = (&table.name, table.rows);
            let message = format!("`candidate_key` of {name:?} is {key}, and table {table:?} has {rows} rows");
            return Err(damaged(message));
        }
    }
    Ok(())
}

fn limits_agree(folder: &ModelFolder) -> Result<()> {
    let Sequence { begin, event, .. } = &folder.sequence;
    // Wide enough for every number that a file may have.
    let rows = begin.len() as u128 + u128::from(folder.limits.max_history) * event.len() as u128;
    let said = folder.limits.max_history_rows;
    if u128::from(said) != rows {
        return Err(damaged(format!("`limits.max_history_rows` is {said}, and {rows} by the sequence")));
    }
    Ok(())
}

fn pools_agree(folder: &ModelFolder) -> Result<()> {
    let Inputs { cached_len, page_indptr, page_ids, kv_pools, .. } = &folder.inputs;
    let paged = [cached_len, page_indptr, page_ids].iter().all(|name| name.is_some() == folder.kv.cache);
    let pools = if folder.kv.cache { folder.kv.layers as usize } else { 0 };
    if !paged || kv_pools.len() != pools || folder.outputs.kv_pools.len() != pools {
        return Err(damaged(format!("`inputs` and `outputs` do not have the {pools} pools that `kv` says")));
    }
    Ok(())
}
