//! What a server and its models are.

use pagoda::ValueInfo;
use pagoda_requests::rank::Features;
use serde::Serialize;

use super::{datatype, generate, rank};
use crate::models::{Kind, Served};

/// The version of a plain model, which has none of its own.
const ONLY: &str = "1";
/// The digits of a folder's hash that are its version here.
const SHOWN: usize = 12;

/// The version of a model. It is a number: clients of Triton take it for one.
pub fn version(served: &Served) -> String {
    let version = served.version();
    let number = version.get(..SHOWN).and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.map_or_else(|| ONLY.to_owned(), |number| number.to_string())
}

/// What the server is.
#[derive(Serialize)]
pub struct ServerInfo {
    /// Its name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// What it has beyond the protocol's core.
    pub extensions: [&'static str; 4],
}

/// What this server is.
pub const SERVER: ServerInfo = ServerInfo {
    name: "pagoda",
    version: env!("CARGO_PKG_VERSION"),
    extensions: ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
};

/// A tensor that a model takes or gives.
#[derive(Serialize)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its type, as the protocol names it.
    pub datatype: &'static str,
    /// Its sizes; -1: any.
    pub shape: Vec<i64>,
    /// Whether a request may leave it out.
    #[serde(skip)]
    pub optional: bool,
}

/// What a model is.
#[derive(Serialize)]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// Its only version.
    pub versions: [String; 1],
    /// What runs it.
    pub platform: &'static str,
    /// What it takes.
    pub inputs: Vec<TensorInfo>,
    /// What it gives.
    pub outputs: Vec<TensorInfo>,
}

/// What a model is.
pub fn model(served: &Served) -> ModelInfo {
    let (platform, inputs, outputs) = match &served.kind {
        Kind::Plain(model) => ("onnxruntime_onnx", values(model.inputs()), values(model.outputs())),
        Kind::Rank(engine) => {
            let folder = engine.folder();
            let inputs = rank::inputs(&Features::of(&folder)).into_iter();
            let tasks = folder.tasks.len() as i64;
            let mut outputs = vec![info(rank::SCORES, "FP32", &[-1, tasks])];
            outputs.extend(rank::ROWS.map(|name| info(name, "INT64", &[1])));
            let inputs = inputs.map(|(name, is_one)| {
                let optional = name != rank::USER && !name.starts_with(rank::CANDIDATES);
                TensorInfo { optional, ..info(&name, "INT64", &[if is_one { 1 } else { -1 }]) }
            });
            let inputs = inputs.collect();
            ("pagoda_rank", inputs, outputs)
        }
        Kind::Generate(_) => {
            // One of them.
            let inputs = [info(generate::INPUTS[0], "BYTES", &[1]), info(generate::INPUTS[1], "INT64", &[-1])];
            let inputs = inputs.into_iter().map(|input| TensorInfo { optional: true, ..input }).collect();
            let outputs = generate::OUTPUTS.map(|name| info(name, "BYTES", &[-1]));
            ("pagoda_generate", inputs, outputs.into())
        }
    };
    ModelInfo { name: served.name.clone(), versions: [version(served)], platform, inputs, outputs }
}

fn values(values: &[ValueInfo]) -> Vec<TensorInfo> {
    let of = |value: &ValueInfo| {
        let datatype = value.element_type().and_then(datatype::name).unwrap_or("");
        info(value.name(), datatype, value.dims().unwrap_or(&[-1]))
    };
    values.iter().map(of).collect()
}

fn info(name: &str, datatype: &'static str, shape: &[i64]) -> TensorInfo {
    TensorInfo { name: name.to_owned(), datatype, shape: shape.to_vec(), optional: false }
}

/// What a model is, in the words of Triton's configurations.
#[derive(Serialize)]
pub struct Config {
    name: String,
    platform: &'static str,
    /// Shapes have all dimensions.
    max_batch_size: u32,
    input: Vec<ConfigTensor>,
    output: Vec<ConfigTensor>,
    model_transaction_policy: TransactionPolicy,
}

#[derive(Serialize)]
struct ConfigTensor {
    name: String,
    data_type: String,
    dims: Vec<i64>,
    optional: bool,
}

#[derive(Serialize)]
struct TransactionPolicy {
    decoupled: bool,
}

/// What a model is, in the words of Triton's configurations.
pub fn config(served: &Served) -> Config {
    let ModelInfo { name, platform, inputs, outputs, .. } = model(served);
    let tensor = |info: TensorInfo| {
        let word = if info.datatype == "BYTES" { "STRING" } else { info.datatype };
        ConfigTensor { name: info.name, data_type: format!("TYPE_{word}"), dims: info.shape, optional: info.optional }
    };
    Config {
        name,
        platform,
        max_batch_size: 0,
        input: inputs.into_iter().map(tensor).collect(),
        output: outputs.into_iter().map(tensor).collect(),
        model_transaction_policy: TransactionPolicy { decoupled: is_decoupled(served) },
    }
}

/// Whether a request of a stream has several responses.
pub fn is_decoupled(served: &Served) -> bool {
    matches!(served.kind, Kind::Generate(_))
}
