//! Reads the tables of a model: the file has one list for each property.

use std::path::Path;

use crate::embedding::options::TableSpec;
use crate::embedding::row::{Layout, RowType};
use crate::error::Result;
use crate::json::{Field, Object};

/// Reads the tables, and for each the most keys of one sample, if the file has them.
pub(super) fn read(model: &Object<'_>, folder: Option<&Path>) -> Result<(Vec<TableSpec>, Option<Vec<u64>>)> {
    let lists = Lists::read(model)?;
    let mut tables = Vec::<TableSpec>::new();
    for index in 0..lists.files.len() {
        let table = lists.table(index, folder)?;
        if let (Some(names), Some(before)) = (&lists.names, tables.iter().position(|before| before.name == table.name))
        {
            let name = &table.name;
            let message = format!("{name:?} is the name of table {before} of this model too; each needs its own");
            return Err(names[index].error(&message));
        }
        tables.push(table);
    }
    let max_keys = lists.max_keys.as_ref().map(|most| most.iter().map(|most| most.whole(0..=u64::MAX)).collect());
    Ok((tables, max_keys.transpose()?))
}

/// The lists of the file, each with one entry for each table.
struct Lists<'a> {
    files: Vec<Field<'a>>,
    dims: Vec<Field<'a>>,
    names: Option<Vec<Field<'a>>>,
    defaults: Option<Vec<Field<'a>>>,
    max_keys: Option<Vec<Field<'a>>>,
    row_types: Option<Vec<Field<'a>>>,
}

impl<'a> Lists<'a> {
    fn read(model: &Object<'a>) -> Result<Self> {
        let files = model.required("sparse_files", "the file or folder of each table, a list")?;
        let count = files.list("paths")?.len();
        if count == 0 {
            return Err(files.error("is empty; name at least one table"));
        }
        let list = |field: Field<'a>, what| {
            let list = field.list(what)?;
            let (length, files) = (list.len(), files.place());
            let message = format!("has {length} entries, but {files} has {count}; each table needs one in both");
            if length == count { Ok(list) } else { Err(field.error(&message)) }
        };
        let maybe = |key, what| model.get(key).map(|field| list(field, what)).transpose();
        let dims = model.required("embedding_vecsize_per_table", "how many numbers a row of each table has, a list")?;
        Ok(Self {
            files: files.list("paths")?,
            dims: list(dims, "whole numbers")?,
            names: maybe("embedding_table_names", "names")?,
            defaults: maybe("default_value_for_each_table", "numbers")?,
            max_keys: maybe("maxnum_catfeature_query_per_table_per_sample", "whole numbers")?,
            row_types: maybe("row_type_per_table", "types")?,
        })
    }

    fn table(&self, index: usize, folder: Option<&Path>) -> Result<TableSpec> {
        let dim = self.dims[index].whole(0..=u32::MAX)?;
        Layout::new(dim, RowType::F32).map_err(|error| self.dims[index].error(error.message()))?;
        Ok(TableSpec {
            name: match &self.names {
                Some(names) => names[index].name()?.to_owned(),
                None => format!("sparse_embedding{index}"),
            },
            path: self.files[index].path(folder)?,
            dim,
            default_row: match &self.defaults {
                Some(defaults) => default_row(&defaults[index], dim)?,
                None => vec![0.0; dim as usize],
            },
            row_type: self.row_types.as_ref().map(|types| types[index].choice(&ROW_TYPES)).transpose()?,
        })
    }
}

const ROW_TYPES: [(&[&str], RowType); 3] = [(&["f32"], RowType::F32), (&["f16"], RowType::F16), (&["i8"], RowType::I8)];

/// A default row: one number for all elements, or a list of them.
fn default_row(field: &Field<'_>, dim: u32) -> Result<Vec<f32>> {
    let Some(numbers) = field.maybe_list() else { return Ok(vec![field.row_number()?; dim as usize]) };
    if numbers.len() != dim as usize {
        return Err(field.error(&format!("has {} numbers, but a row of this table has {dim}", numbers.len())));
    }
    numbers.iter().map(Field::row_number).collect()
}
