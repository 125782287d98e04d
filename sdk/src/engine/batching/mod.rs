//! Batching: a bounded queue, worker threads that run batches of jobs, deadlines and cancellation.
//!
//! Nothing here knows what a job computes: a [`Runner`] does that. The [`Scheduler`] decides which jobs run together
//! and when. A [`Pending`] is a job that has not ended yet.

mod batch;
mod counters;
mod deadlines;
mod pending;
mod queue;
mod scheduler;

use std::collections::VecDeque;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use counters::Counters;
pub(super) use pending::{Pending, in_callback};
pub(super) use scheduler::{BatchLimits, Scheduler, Workers};

use crate::error::{Error, Result};
use crate::runtime::Cancel;

/// The work of one request.
pub(super) trait Job: Send + Sync + 'static {
    /// Jobs with the same key run one at a time, in order of arrival.
    type Key: Copy + Eq + Hash + Send;
    /// The result for the caller.
    type Response: Send;

    fn key(&self) -> Self::Key;
}

/// Runs batches of one kind of job.
pub(super) trait Runner: Send + Sync + 'static {
    type Job: Job;
    /// The buffers of an instance. They are reused by the next batch.
    type Workspace: Default + Send;
    /// What a job holds while it is in a batch. Dropping it releases everything.
    type Prepared;
    /// The output of a run for one job.
    type Output;

    /// Whether a job may run on its caller's thread when the queue is empty.
    fn can_run_on_caller(&self, job: &Self::Job) -> bool;

    /// Whether two jobs can be in one batch.
    fn can_share_batch(&self, one: &Self::Job, other: &Self::Job) -> bool;

    /// Reserves what a job needs to run. CAPACITY: not enough free memory now.
    fn prepare(&self, job: &Self::Job, workspace: &mut Self::Workspace) -> Result<Self::Prepared>;

    /// Whether a job fits into memory when no other job holds any.
    fn can_fit(&self, job: &Self::Job) -> bool;

    /// The rows of a job in a batch.
    fn rows(&self, job: &Self::Job, prepared: &Self::Prepared) -> u64;

    /// Empties the workspace for a new batch, of which this is the first job.
    fn clear(&self, workspace: &mut Self::Workspace, job: &Self::Job);

    /// Adds a job to the batch in the workspace. An error leaves the workspace unchanged.
    fn add(&self, workspace: &mut Self::Workspace, job: &Self::Job, prepared: &Self::Prepared) -> Result<()>;

    /// Releases what a job holds. The job will be prepared again.
    fn unprepare(&self, job: &Self::Job, prepared: Self::Prepared);

    /// Called for each job of a batch that is about to run.
    fn before_run(&self, job: &Self::Job, prepared: &Self::Prepared);

    /// Runs the batch in the workspace. Returns an output for each job, in order, and the run time of the model.
    fn run(
        &self,
        workspace: &mut Self::Workspace,
        batch: &[Member<Self>],
        cancel: Option<&Cancel>,
    ) -> Result<(Vec<Self::Output>, Duration)>
    where
        Self: Sized;

    /// Commits what was computed for a job, and builds its response.
    fn commit(
        &self,
        job: &Self::Job,
        prepared: Self::Prepared,
        output: Self::Output,
        timing: Timing,
    ) -> <Self::Job as Job>::Response;
}

/// A job in a batch.
pub(super) struct Member<R: Runner> {
    pub(super) pending: Arc<Pending<R::Job>>,
    pub(super) prepared: R::Prepared,
}

/// Times and batch size of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// From its arrival to the start of its batch.
    pub(super) queue_time: Duration,
    /// The run time of the model.
    pub(super) run_time: Duration,
    /// The number of other jobs in its batch.
    pub(super) batched_with: usize,
}

/// A job taken from the queue, with the number of runs that had ended at that time.
type Taken<J> = (Arc<Pending<J>>, u64);

/// Where the jobs of a batch come from.
pub(super) enum Start<J: Job> {
    /// The caller's own job, on its thread, then those in the queue.
    OnCaller(Taken<J>),
    /// A full batch. Its jobs were taken under the lock under which they were counted: two workers that see one full
    /// batch would each run a part of it.
    Claimed(VecDeque<Taken<J>>),
    /// Those in the queue.
    Queue,
    /// Those in the queue, and those that arrive during the coalescing window.
    Coalesce,
}

/// A job and its result.
type Outcome<J> = (Arc<Pending<J>>, Result<<J as Job>::Response>);

/// Turns a panic into an error, so that it fails only the job that it happened in.
pub(super) fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
}

/// What is left of the coalescing window of a job.
fn time_left(max_delay: Duration, arrived: Instant) -> Duration {
    max_delay.saturating_sub(arrived.elapsed())
}
