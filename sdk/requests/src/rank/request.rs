//! A request as a line of JSON. It is checked against the features of the model here, so that errors refer to the text.

use pagoda::engine::{Events, SourceOf};
use pagoda::json::Json;
use pagoda::{Error, ModelFolder, RankRequest, Result};

use super::columns::{Columns, columns, complete, from_rows, numbers, same_length};
use crate::fields::{object, once, whole};
use crate::words::did_you_mean;

const FIELDS: [&str; 6] = ["user", "user_keys", "events", "start", "candidates", "time"];
/// The column of an event that is not a feature.
const TIME: &str = "time";

/// The features of a model, by source.
#[derive(Clone, Debug, Default)]
pub struct Features {
    /// Of the user.
    pub user: Vec<String>,
    /// Of an event.
    pub event: Vec<String>,
    /// Of a candidate.
    pub candidate: Vec<String>,
    /// Whether events have times.
    pub timed: bool,
}

impl Features {
    /// Of a model.
    pub fn of(folder: &ModelFolder) -> Self {
        let of = |sources: &[SourceOf]| {
            let names = folder.features.iter().filter(|feature| sources.contains(&feature.source));
            names.map(|feature| feature.name.clone()).collect()
        };
        Self {
            user: of(&[SourceOf::User]),
            event: of(&[SourceOf::Item, SourceOf::Action]),
            candidate: of(&[SourceOf::Item]),
            timed: folder.times.is_some(),
        }
    }
}

/// The request of a line.
#[derive(Debug, Default, PartialEq)]
pub struct Line {
    /// Whose history it is.
    pub user: u64,
    /// The key of each user feature.
    pub user_keys: Vec<(String, i64)>,
    /// The keys of the events.
    pub events: Columns,
    /// The times of the events, if there are any.
    pub times: Option<Vec<i64>>,
    /// The position of the first of `events` in the history; without it they are the whole history.
    pub start: Option<u64>,
    /// The keys of the candidates.
    pub candidates: Columns,
    /// The time of the request.
    pub time: Option<i64>,
}

impl Line {
    /// Reads a line.
    pub fn parse(text: &str, known: &Features) -> Result<Self> {
        Self::read(&object(text, r#"{"user": 7, "events": {…}, "candidates": {…}}"#)?, known)
    }

    /// Reads the members of an object.
    pub fn read(members: &[(String, Json)], known: &Features) -> Result<Self> {
        let (mut line, mut user) = (Self::default(), None);
        let mut seen: Vec<&str> = Vec::new();
        for (name, value) in members {
            once(&mut seen, name, name)?;
            match name.as_str() {
                "user" => user = Some(whole(name, value)?),
                "user_keys" => line.user_keys = keys_of_user(value, &known.user)?,
                "events" => (line.events, line.times) = events(value, known)?,
                "start" => line.start = Some(whole(name, value)?),
                "candidates" => line.candidates = candidates(value, &known.candidate)?,
                "time" => line.time = Some(whole(name, value)?),
                _ => return Err(Error::invalid(name, format!("no such field{}", did_you_mean(name, &FIELDS)))),
            }
        }
        line.user = user.ok_or_else(|| Error::invalid("user", "missing: whose history is it? Give a whole number"))?;
        // With `start` above 0 they are unchanged.
        let begins = line.start.is_none_or(|start| start == 0);
        if let (true, Some(feature), false) = (begins, known.user.first(), seen.contains(&"user_keys")) {
            return Err(Error::invalid("user_keys", format!("missing: the model has `{feature}` of the user")));
        }
        if !seen.contains(&"candidates") {
            return Err(Error::invalid("candidates", "missing: what is to be ranked?"));
        }
        if line.events.is_empty() {
            line.events = known.event.iter().map(|name| (name.clone(), Vec::new())).collect();
        }
        Ok(line)
    }

    /// The request for the engine.
    pub fn request(&self) -> RankRequest {
        let columns = |from: &Columns| {
            let none = pagoda::engine::Columns::new();
            from.iter().fold(none, |columns, (name, keys)| columns.with(name.as_str(), keys.as_slice()))
        };
        RankRequest {
            user: self.user,
            start: self.start,
            events: Events { keys: columns(&self.events), times: self.times.clone().unwrap_or_default() },
            user_keys: self.user_keys.clone(),
            candidates: columns(&self.candidates),
            time: self.time,
            ..RankRequest::default()
        }
    }

    /// The number of events.
    pub fn event_count(&self) -> usize {
        self.events.first().map_or(0, |(_, keys)| keys.len())
    }
}

fn keys_of_user(value: &Json, known: &[String]) -> Result<Vec<(String, i64)>> {
    let keys = columns("user_keys", value, known, |path, value| whole(path, value))?;
    complete("user_keys", &keys, known)?;
    Ok(keys)
}

fn events(value: &Json, features: &Features) -> Result<(Columns, Option<Vec<i64>>)> {
    let known = &features.event;
    let mut names = known.clone();
    // A feature of that name has priority.
    if !names.iter().any(|name| name == TIME) {
        names.push(TIME.to_owned());
    }
    let mut columns = match value {
        Json::List(events) => from_rows("events", events, &names)?,
        _ => columns("events", value, &names, numbers)?,
    };
    let time = columns.iter().position(|(name, _)| name == TIME && !known.iter().any(|name| name == TIME));
    let times = time.map(|at| columns.remove(at).1);
    if !columns.is_empty() || times.is_some() {
        complete("events", &columns, known)?;
        if features.timed && times.is_none() {
            return Err(Error::invalid("events.time", "missing: the model takes the times of events, in seconds"));
        }
    }
    let of_times = times.as_ref().map(|times| (TIME, times.len()));
    same_length("events", columns.iter().map(|(name, keys)| (name.as_str(), keys.len())).chain(of_times))?;
    Ok((columns, times))
}

fn candidates(value: &Json, known: &[String]) -> Result<Columns> {
    let columns = match (value, known) {
        // If an item has one key, a plain list is enough.
        (Json::List(items), [only]) if !items.iter().any(|item| matches!(item, Json::Object(_))) => {
            vec![(only.clone(), numbers("candidates", value)?)]
        }
        (Json::List(items), _) => from_rows("candidates", items, known)?,
        _ => columns("candidates", value, known, numbers)?,
    };
    if !columns.is_empty() || matches!(value, Json::Object(_)) {
        complete("candidates", &columns, known)?;
    }
    same_length("candidates", columns.iter().map(|(name, keys)| (name.as_str(), keys.len())))?;
    Ok(if columns.is_empty() { known.iter().map(|name| (name.clone(), Vec::new())).collect() } else { columns })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Features {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Features {
            user: names(&["age"]),
            event: names(&["movie", "rating"]),
            candidate: names(&["movie"]),
            timed: true,
        }
    }

    const WHOLE: &str = r#"{"user": 7, "user_keys": {"age": 3}, "events": {"movie": [1, 2], "rating": [5, 4], "time":
        [10, 20]}, "start": 30, "candidates": {"movie": [8, 9]}, "time": 99}"#;

    fn column(name: &str, keys: &[i64]) -> (String, Vec<i64>) {
        (name.to_owned(), keys.to_vec())
    }

    #[test]
    fn a_whole_line_is_read() {
        let line = Line::parse(WHOLE, &known()).unwrap();
        let made = Line {
            user: 7,
            user_keys: vec![("age".into(), 3)],
            events: vec![column("movie", &[1, 2]), column("rating", &[5, 4])],
            times: Some(vec![10, 20]),
            start: Some(30),
            candidates: vec![column("movie", &[8, 9])],
            time: Some(99),
        };
        assert_eq!(line, made);
        let rows = r#"{"user": 7, "user_keys": {"age": 3}, "events": [{"movie": 1, "rating": 5, "time": 10}, {"time": 20,
            "rating": 4, "movie": 2}], "start": 30, "candidates": [8, 9], "time": 99}"#;
        assert_eq!(Line::parse(rows, &known()).unwrap(), made);
    }

    #[test]
    fn what_may_be_left_out_may() {
        let line = Line::parse(r#"{"user": 0, "user_keys": {"age": -1}, "candidates": []}"#, &known()).unwrap();
        assert_eq!((line.start, line.time, line.times.as_ref(), line.event_count()), (None, None, None, 0));
        assert_eq!(line.events, [column("movie", &[]), column("rating", &[])]);
        assert_eq!(line.candidates, [column("movie", &[])]);
        assert_eq!(Line::parse(r#"{"user": 0, "start": 1, "candidates": []}"#, &known()).unwrap().user_keys, []);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |from: &str, to: &str| WHOLE.replacen(from, to, 1);
        for (text, message) in [
            ("[]".to_owned(), "request: a list of 0 is not an object such as"),
            ("{".to_owned(), "request: not JSON: EOF while parsing an object at column 1"),
            (with("\"user\"", "\"usr\""), "usr: no such field; did you mean `user`?"),
            (with("\"user\": 7,", ""), "user: missing"),
            (with("7", "-7"), "user: -7 is not a whole number from 0 to 18446744073709551615"),
            (with("7", "\"ada\""), "user: \"ada\" is not a whole number"),
            (with("\"time\": 99", "\"start\": 1"), "start: is there twice"),
            (
                with("\"user_keys\": {\"age\": 3},", "").replace("30", "0"),
                "user_keys: missing: the model has `age` of the user",
            ),
            (with("\"age\": 3", ""), "user_keys.age: missing"),
            (with("\"age\"", "\"agee\""), "user_keys.agee: no such feature here; did you mean `age`?"),
            (with("\"movie\": [1, 2],", ""), "events.movie: missing: the model has this feature"),
            (with("[1, 2]", "[1, 2.5]"), "events.movie[1]: 2.5 is not a whole number"),
            (with("[1, 2]", "[1]"), "events.rating: has 2 entries, and `movie` has 1"),
            (with("[10, 20]", "[10]"), "events.time: has 1 entries, and `movie` has 2"),
            (with("\"time\":", "\"tiem\":"), "events.tiem: no such feature here; did you mean `time`?"),
            (with(", \"time\":\n        [10, 20]", ""), "events.time: missing: the model takes the times"),
            (with("[1, 2]", "[1, 2], \"movie\": [1, 2]"), "events.movie: is there twice"),
            (with("\"rating\"", "\"raitng\""), "events.raitng: no such feature here; did you mean `rating`?"),
            (with("{\"movie\": [8, 9]}", "{\"rating\": [1]}"), "candidates.rating: no such feature here"),
            (with("{\"movie\": [8, 9]}", "{}"), "candidates.movie: missing"),
            (with("{\"movie\": [8, 9]}", "8"), "candidates: 8 is not an object with `movie`"),
            (with("{\"movie\": [8, 9]}", "[8, null]"), "candidates[1]: null is not a whole number"),
            (with("{\"movie\": [8, 9]}", "[{\"movie\": 8}, {}]"), "candidates[1]: `movie` is missing"),
            (with("\"candidates\": {\"movie\": [8, 9]},", ""), "candidates: missing: what is to be ranked?"),
        ] {
            let error = Line::parse(&text, &known()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{text}\n{error}\n{message}");
        }
    }
}
