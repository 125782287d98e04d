//! What `samples/movielens/prepare.py` wrote: the users of the test with their moments, titles, and training's results.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use pagoda::{Error, Result, Status};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Movies with this many stars or more count as liked.
pub const LIKED: i64 = 4;

/// Everything the demo reads beside the model.
pub struct Data {
    /// Who is asked about, and when.
    pub users: Vec<User>,
    /// Titles by the number of the movie.
    pub titles: HashMap<i64, String>,
    /// What the training framework found out.
    pub trained: Trained,
}

/// A user's ratings, in order of time, and the moments at which they are asked about.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    pub user: u64,
    pub movies: Vec<i64>,
    pub ratings: Vec<i64>,
    pub times: Vec<i64>,
    pub moments: Vec<Moment>,
}

/// A second in which a user rated something: how many events are known then, how many follow in this second, the
/// second, and movies that the user has not rated by then.
#[derive(Deserialize)]
pub struct Moment(pub usize, pub usize, pub i64, pub Vec<i64>);

/// trained.json.
#[derive(Deserialize)]
pub struct Trained {
    pub tasks: BTreeMap<String, TaskResult>,
    pub training: Training,
}

/// What the training framework found out about one task.
#[derive(Deserialize)]
pub struct TaskResult {
    pub auc: f64,
    pub popularity_auc: f64,
    pub positive: usize,
    pub negative: usize,
}

/// How the model was trained.
#[derive(Deserialize)]
pub struct Training {
    pub ratings: u64,
    pub users: u64,
    pub torch: String,
}

impl Data {
    /// Reads the files of the folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("evaluation.jsonl");
        let mut users = Vec::new();
        for (number, line) in text(&path)?.lines().enumerate() {
            let place = format!("{}, line {}", path.display(), number + 1);
            let user: User = parsed(line, &place)?;
            user.check().map_err(|wrong| damaged(&place, &wrong))?;
            users.push(user);
        }
        let (titles, trained) = (folder.join("movies.json"), folder.join("trained.json"));
        let titles = parsed(&text(&titles)?, &titles.display().to_string())?;
        let trained = parsed(&text(&trained)?, &trained.display().to_string())?;
        Ok(Self { users, titles, trained })
    }
}

impl User {
    fn check(&self) -> Result<(), String> {
        let events = self.movies.len();
        if self.ratings.len() != events || self.times.len() != events {
            return Err(format!("{events} movies, {} ratings, {} times", self.ratings.len(), self.times.len()));
        }
        for &Moment(known, rated, time, _) in &self.moments {
            if known + rated > events || rated == 0 {
                return Err(format!("a moment asks for events {known} to {} of {events}", known + rated));
            }
            // What a prediction may know is earlier than what it predicts, or the figures mean nothing.
            if self.times[..known].iter().any(|&earlier| earlier >= time) {
                return Err(format!("the moment {time} knows of an event that is not earlier"));
            }
        }
        Ok(())
    }
}

impl Moment {
    /// What is scored at this moment: the movies rated then, first, and the others.
    pub fn candidates(&self, user: &User) -> Vec<i64> {
        let &Self(known, rated, _, ref others) = self;
        [&user.movies[known..known + rated], others].concat()
    }
}

fn text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        let advice = "`make demo` makes it, out of MovieLens-100K and the weights in samples/movielens";
        Error::new(Status::NotFound, format!("{} can not be read ({error}): {advice}", path.display()))
    })
}

fn parsed<T: DeserializeOwned>(text: &str, place: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| damaged(place, &error.to_string()))
}

fn damaged(place: &str, wrong: &str) -> Error {
    let advice = "make it anew with samples/movielens/prepare.py";
    Error::new(Status::InvalidArgument, format!("{place}: {wrong}: {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(moment: &str) -> Result<(), String> {
        let text = format!(
            r#"{{"user": 1, "movies": [5, 6, 7], "ratings": [3, 4, 5], "times": [10, 20, 20], "moments": [{moment}]}}"#
        );
        serde_json::from_str::<User>(&text).unwrap().check()
    }

    #[test]
    fn moments_are_checked() {
        assert_eq!(user("[1, 2, 20, [9]]"), Ok(()));
        assert_eq!(user("[2, 1, 20, [9]]").unwrap_err(), "the moment 20 knows of an event that is not earlier");
        assert_eq!(user("[2, 2, 30, []]").unwrap_err(), "a moment asks for events 2 to 4 of 3");
        assert_eq!(user("[3, 0, 30, []]").unwrap_err(), "a moment asks for events 3 to 3 of 3");
    }

    #[test]
    fn a_missing_file_says_what_makes_it() {
        let error = Data::read(Path::new("no/such/folder")).err().unwrap();
        assert!(error.message().contains("evaluation.jsonl can not be read") && error.message().contains("make demo"));
    }
}
