//! The report on a folder of the kind `rank`.

mod text;

use pagoda::ModelFolder;
use pagoda::engine::{FolderTable, Lookup, Positions, SourceOf, Times};
use serde::Serialize;

use super::File;
use super::by_format::ByFormat;

/// The report on a folder.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    folder: String,
    kind: &'static str,
    version: &'a str,
    /// Whether every file is as it was exported. Always true: otherwise there is no report.
    whole: bool,
    block: &'a str,
    embedding_size: u32,
    layers: u32,
    heads: u32,
    head_size: u32,
    tasks: Vec<Task<'a>>,
    features: Vec<Feature<'a>>,
    /// `bag`: in separate files; `gather`: in the graph.
    lookup: &'static str,
    tables: Vec<Table<'a>>,
    sequence: Sequence<'a>,
    positions: Option<&'static str>,
    times: Option<&'static str>,
    kv: Kv<'a>,
    limits: Limits,
    inputs: Vec<&'a str>,
    outputs: Vec<&'a str>,
    files: Vec<File<'a>>,
    bytes_on_disk: u64,
    memory: Memory,
    /// A line that `pagoda rank` answers.
    example: String,
}

#[derive(Serialize)]
struct Task<'a> {
    name: &'a str,
    activation: &'a str,
}

#[derive(Serialize)]
struct Feature<'a> {
    name: &'a str,
    /// Its source: `item`, `action` or `user`.
    of: &'static str,
    table: &'a str,
    candidate_key: Option<i64>,
}

#[derive(Serialize)]
struct Table<'a> {
    name: &'a str,
    file: Option<&'a str>,
    rows: u64,
    dim: u32,
    keyed: bool,
    default_row: Option<u64>,
    bytes: u64,
}

#[derive(Serialize)]
struct Sequence<'a> {
    begin: &'a [Vec<String>],
    event: &'a [Vec<String>],
    candidate: &'a [String],
    interleaved: bool,
}

#[derive(Serialize)]
struct Kv<'a> {
    cache: bool,
    reason: Option<&'a str>,
    page_size: u32,
    #[serde(rename = "type")]
    element: &'static str,
    bytes_per_token: u64,
}

#[derive(Serialize)]
struct Limits {
    max_history: u64,
    max_candidates: u64,
    max_history_rows: u64,
}

/// Estimated bytes in service.
#[derive(Serialize)]
struct Memory {
    /// The dense part, once.
    session_weights: u64,
    /// The rows of tables that are not in the dense part.
    tables: u64,
    /// Keys and values of a row; 0 if none are kept.
    kv_per_row: u64,
    /// The same with another `kv_format`; null if none are kept.
    kv_per_row_by_format: Option<ByFormat>,
    /// Keys and values of a history of 1,000 events.
    kv_per_1000_events: u64,
    users: u64,
    events: u64,
    /// Keys and values of `users` with `events` each.
    kv_of_users: u64,
}

impl<'a> Report<'a> {
    /// `events`: of each user; `None`: as many as the model takes.
    pub(super) fn new(folder: &'a ModelFolder, users: u64, events: Option<u64>) -> Self {
        let events = events.unwrap_or(folder.limits.max_history);
        let kept = |events| if folder.kv.cache { folder.history_bytes(events) } else { 0 };
        let memory = Memory {
            session_weights: folder.model_bytes(),
            tables: folder.table_bytes(),
            kv_per_row: if folder.kv.cache { folder.kv.bytes_per_token } else { 0 },
            kv_per_row_by_format: folder.kv.cache.then(|| ByFormat::new(|format| folder.kv.bytes_per_token_in(format))),
            kv_per_1000_events: kept(1000),
            users,
            events,
            kv_of_users: kept(events).saturating_mul(users),
        };
        let features = folder.features.iter().map(|feature| Feature {
            name: &feature.name,
            of: source_name(feature.source),
            table: &feature.table,
            candidate_key: feature.candidate_key,
        });
        Self {
            folder: folder.path().display().to_string(),
            kind: folder.kind.name(),
            version: &folder.version,
            whole: true,
            block: &folder.block,
            embedding_size: folder.embedding_size,
            layers: folder.kv.layers,
            heads: folder.kv.heads,
            head_size: folder.kv.head_size,
            tasks: folder.tasks.iter().map(|task| Task { name: &task.name, activation: &task.activation }).collect(),
            features: features.collect(),
            lookup: match folder.lookup {
                Lookup::Bag => "bag",
                Lookup::Gather => "gather",
            },
            tables: folder.tables.iter().map(Table::new).collect(),
            sequence: Sequence {
                begin: &folder.sequence.begin,
                event: &folder.sequence.event,
                candidate: &folder.sequence.candidate,
                interleaved: folder.sequence.interleaved,
            },
            positions: folder.positions.map(|positions| match positions {
                Positions::FromStart => "from_start",
                Positions::FromEnd => "from_end",
            }),
            times: folder.times.map(|times| match times {
                Times::Absolute => "absolute",
                Times::BeforeRequest => "before_request",
            }),
            kv: Kv {
                cache: folder.kv.cache,
                reason: folder.kv.reason.as_deref(),
                page_size: folder.kv.page_size,
                element: folder.kv.element.name(),
                bytes_per_token: folder.kv.bytes_per_token,
            },
            limits: Limits {
                max_history: folder.limits.max_history,
                max_candidates: folder.limits.max_candidates,
                max_history_rows: folder.limits.max_history_rows,
            },
            inputs: inputs(folder),
            outputs: std::iter::once(&folder.outputs.scores)
                .chain(&folder.outputs.kv_pools)
                .map(String::as_str)
                .collect(),
            files: File::all(folder),
            bytes_on_disk: folder.files.iter().map(|file| file.bytes).sum(),
            memory,
            example: example(folder),
        }
    }
}

impl<'a> Table<'a> {
    fn new(table: &'a FolderTable) -> Self {
        Self {
            name: &table.name,
            file: table.file.as_deref(),
            rows: table.rows,
            dim: table.dim,
            keyed: table.keyed,
            default_row: table.default_row,
            bytes: table.rows * u64::from(table.dim) * size_of::<f32>() as u64,
        }
    }
}

fn source_name(source: SourceOf) -> &'static str {
    match source {
        SourceOf::Item => "item",
        SourceOf::Action => "action",
        SourceOf::User => "user",
    }
}

/// The inputs of the graph, in the order of their description.
fn inputs(folder: &ModelFolder) -> Vec<&str> {
    let inputs = &folder.inputs;
    let keys = folder.features.iter().map(|feature| &feature.input);
    let some = [&inputs.positions, &inputs.times].into_iter().flatten();
    let rows = [&inputs.row_offsets, &inputs.num_candidates];
    let pages = [&inputs.num_contextual, &inputs.cached_len, &inputs.page_indptr, &inputs.page_ids];
    let all = keys.chain(some).chain(rows).chain(pages.into_iter().flatten());
    all.chain([&inputs.candidate_rows]).chain(&inputs.kv_pools).map(String::as_str).collect()
}

/// A request of one event and two candidates.
fn example(folder: &ModelFolder) -> String {
    let quoted = |name: &str| serde_json::to_string(name).unwrap_or_default();
    let columns = |sources: &[SourceOf], keys: &str| {
        let of = folder.features.iter().filter(|feature| sources.contains(&feature.source));
        of.map(|feature| format!("{}: {keys}", quoted(&feature.name))).collect::<Vec<_>>()
    };
    let mut events = columns(&[SourceOf::Item, SourceOf::Action], "[1]");
    if folder.times.is_some() {
        events.push("\"time\": [1700000000]".to_owned());
    }
    let mut fields = vec!["\"user\": 7".to_owned()];
    let user = columns(&[SourceOf::User], "1");
    if !user.is_empty() {
        fields.push(format!("\"user_keys\": {{{}}}", user.join(", ")));
    }
    fields.push(format!("\"events\": {{{}}}", events.join(", ")));
    fields.push(format!("\"candidates\": {{{}}}", columns(&[SourceOf::Item], "[1, 2]").join(", ")));
    format!("{{{}}}", fields.join(", "))
}
