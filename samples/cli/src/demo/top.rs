//! Ten movies for one user, and what the user really did next.

use std::collections::HashSet;
use std::time::Duration;

use pagoda::engine::Engine;
use pagoda::{Error, Result};
use serde::Serialize;

use super::data::{Data, Moment, User};
use super::replay::{columns, request, timed};

/// How many are shown.
const SHOWN: usize = 10;

/// What one user would be recommended at one moment.
#[derive(Serialize)]
pub struct Top {
    pub user: u64,
    /// The moment, in seconds.
    pub time: i64,
    /// Movies that the user had rated by then.
    pub history: usize,
    /// The number of ranked movies: all that the user had not rated.
    pub ranked: usize,
    pub movies: Vec<Recommended>,
    /// The first request, which computes the history, and the same again, which finds it.
    pub first_ms: f64,
    pub again_ms: f64,
}

/// A movie in the list.
#[derive(Serialize)]
pub struct Recommended {
    pub movie: i64,
    pub title: String,
    pub will_rate: f32,
    pub rated_4_or_more: f32,
    /// The stars that the user gave it later, if any.
    pub stars: Option<i64>,
    /// How many seconds later that was.
    pub seconds_later: Option<i64>,
}

/// Ranks all movies that a user has not rated, in the middle of the user's history. The engine forgets the user
/// afterwards.
pub fn ten(data: &Data, engine: &Engine, user: Option<u64>) -> Result<Top> {
    let user = chosen(data, user)?;
    let half = user.movies.len() / 2;
    let later = user.moments.iter().find(|moment| moment.0 >= half);
    let moment = later.or(user.moments.last()).expect("a user of the test has a moment");
    let &Moment(known, _, time, _) = moment;
    let rated: HashSet<i64> = user.movies[..known].iter().copied().collect();
    let mut candidates: Vec<i64> = data.titles.keys().copied().filter(|movie| !rated.contains(movie)).collect();
    candidates.sort_unstable();
    let [liked, rates] = columns(engine)?;
    let (_, first) = timed(engine, &request(user, moment, None, &candidates))?;
    let (response, again) = timed(engine, &request(user, moment, Some(known), &candidates))?;
    engine.forget(&[user.user])?;
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by(|&a, &b| response.candidate(b)[rates].total_cmp(&response.candidate(a)[rates]));
    let recommended = |&at: &usize| {
        let event = user.movies[known..].iter().position(|&movie| movie == candidates[at]).map(|event| known + event);
        Recommended {
            movie: candidates[at],
            title: data.titles[&candidates[at]].clone(),
            will_rate: response.candidate(at)[rates],
            rated_4_or_more: response.candidate(at)[liked],
            stars: event.map(|event| user.ratings[event]),
            seconds_later: event.map(|event| user.times[event] - time),
        }
    };
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    Ok(Top {
        user: user.user,
        time,
        history: known,
        ranked: candidates.len(),
        movies: order.iter().take(SHOWN).map(recommended).collect(),
        first_ms: milliseconds(first),
        again_ms: milliseconds(again),
    })
}

fn chosen(data: &Data, user: Option<u64>) -> Result<&User> {
    let Some(wanted) = user else {
        let most = data.users.iter().max_by_key(|user| user.moments.len());
        return most.ok_or_else(|| Error::invalid("folder", "evaluation.jsonl has no user in it"));
    };
    data.users.iter().find(|user| user.user == wanted).ok_or_else(|| {
        let some: Vec<String> = data.users.iter().take(8).map(|user| user.user.to_string()).collect();
        let (count, some) = (data.users.len(), some.join(", "));
        Error::invalid("--user", format!("no user {wanted} in the test: there are {count}, such as {some}"))
    })
}
