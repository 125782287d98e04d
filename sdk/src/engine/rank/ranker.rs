//! The [`Runner`] of the ranking engine: how the scheduler prepares, runs and commits rank requests.

use std::sync::Arc;
use std::time::Duration;

use super::super::batching::{Job, Member, Runner, Timing, catch_panic};
use super::event_log::{EventLog, SentEvents};
use super::history::{self, PreparedHistory};
use super::open_model::OpenModel;
use super::options::EngineOptions;
use super::prepared_request::PreparedRequest;
use super::request::RankResponse;
use super::served_model::ServedModel;
use super::stats::RowCounters;
use super::workspace::{self, Workspace};
use crate::error::{Error, Result, Status};
use crate::folder::ModelFolder;
use crate::runtime::Cancel;
use crate::store::{Store, Ticket};
use crate::sync::RwLock;

/// The state that the threads of a ranking engine share.
pub(super) struct Ranker {
    pub(super) options: EngineOptions,
    pub(super) store: Option<Arc<dyn Store>>,
    /// The model that is served now.
    pub(super) model: RwLock<Arc<ServedModel>>,
    pub(super) events: EventLog,
    pub(super) rows: RowCounters,
}

impl Ranker {
    pub(super) fn new(options: EngineOptions, store: Option<Arc<dyn Store>>, model: Arc<ServedModel>) -> Self {
        Self {
            events: EventLog::new(options.remember_bytes, &model.layout.signature),
            options,
            store,
            model: RwLock::new(model),
            rows: RowCounters::new(),
        }
    }

    /// The model that is served now.
    pub(super) fn current(&self) -> Arc<ServedModel> {
        Arc::clone(&self.model.read())
    }

    /// Forgets a user after a failed commit: the cached history may lack events that the caller has sent.
    fn forget_after_failed_commit(&self, model: &OpenModel, user: u64, error: &Error) {
        log::warn!(
            "user {user}: the computed keys and values could not be committed, and the user is forgotten: {error}"
        );
        let mut tickets = Vec::new();
        let forgotten = catch_panic(|| model.forget(user, &mut tickets));
        if let Err(error) = forgotten.and(Ticket::wait_all(&tickets)) {
            log::error!("user {user} could not be forgotten: {error}");
        }
        self.events.forget(user);
    }
}

/// Requests of one user run one at a time.
impl Job for PreparedRequest {
    type Key = u64;
    type Response = RankResponse;

    fn key(&self) -> u64 {
        self.user
    }
}

impl Runner for Ranker {
    type Job = PreparedRequest;
    type Workspace = Workspace;
    type Prepared = PreparedHistory;
    type Output = Vec<f32>;

    fn can_run_on_caller(&self, job: &PreparedRequest) -> bool {
        // CUDA graphs are captured per thread: a caller's thread would have to capture its own.
        job.serving.graphs.is_none()
    }

    fn can_share_batch(&self, one: &PreparedRequest, other: &PreparedRequest) -> bool {
        Arc::ptr_eq(&one.serving, &other.serving)
    }

    fn prepare(&self, job: &PreparedRequest, workspace: &mut Workspace) -> Result<PreparedHistory> {
        history::prepare(job, &self.events, &mut workspace.fingerprints)
    }

    fn can_fit(&self, job: &PreparedRequest) -> bool {
        job.serving.fits(job.rows())
    }

    fn rows(&self, job: &PreparedRequest, prepared: &PreparedHistory) -> u64 {
        prepared.rows(job)
    }

    fn clear(&self, workspace: &mut Workspace, job: &PreparedRequest) {
        workspace.clear(job.serving.layout.features.len());
    }

    fn add(&self, workspace: &mut Workspace, job: &PreparedRequest, prepared: &PreparedHistory) -> Result<()> {
        let before = workspace.sizes();
        catch_panic(|| workspace.add(job, prepared)).inspect_err(|_| workspace.truncate(&before))
    }

    fn unprepare(&self, job: &PreparedRequest, prepared: PreparedHistory) {
        prepared.unprepare(job);
    }

    fn before_run(&self, job: &PreparedRequest, prepared: &PreparedHistory) {
        prepared.count_hits(job);
    }

    fn run(
        &self,
        workspace: &mut Workspace,
        batch: &[Member<Self>],
        cancel: Option<&Cancel>,
    ) -> Result<(Vec<Vec<f32>>, Duration)> {
        let model = &batch[0].pending.job.serving;
        let ran = workspace::run(workspace, model, cancel)?;
        let (mut rest, tasks) = (ran.scores, model.folder.tasks.len());
        let split = |member: &Member<Self>| {
            let (own, after) = rest.split_at(member.pending.job.num_candidates * tasks);
            rest = after;
            own.to_vec()
        };
        Ok((batch.iter().map(split).collect(), ran.run_time))
    }

    fn commit(
        &self,
        job: &PreparedRequest,
        prepared: PreparedHistory,
        scores: Vec<f32>,
        Timing { queue_time, run_time, batched_with }: Timing,
    ) -> RankResponse {
        let model = &job.serving;
        let (cached, computed) = (prepared.cached, job.rows() - prepared.cached);
        match catch_panic(|| prepared.commit()) {
            Ok(()) => self.events.record(&SentEvents::new(job), &model.layout.signature),
            // The scores are still right.
            Err(error) => self.forget_after_failed_commit(model, job.user, &error),
        }
        self.rows.add(cached, computed);
        RankResponse {
            scores,
            tasks: model.folder.tasks.len(),
            version: Arc::clone(&model.version),
            cached_rows: cached,
            computed_rows: computed,
            batched_with,
            queue_time,
            run_time,
        }
    }
}

/// Opens a folder and runs its model once.
pub(super) fn open_and_warm_up(
    folder: ModelFolder,
    options: &EngineOptions,
    store: Option<&Arc<dyn Store>>,
) -> Result<Arc<ServedModel>> {
    let mut model = OpenModel::open(folder, options, store)?;
    // CUDA graphs are captured per thread, and this thread runs no batches.
    let graphs = model.graphs.take();
    let mut model = Arc::new(ServedModel::new(model));
    warm_up(&model)?;
    Arc::get_mut(&mut model).expect("the warm-up is over").get_mut().graphs = graphs;
    Ok(model)
}

/// Scores one candidate without keys. Finds errors that only a run shows, and lets ONNX Runtime initialise.
fn warm_up(model: &Arc<ServedModel>) -> Result<()> {
    let layout = &model.layout;
    let none = layout.no_key;
    let request = PreparedRequest {
        serving: Arc::clone(model),
        // Nothing is committed for this user.
        user: u64::MAX,
        start: 0,
        events: Vec::new(),
        known_events: true,
        total: 0,
        user_keys: Some(vec![none; layout.user_features.len()]),
        candidates: vec![none; layout.candidate_features.len()],
        num_candidates: 1,
        time: 0,
        was_onloaded: false.into(),
    };
    let mut workspace = Workspace::default();
    let prepared = history::prepare(&request, &EventLog::new(0, &[]), &mut workspace.fingerprints)?;
    workspace.clear(layout.features.len());
    let ran = workspace.add(&request, &prepared).and_then(|()| workspace::run(&mut workspace, model, None).map(drop));
    ran.map_err(|error| {
        let message = format!("the model can not be run: {error}");
        Error::new(if error.status() == Status::Runtime { Status::Model } else { error.status() }, message)
    })
}
