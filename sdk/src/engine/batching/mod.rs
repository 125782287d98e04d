//! Batching: a bounded queue, worker threads that put jobs together and run them, deadlines and cancellation.
//!
//! Nothing here knows what a job computes: that is what a [`Runner`] is for. The [`Scheduler`] decides which jobs run
//! together and when; a [`Pending`] is one job on its way to its response.

mod counters;
mod deadlines;
mod gather;
mod pending;
mod queue;
mod scheduler;

use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use counters::Counters;
pub(super) use pending::{Pending, in_callback};
pub(super) use scheduler::{BatchLimits, Scheduler, Workers};

use crate::error::{Error, Result};
use crate::runtime::Cancel;

/// What is to be done for one caller.
pub(super) trait Job: Send + Sync + 'static {
    /// Jobs of one key run one after the other, in order of arrival.
    type Key: Copy + Eq + Hash + Send;
    /// What the caller gets.
    type Response: Send;

    fn key(&self) -> Self::Key;
}

/// Runs batches of one kind of job.
pub(super) trait Runner: Send + Sync + 'static {
    type Job: Job;
    /// The buffers of an instance, kept from one batch to the next.
    type Workspace: Default + Send;
    /// What a job holds while it is in a batch. Dropping it lets go of everything.
    type Prepared;
    /// What a run gives for one job.
    type Output;

    /// Whether a job may run on its caller's thread when no other is in the way.
    fn runs_on_caller(&self, job: &Self::Job) -> bool;

    /// Whether two jobs can be in one batch.
    fn run_together(&self, one: &Self::Job, other: &Self::Job) -> bool;

    /// Reserves what a job needs to run. CAPACITY: there is no room now.
    fn prepare(&self, job: &Self::Job, workspace: &mut Self::Workspace) -> Result<Self::Prepared>;

    /// Whether there is room for a job once others have ended.
    fn fits(&self, job: &Self::Job) -> bool;

    /// How much of a batch a job takes, in rows.
    fn rows(&self, job: &Self::Job, prepared: &Self::Prepared) -> u64;

    /// Empties the workspace, for a batch that this job is the first of.
    fn clear(&self, workspace: &mut Self::Workspace, job: &Self::Job);

    /// Adds a job to the batch in the workspace. After an error the workspace is as it was.
    fn add(&self, workspace: &mut Self::Workspace, job: &Self::Job, prepared: &Self::Prepared) -> Result<()>;

    /// Lets go of a job that is going to be prepared again.
    fn put_back(&self, job: &Self::Job, prepared: Self::Prepared);

    /// A job is in a batch that is about to run.
    fn begin(&self, job: &Self::Job, prepared: &Self::Prepared);

    /// Runs the batch in the workspace. Gives an output for each job, in order, and how long the model took.
    fn run(
        &self,
        workspace: &mut Self::Workspace,
        batch: &[Member<Self>],
        cancel: Option<&Cancel>,
    ) -> Result<(Vec<Self::Output>, Duration)>
    where
        Self: Sized;

    /// Keeps what was computed for a job, and makes its response.
    fn settle(
        &self,
        job: &Self::Job,
        prepared: Self::Prepared,
        output: Self::Output,
        timing: Timing,
    ) -> <Self::Job as Job>::Response;
}

/// A job of a batch.
pub(super) struct Member<R: Runner> {
    pub(super) pending: Arc<Pending<R::Job>>,
    pub(super) prepared: R::Prepared,
}

/// How a job ran.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// How long it waited.
    pub(super) queue_time: Duration,
    /// How long the model took.
    pub(super) run_time: Duration,
    /// How many others were in its batch.
    pub(super) batched_with: usize,
}

/// A job, with the number of runs that had ended when it was taken.
type Taken<J> = (Arc<Pending<J>>, u64);

/// What came of a job.
type Outcome<J> = (Arc<Pending<J>>, Result<<J as Job>::Response>);

/// A panic is an error of the job that it happened in, and of no other.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
}

/// How long a job that `arrived` then still waits for others.
fn time_left(max_delay: Duration, arrived: Instant) -> Duration {
    max_delay.saturating_sub(arrived.elapsed())
}
