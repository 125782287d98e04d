//! How rank requests run: what the scheduler asks of the ranking engine.

use std::sync::Arc;
use std::time::Duration;

use super::super::batching::{Job, Member, Runner, Timing, guarded};
use super::event_log::{EventLog, Sent};
use super::history::{self, PreparedHistory};
use super::open_model::OpenModel;
use super::options::EngineOptions;
use super::prepared_request::PreparedRequest;
use super::request::RankResponse;
use super::stats::RowCounters;
use super::workspace::{self, Workspace};
use crate::error::{Error, Result, Status};
use crate::folder::ModelFolder;
use crate::runtime::Cancel;
use crate::store::{Store, Ticket};
use crate::sync::RwLock;

/// What the threads of a ranking engine share.
pub(super) struct Ranker {
    pub(super) options: EngineOptions,
    pub(super) store: Option<Arc<dyn Store>>,
    /// The model that is served now.
    pub(super) model: RwLock<Arc<OpenModel>>,
    pub(super) events: EventLog,
    pub(super) rows: RowCounters,
}

impl Ranker {
    pub(super) fn new(options: EngineOptions, store: Option<Arc<dyn Store>>, model: Arc<OpenModel>) -> Self {
        Self {
            events: EventLog::new(options.remember_bytes, &model.layout.signature),
            options,
            store,
            model: RwLock::new(model),
            rows: RowCounters::new(),
        }
    }

    /// The model that is served now.
    pub(super) fn current(&self) -> Arc<OpenModel> {
        Arc::clone(&self.model.read())
    }

    /// Forgets a user whose keys and values could not be kept: what is known is not what the caller has told by now.
    fn forget_after(&self, model: &OpenModel, user: u64, error: &Error) {
        log::warn!("user {user}: what was computed is not kept, and the user is forgotten: {error}");
        let mut tickets = Vec::new();
        let forgotten = guarded(|| model.forget(user, &mut tickets));
        if let Err(error) = forgotten.and(Ticket::wait_all(&tickets)) {
            log::error!("user {user} could not be forgotten: {error}");
        }
        self.events.forget(user);
    }
}

/// Requests of one user run one after the other.
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

    fn runs_on_caller(&self, job: &PreparedRequest) -> bool {
        // A caller's thread would have to capture graphs of its own.
        job.serving.graphs.is_none()
    }

    fn run_together(&self, one: &PreparedRequest, other: &PreparedRequest) -> bool {
        Arc::ptr_eq(&one.serving, &other.serving)
    }

    fn prepare(&self, job: &PreparedRequest, workspace: &mut Workspace) -> Result<PreparedHistory> {
        history::prepare(job, &self.events, &mut workspace.items)
    }

    fn fits(&self, job: &PreparedRequest) -> bool {
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
        guarded(|| workspace.add(job, prepared)).inspect_err(|_| workspace.truncate(&before))
    }

    fn put_back(&self, job: &PreparedRequest, prepared: PreparedHistory) {
        prepared.put_back(job);
    }

    fn begin(&self, job: &PreparedRequest, prepared: &PreparedHistory) {
        prepared.count(job);
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
        Ok((batch.iter().map(split).collect(), ran.took))
    }

    fn settle(
        &self,
        job: &PreparedRequest,
        prepared: PreparedHistory,
        scores: Vec<f32>,
        Timing { queue_time, run_time, batched_with }: Timing,
    ) -> RankResponse {
        let model = &job.serving;
        let (cached, computed) = (prepared.cached, job.rows() - prepared.cached);
        match guarded(|| prepared.commit()) {
            Ok(()) => self.events.note(&Sent::new(job), &model.layout.signature),
            // The scores are right all the same.
            Err(error) => self.forget_after(model, job.user, &error),
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
pub(super) fn open(
    folder: ModelFolder,
    options: &EngineOptions,
    store: Option<&Arc<dyn Store>>,
) -> Result<Arc<OpenModel>> {
    let mut model = OpenModel::open(folder, options, store)?;
    // A graph is captured for the thread that runs it, and this one runs no batches.
    let graphs = model.graphs.take();
    let mut model = Arc::new(model);
    warm_up(&model)?;
    Arc::get_mut(&mut model).expect("the warm-up is over").graphs = graphs;
    Ok(model)
}

/// Scores one candidate without keys: finds out what only a run does, and has ONNX Runtime make ready.
fn warm_up(model: &Arc<OpenModel>) -> Result<()> {
    let layout = &model.layout;
    let none = layout.no_key;
    let request = PreparedRequest {
        serving: Arc::clone(model),
        // Nothing of it is kept.
        user: u64::MAX,
        start: 0,
        events: Vec::new(),
        known_events: true,
        total: 0,
        user_keys: Some(vec![none; layout.of_user.len()]),
        candidates: vec![none; layout.of_candidate.len()],
        num_candidates: 1,
        time: 0,
        is_onloaded: false.into(),
    };
    let mut workspace = Workspace::default();
    let prepared = history::prepare(&request, &EventLog::new(0, &[]), &mut workspace.items)?;
    workspace.clear(layout.features.len());
    let ran = workspace.add(&request, &prepared).and_then(|()| workspace::run(&mut workspace, model, None).map(drop));
    ran.map_err(|error| {
        let message = format!("the model can not be run: {error}");
        Error::new(if error.status() == Status::Runtime { Status::Model } else { error.status() }, message)
    })
}
