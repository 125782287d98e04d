//! Ranks movies for a returning user: `rank FOLDER`, which has a model and visits.txt
//! (samples/movielens/prepare.py). Each visit sends only what is new; what the model made of everything before that is
//! in the engine's cache.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use pagoda::engine::{Columns, Engine, EngineOptions, Events, RankRequest, RankResponse};

/// The number and the rest of a line: "5 Copycat (1995)".
fn split(line: Option<&str>) -> Result<(i64, &str), Box<dyn Error>> {
    let (number, rest) = line.and_then(|line| line.split_once(' ')).ok_or("visits.txt ends too early")?;
    Ok((number.parse()?, rest))
}

fn rank(folder: &Path) -> Result<(), Box<dyn Error>> {
    let path = folder.join("visits.txt");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut lines = text.lines();
    let user = lines.next().and_then(|line| line.strip_prefix("user ")).ok_or("visits.txt begins with no user")?;
    let mut request = RankRequest { user: user.parse()?, ..RankRequest::default() };

    let mut visits = Vec::new();
    let candidates: usize = loop {
        let line = lines.next().ok_or("visits.txt has no candidates")?;
        let Some(count) = line.strip_prefix("visit ") else {
            break line.strip_prefix("candidates ").ok_or("visits.txt: neither a visit nor candidates")?.parse()?;
        };
        let (mut movies, mut ratings) = (Vec::new(), Vec::new());
        for _ in 0..count.parse()? {
            let (movie, rating) = split(lines.next())?;
            movies.push(movie);
            ratings.push(rating.parse()?);
        }
        visits.push(Columns::new().with("movie", movies).with("rating", ratings));
    };
    let movies: Vec<(i64, &str)> = (0..candidates).map(|_| split(lines.next())).collect::<Result<_, _>>()?;
    request.candidates = Columns::new().with("movie", movies.iter().map(|(movie, _)| *movie).collect::<Vec<_>>());

    let engine = Engine::open(folder.join("model"), EngineOptions::default())?;
    println!("User {user}");
    let (mut sent, mut answer) = (0, RankResponse::default());
    for (number, keys) in visits.into_iter().enumerate() {
        let new = keys.rows();
        request.start = Some(sent);
        request.events = Events { keys, times: Vec::new() };
        answer = engine.rank(&request)?;
        sent += new as u64;
        let (cached, computed) = (answer.cached_rows, answer.computed_rows);
        println!("  visit {}: {new} new events, {cached} rows remembered, {computed} computed", number + 1);
    }

    // A candidate has a score for each task; this is the first task's. Sorting keeps the order of those that are alike.
    let score = |candidate: usize| answer.candidate(candidate)[0];
    let mut order: Vec<usize> = (0..movies.len()).collect();
    order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    println!("Top ten of {} movies:", movies.len());
    for (place, candidate) in order.into_iter().take(10).enumerate() {
        println!("  {:2}. {:.6}  {}", place + 1, score(candidate), movies[candidate].1);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let [_, folder] = arguments.as_slice() else {
        eprintln!("usage: rank FOLDER");
        return ExitCode::from(2);
    };
    if let Err(error) = rank(Path::new(folder)) {
        eprintln!("rank: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
