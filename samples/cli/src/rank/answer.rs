//! The answer to a request, as a table.

use pagoda_requests::rank::{Answer, keys};

use crate::words::{count, counted};

/// A line about the request, then the best for each task side by side.
pub fn table(answer: &Answer, number: u64) -> String {
    let about = format!(
        "line {}, user {}: {} and {}; {} from the cache, {} computed, {:.2} ms\n",
        number,
        answer.line.user,
        counted(answer.line.event_count() as u64, "event"),
        counted(answer.candidates() as u64, "candidate"),
        counted(answer.cached_rows, "row"),
        count(answer.computed_rows),
        answer.took.as_secs_f64() * 1e3,
    );
    let names: Vec<&str> = answer.line.candidates.iter().map(|(name, _)| name.as_str()).collect();
    let blocks: Vec<Block> = (0..answer.tasks.len()).map(|task| block(answer, task, &names.join("/"))).collect();
    let rows = blocks.first().map_or(0, |block| block.rows.len());
    let line = |at: usize, place: &str| {
        let cells: Vec<String> = blocks.iter().map(|block| block.rows[at].clone()).collect();
        format!("{place:>5}  {}", cells.join("    ")).trim_end().to_owned() + "\n"
    };
    let places = (0..rows).map(|at| line(at, &if at < HEAD { String::new() } else { (at + 1 - HEAD).to_string() }));
    about + &places.collect::<String>()
}

/// The header lines of a table: the task, and its columns.
const HEAD: usize = 2;

fn block(answer: &Answer, task: usize, names: &str) -> Block {
    let cells = answer.best(task).into_iter().map(|at| {
        let keys: Vec<String> = keys(&answer.line.candidates, at).iter().map(|(_, key)| key.to_string()).collect();
        [keys.join("/"), format!("{:.4}", answer.scores[at * answer.tasks.len() + task])]
    });
    let cells: Vec<[String; 2]> = std::iter::once([names.to_owned(), "score".to_owned()]).chain(cells).collect();
    let width = |side: usize| cells.iter().map(|cell| cell[side].chars().count()).max().unwrap_or(0);
    let (left, right) = (width(0), width(1));
    let title = answer.tasks[task].clone();
    let wide = (left + 2 + right).max(title.chars().count());
    let mut rows = vec![format!("{title:<wide$}")];
    rows.extend(cells.iter().map(|[key, score]| format!("{:<wide$}", format!("{key:<left$}  {score:>right$}"))));
    Block { rows }
}

/// The column of a task, with rows of equal width.
struct Block {
    rows: Vec<String>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pagoda_requests::rank::Line;

    use super::*;

    fn line() -> Line {
        let candidates = vec![("movie".to_owned(), vec![10, 11, 1200]), ("genre".to_owned(), vec![1, 2, 3])];
        Line { user: 7, candidates, ..Line::default() }
    }

    fn answer<'a>(line: &'a Line, tasks: &'a [String], top: usize) -> Answer<'a> {
        let scores = &[0.25, 0.5, 0.75, 0.5, 0.25, 0.125];
        let took = Duration::from_micros(1234);
        Answer { number: Some(3), line, tasks, scores, cached_rows: 2000, computed_rows: 4, took, top }
    }

    #[test]
    fn a_table_has_the_best_of_each_task_side_by_side() {
        let (line, tasks) = (line(), ["like".to_owned(), "will click".to_owned()]);
        let expected = "\
line 3, user 7: 0 events and 3 candidates; 2,000 rows from the cache, 4 computed, 1.23 ms
       like                   will click
       movie/genre   score    movie/genre   score
    1  11/2         0.7500    10/1         0.5000
    2  10/1         0.2500    11/2         0.5000
";
        assert_eq!(table(&answer(&line, &tasks, 2), 3), expected);
    }
}
