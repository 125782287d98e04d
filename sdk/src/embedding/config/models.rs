//! Reads `models`, except for their tables.

use std::path::Path;
use std::time::Duration;

use super::hugectr_fields::{HugeCtrGpuCache, HugeCtrModel};
use super::tables;
use crate::embedding::options::{CacheOptions, CacheSize, ModelTables};
use crate::error::Result;
use crate::json::{Field, Keys, Object};

/// The longest time in seconds.
const LONGEST: f64 = 1e9;

pub(super) const KEYS: Keys = Keys {
    known: &[
        "model",
        "sparse_files",
        "embedding_table_names",
        "embedding_vecsize_per_table",
        "default_value_for_each_table",
        "maxnum_catfeature_query_per_table_per_sample",
        "row_type_per_table",
        "gpucache",
        "gpucacheper",
        "cache_rows",
        "cache_bytes",
        "hit_rate_threshold",
        "refresh_delay",
        "refresh_interval",
        "cache_refresh_percentage_per_iteration",
        "init_ec",
        "thread_pool_size",
        "embedding_cache_type",
        "use_static_table",
        "fp8_quant",
        "fuse_embedding_table",
        "max_batch_size",
        "deployed_device_list",
        "dense_file",
        "network_file",
        "maxnum_des_feature_per_sample",
        "label_dim",
        "slot_num",
        "num_of_worker_buffer_in_pool",
        "num_of_refresher_buffer_in_pool",
        "use_context_stream",
        "enable_pagelock",
        "use_hctr_cache_implementation",
    ],
    refused: &[
        ("model_name", "it is Python's name; in JSON it is `model`"),
        ("max_batchsize", "it is Python's name; in JSON it is `max_batch_size`"),
        ("sparse_model_files", "it is Python's name; in JSON it is `sparse_files`"),
        ("dense_model_file", "it is Python's name; in JSON it is `dense_file`"),
        ("use_gpu_embedding_cache", "it is Python's name; in JSON it is `gpucache`"),
        ("cache_size_percentage", "it is Python's name; in JSON it is `gpucacheper`"),
        ("number_of_worker_buffers_in_pool", "it is Python's name; in JSON it is `num_of_worker_buffer_in_pool`"),
        ("number_of_refresh_buffers_in_pool", "it is Python's name; in JSON it is `num_of_refresher_buffer_in_pool`"),
        ("deployed_devices", "it is Python's name; in JSON it is `deployed_device_list`"),
        ("device_id", "it is Python's name; in JSON it is `deployed_device_list`"),
        ("i64_input_key", "it is Python's name; in JSON it is `supportlonglong`, beside `models`"),
        ("use_mixed_precision", "the dense model is an ONNX model, and its types are what it says; leave it out"),
        ("scaler", "it is for training; leave it out"),
        ("use_algorithm_search", "ONNX Runtime runs the dense model and finds its algorithms itself; leave it out"),
        ("use_cuda_graph", "it is an option of the dense model, not of its tables; leave it out"),
        ("non_trainable_params_file", "an ONNX model has these parameters in it; leave it out"),
        ("volatile_db", "all models share one; put it beside `models`"),
        ("persistent_db", "all models share one; put it beside `models`"),
        ("update_source", "rows are updated by calls of upsert and delete; leave it out"),
    ],
};

/// A model of the file.
pub(super) struct ModelFields {
    pub(super) tables: ModelTables,
    pub(super) hugectr: HugeCtrModel,
}

pub(super) fn read(models: &Field<'_>, folder: Option<&Path>) -> Result<Vec<ModelFields>> {
    let mut read = Vec::<ModelFields>::new();
    for field in models.list("models")? {
        let model = read_model(&field, folder)?;
        if let Some(before) = read.iter().position(|before| before.tables.name == model.tables.name) {
            let name = field.object(&KEYS)?.required("model", "the model's name")?;
            let message =
                format!("{:?} is the name of models[{before}] too; each model needs its own", model.tables.name);
            return Err(name.error(&message));
        }
        read.push(model);
    }
    Ok(read)
}

/// Reads one model.
pub(super) fn read_model(field: &Field<'_>, folder: Option<&Path>) -> Result<ModelFields> {
    let model = field.object(&KEYS)?;
    let name_field = model.required("model", "the model's name")?;
    let name = name_field.name()?;
    if name.contains('/') {
        return Err(name_field.expected("a name without /, which stands between a model and its table"));
    }
    read_one(&model, name, folder)
}

fn read_one(model: &Object<'_>, name: &str, folder: Option<&Path>) -> Result<ModelFields> {
    let devices = match model.get("deployed_device_list") {
        Some(devices) => {
            devices.list("GPUs")?.iter().map(|device| device.whole(0..=i32::MAX as u32)).collect::<Result<_>>()?
        }
        None => vec![0],
    };
    let path = |key| model.get(key).filter(|field| field.text() != Ok("")).map(|field| field.path(folder)).transpose();
    // The key beside `models` decides whether tables are fused. Here it could only make an exception.
    model.flag("fuse_embedding_table", false)?;
    refuse_other_caches(model)?;
    let cached = model.flag("gpucache", true)?;
    let (tables, max_keys_per_sample) = tables::read(model, folder)?;
    // Read in any case: errors are reported even if the cache is switched off.
    let cache = Some(cache(model, cached)?).filter(|_| cached);
    let hugectr = HugeCtrModel {
        max_batch: model.get("max_batch_size").map(|most| most.whole(1..=u64::MAX)).transpose()?,
        dense_file: path("dense_file")?,
        network_file: path("network_file")?,
        max_dense_features: model.whole("maxnum_des_feature_per_sample", 26, 0..=u64::MAX)?,
        labels: model.whole("label_dim", 1, 0..=u64::MAX)?,
        slots: model.whole("slot_num", 10, 0..=u64::MAX)?,
        max_keys_per_sample,
        gpu: HugeCtrGpuCache {
            worker_buffers: model.whole("num_of_worker_buffer_in_pool", 1, 0..=i32::MAX as u32)?,
            refresh_buffers: model.whole("num_of_refresher_buffer_in_pool", 1, 0..=i32::MAX as u32)?,
            context_stream: model.flag("use_context_stream", true)?,
            page_locked: model.flag("enable_pagelock", false)?,
            own_implementation: model.flag("use_hctr_cache_implementation", true)?,
        },
    };
    Ok(ModelFields { tables: ModelTables { name: name.to_owned(), tables, cache, devices }, hugectr })
}

fn refuse_other_caches(model: &Object<'_>) -> Result<()> {
    let dynamic =
        "there is one cache, which keeps what is used; say \"dynamic\", and `gpucacheper` 1 to hold every row";
    if let Some(kind) = model.get("embedding_cache_type") {
        const TYPES: [(&[&str], Option<&str>); 4] = [
            (&["dynamic"], None),
            (&["static"], Some("static")),
            (&["uvm"], Some("uvm")),
            (&["stochastic"], Some("stochastic")),
        ];
        if let Some(other) = kind.choice(&TYPES)? {
            return Err(kind.unsupported(&format!("{other:?} is not supported: {dynamic}")));
        }
    }
    let quantized =
        "rows of 8-bit floats are not kept; say false, and `row_type_per_table` \"i8\" or \"f16\" for small rows";
    let whole = "there is one cache, which keeps what is used; say false, and `gpucacheper` 1 to hold every row";
    for (key, reason) in [("use_static_table", whole), ("fp8_quant", quantized)] {
        if let Some(flag) = model.get(key)
            && flag.flag()?
        {
            return Err(flag.unsupported(&format!("true is not supported: {reason}")));
        }
    }
    Ok(())
}

fn cache(model: &Object<'_>, cached: bool) -> Result<CacheOptions> {
    let seconds = |key| model.real(key, 0.0, 0.0..=LONGEST).map(Duration::from_secs_f64);
    Ok(CacheOptions {
        size: cache_size(model, cached)?,
        hit_rate_threshold: model.real("hit_rate_threshold", 0.9, 0.0..=f64::MAX)?,
        refresh_delay: seconds("refresh_delay")?,
        refresh_interval: seconds("refresh_interval")?,
        refresh_share: model.real("cache_refresh_percentage_per_iteration", 0.0, 0.0..=1.0)?,
        fill_at_start: model.flag("init_ec", true)?,
        fetch_threads: model.get("thread_pool_size").map(|threads| threads.whole(1..=1024)).transpose()?,
    })
}

fn cache_size(model: &Object<'_>, cached: bool) -> Result<CacheSize> {
    let share = model.real("gpucacheper", 0.2, 0.0..=1.0)?;
    let rows = model.whole("cache_rows", 0, 1..=u64::MAX)?;
    let bytes = model.whole("cache_bytes", 0, 1..=u64::MAX)?;
    let mut said = ["gpucacheper", "cache_rows", "cache_bytes"].into_iter().filter_map(|key| model.get(key));
    if let (Some(first), Some(second)) = (said.next(), said.next()) {
        return Err(second.error(&format!("{} says how large the cache is too; keep one of them", first.place())));
    }
    if let Some(empty) = model.get("gpucacheper").filter(|_| cached && share == 0.0) {
        return Err(empty.error("0 leaves no room for any row; for no cache say \"gpucache\": false"));
    }
    Ok(match (rows, bytes) {
        (0, 0) => CacheSize::Share(share),
        (0, bytes) => CacheSize::Bytes(bytes),
        (rows, _) => CacheSize::Rows(rows),
    })
}
