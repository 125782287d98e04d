//! Replays the histories of real users through an engine with a cache and through one without.

use std::time::{Duration, Instant};

use pagoda::engine::{Columns, Engine, Events, RankRequest, RankResponse};
use pagoda::{Error, Result, Status};

use super::data::{Data, LIKED, Moment, User};
use crate::progress::Progress;
use crate::words;

/// The tasks that the evaluation has labels for.
pub const TASKS: [&str; 2] = ["rated 4 or more", "will rate"];

/// Labels and scores of one task.
pub type Samples = Vec<(bool, f32)>;

/// The results of a replay.
#[derive(Default)]
pub struct Replay {
    /// The requests in order of time.
    pub requests: Vec<Visit>,
    /// Of the engine with the cache, by task.
    pub cached: [Samples; 2],
    /// Of the engine without.
    pub plain: [Samples; 2],
    /// The largest difference between the scores of the two.
    pub apart: f32,
}

/// One request, as both engines answered it.
pub struct Visit {
    /// Events in the history.
    pub history: usize,
    /// How many of them earlier requests had sent to the engine with the cache.
    pub told: Option<usize>,
    pub cached: Answered,
    pub plain: Answered,
}

/// How one engine answered.
pub struct Answered {
    pub latency: Duration,
    pub cached_rows: u64,
    pub computed_rows: u64,
}

/// The column of each task in the scores.
pub fn columns(engine: &Engine) -> Result<[usize; 2]> {
    let folder = engine.folder();
    let find = |name: &str| folder.tasks.iter().position(|task| task.name == name);
    match TASKS.map(find) {
        [Some(liked), Some(rates)] => Ok([liked, rates]),
        _ => {
            let [liked, rates] = TASKS;
            let message = format!("the model has no tasks `{liked}` and `{rates}`: export it with samples/movielens");
            Err(Error::new(Status::Model, message))
        }
    }
}

/// Sends a request to both engines at every moment of every user, in order of time. The engines alternate, so that both
/// see the same load of the machine. The engine with the cache gets the new events, the other one the whole history.
pub fn replay(data: &Data, cached: &Engine, plain: &Engine, progress: &Progress) -> Result<Replay> {
    let columns = columns(cached)?;
    let mut moments: Vec<(&User, usize)> =
        data.users.iter().flat_map(|user| (0..user.moments.len()).map(move |at| (user, at))).collect();
    moments.sort_by_key(|(user, at)| (user.moments[*at].2, user.user));
    let mut replay = Replay::default();
    for (done, &(user, at)) in moments.iter().enumerate() {
        let moment = &user.moments[at];
        let &Moment(known, rated, ..) = moment;
        let told = at.checked_sub(1).map(|before| user.moments[before].0);
        let candidates = moment.candidates(user);
        let (with, with_took) = timed(cached, &request(user, moment, told, &candidates))?;
        let (without, without_took) = timed(plain, &request(user, moment, None, &candidates))?;
        for candidate in 0..candidates.len() {
            let (a, b) = (with.candidate(candidate), without.candidate(candidate));
            replay.apart = a.iter().zip(b).fold(replay.apart, |most, (a, b)| most.max((a - b).abs()));
            let happened = candidate < rated;
            if happened {
                let liked = user.ratings[known + candidate] >= LIKED;
                replay.cached[0].push((liked, a[columns[0]]));
                replay.plain[0].push((liked, b[columns[0]]));
            }
            replay.cached[1].push((happened, a[columns[1]]));
            replay.plain[1].push((happened, b[columns[1]]));
        }
        replay.requests.push(Visit {
            history: known,
            told,
            cached: Answered::new(&with, with_took),
            plain: Answered::new(&without, without_took),
        });
        if done % 64 == 0 {
            let (done, all) = (words::count(done as u64), words::count(moments.len() as u64));
            progress.doing(format!("replaying request {done} of {all}"));
        }
    }
    Ok(replay)
}

impl Answered {
    fn new(response: &RankResponse, latency: Duration) -> Self {
        Self { latency, cached_rows: response.cached_rows, computed_rows: response.computed_rows }
    }
}

/// The request of a moment, with the events that were not sent yet, or with all.
pub fn request(user: &User, moment: &Moment, told: Option<usize>, candidates: &[i64]) -> RankRequest {
    let &Moment(known, _, time, _) = moment;
    let new = told.unwrap_or(0)..known;
    let keys = Columns::new().with("movie", &user.movies[new.clone()]).with("rating", &user.ratings[new.clone()]);
    RankRequest {
        user: user.user,
        start: told.map(|events| events as u64),
        events: Events { keys, times: user.times[new].to_vec() },
        candidates: Columns::new().with("movie", candidates),
        time: Some(time),
        ..RankRequest::default()
    }
}

/// The response and its latency for the caller.
pub fn timed(engine: &Engine, request: &RankRequest) -> Result<(RankResponse, Duration)> {
    let start = Instant::now();
    let response = engine.rank(request)?;
    Ok((response, start.elapsed()))
}
