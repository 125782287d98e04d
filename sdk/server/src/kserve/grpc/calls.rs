//! Calls of one message that are answered by one.

use std::sync::Arc;

use axum::extract::{Request, State as Shared};
use axum::response::Response;

use super::convert;
use super::messages::{
    InferStatistics, ModelConfig, ModelConfigRequest, ModelConfigResponse, ModelIndex, ModelInferRequest, ModelInput,
    ModelMetadataRequest, ModelMetadataResponse, ModelOutput, ModelReadyRequest, ModelReadyResponse, ModelStatistics,
    ModelStatisticsRequest, ModelStatisticsResponse, ModelTransactionPolicy, RepositoryIndexRequest,
    RepositoryIndexResponse, RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse, StatisticDuration, TensorMetadata,
};
use crate::failure::Failure;
use crate::gate::caller_of;
use crate::grpc;
use crate::kserve::infer::{find, infer as run};
use crate::kserve::metadata::{self, TensorInfo};
use crate::kserve::{datatype, repository, statistics};
use crate::models::Listed;
use crate::state::State;
use crate::statistics::Measured;

/// That the server answers.
pub async fn server_live(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let _: ServerLiveRequest = grpc::read(request, &state.limits).await?;
    grpc::of(&ServerLiveResponse { live: true })
}

/// Whether it takes requests.
pub async fn server_ready(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let _: ServerReadyRequest = grpc::read(request, &state.limits).await?;
    grpc::of(&ServerReadyResponse { ready: !state.is_ending() })
}

/// Whether a model takes requests. One that is not served does not.
pub async fn model_ready(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let asked: ModelReadyRequest = grpc::read(request, &state.limits).await?;
    let is_served = find(&state, &asked.name, version(&asked.version)).is_ok();
    grpc::of(&ModelReadyResponse { ready: is_served && !state.is_ending() })
}

/// What the server is.
pub async fn server_metadata(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let _: ServerMetadataRequest = grpc::read(request, &state.limits).await?;
    let about = metadata::SERVER;
    grpc::of(&ServerMetadataResponse {
        name: about.name.into(),
        version: about.version.into(),
        extensions: about.extensions.map(str::to_owned).into(),
    })
}

/// What a model is.
pub async fn model_metadata(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let asked: ModelMetadataRequest = grpc::read(request, &state.limits).await?;
    let about = metadata::model(&*find(&state, &asked.name, version(&asked.version))?);
    let tensor =
        |info: TensorInfo| TensorMetadata { name: info.name, datatype: info.datatype.into(), shape: info.shape };
    grpc::of(&ModelMetadataResponse {
        name: about.name,
        versions: about.versions.into(),
        platform: about.platform.into(),
        inputs: about.inputs.into_iter().map(tensor).collect(),
        outputs: about.outputs.into_iter().map(tensor).collect(),
    })
}

/// What a model is, in the words of a configuration.
pub async fn model_config(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let asked: ModelConfigRequest = grpc::read(request, &state.limits).await?;
    let served = find(&state, &asked.name, version(&asked.version))?;
    let about = metadata::model(&served);
    let input = |info: TensorInfo| ModelInput {
        name: info.name,
        data_type: datatype::number(info.datatype),
        dims: info.shape,
        optional: info.optional,
    };
    let output = |info: TensorInfo| ModelOutput {
        name: info.name,
        data_type: datatype::number(info.datatype),
        dims: info.shape,
    };
    let config = ModelConfig {
        name: about.name,
        platform: about.platform.into(),
        // Shapes have all dimensions.
        max_batch_size: 0,
        input: about.inputs.into_iter().map(input).collect(),
        output: about.outputs.into_iter().map(output).collect(),
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled: metadata::is_decoupled(&served) }),
    };
    grpc::of(&ModelConfigResponse { config: Some(config) })
}

/// Runs a model.
pub async fn infer(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let message: ModelInferRequest = grpc::read(request, &state.limits).await?;
    state.models.wait(&message.model_name).await;
    let served = find(&state, &message.model_name, version(&message.model_version))?;
    let asked = convert::request(message)?;
    let id = asked.id.clone();
    let outputs = run(&state, &served, asked, caller).await?;
    let (response, raw) = convert::response(&served.name, &metadata::version(&served), &id, outputs)?;
    Ok(grpc::parts(grpc::encode(&response, &convert::tail(raw))?))
}

/// What the requests of a model have cost; without a name, those of all.
pub async fn model_statistics(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let asked: ModelStatisticsRequest = grpc::read(request, &state.limits).await?;
    let found = statistics::of(&state, version(&asked.name), version(&asked.version))?;
    let duration = |measured: Measured| Some(StatisticDuration { count: measured.count, ns: measured.ns });
    let model_stats = found.model_stats.into_iter().map(|model| {
        let stats = model.inference_stats;
        ModelStatistics {
            name: model.name,
            version: model.version,
            last_inference: model.last_inference,
            inference_count: model.inference_count,
            execution_count: model.execution_count,
            inference_stats: Some(InferStatistics {
                success: duration(stats.success),
                fail: duration(stats.fail),
                queue: duration(stats.queue),
                compute_input: duration(stats.compute_input),
                compute_infer: duration(stats.compute_infer),
                compute_output: duration(stats.compute_output),
                cache_hit: duration(stats.cache_hit),
                cache_miss: duration(stats.cache_miss),
            }),
        }
    });
    grpc::of(&ModelStatisticsResponse { model_stats: model_stats.collect() })
}

/// All models of the configuration.
pub async fn repository_index(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let asked: RepositoryIndexRequest = grpc::read(request, &state.limits).await?;
    let about = |listed: Listed| match listed.served {
        Some(served) => ModelIndex {
            name: listed.name,
            version: metadata::version(&served),
            state: "READY".into(),
            reason: String::new(),
        },
        None => ModelIndex {
            name: listed.name,
            version: String::new(),
            state: "UNAVAILABLE".into(),
            reason: "unloaded".into(),
        },
    };
    let models = state.models.list().into_iter().filter(|listed| !asked.ready || listed.served.is_some());
    grpc::of(&RepositoryIndexResponse { models: models.map(about).collect() })
}

/// Opens a model anew.
pub async fn load(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    repository::allowed(&state)?;
    let asked: RepositoryModelLoadRequest = grpc::read(request, &state.limits).await?;
    repository::check_parameters(asked.parameters.keys().map(String::as_str))?;
    repository::load_model(&state, &asked.model_name).await?;
    grpc::of(&RepositoryModelLoadResponse {})
}

/// Takes no new requests for a model.
pub async fn unload(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    repository::allowed(&state)?;
    let asked: RepositoryModelUnloadRequest = grpc::read(request, &state.limits).await?;
    repository::check_parameters(asked.parameters.keys().map(String::as_str))?;
    repository::unload_model(&state, &asked.model_name).await?;
    grpc::of(&RepositoryModelUnloadResponse {})
}

/// None is asked for by an empty text.
pub fn version(asked: &str) -> Option<&str> {
    Some(asked).filter(|version| !version.is_empty())
}
