//! The figures of a replay as text and tables.

use std::fmt::Write;

use super::report::{Report, TOLERANCE};
use crate::words;

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("a string takes everything");
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        let (requests, ratings) = (words::count(self.requests as u64), words::count(self.train_ratings));
        writeln!(text, "MovieLens-100K, replayed through Pagoda")?;
        writeln!(text, "  trained   with torch {} on {ratings} ratings of {} users", self.torch, self.train_users)?;
        writeln!(text, "  served    by model version {}", &self.model_version[..16.min(self.model_version.len())])?;
        writeln!(text, "  replayed  {requests} requests of {} users from after the training set", self.users)?;
        if let Some(native) = self.native_bytes_per_row.filter(|_| self.kv_format != "native") {
            let (format, bytes) = (self.kv_format, words::bytes(self.kv_bytes_per_row));
            let native = words::bytes(native);
            writeln!(text, "  pages     {format}, {bytes} a row; without the cache native, {native} a row")?;
        }
        writeln!(text)?;
        self.write_top(text)?;
        self.write_sides(text)?;
        self.write_tasks(text)?;
        writeln!(text, "Latency against the length of the history, as a chart: {}", self.chart)
    }

    fn write_top(&self, text: &mut String) -> std::fmt::Result {
        let top = &self.top;
        let ranked = words::count(top.ranked as u64);
        writeln!(text, "User {} on {}, with {} movies rated so far.", top.user, date(top.time), top.history)?;
        writeln!(text, "The first ten of the {ranked} others, by how likely they are to be rated next:\n")?;
        writeln!(text, "      will rate   4+ stars  movie                                     what really happened")?;
        for (place, movie) in top.movies.iter().enumerate() {
            let happened = match (movie.stars, movie.seconds_later) {
                (Some(stars), Some(seconds)) => {
                    format!("{}, {} later", words::counted(stars as u64, "star"), span(seconds))
                }
                _ => "not rated".to_owned(),
            };
            let (rate, like) = (100.0 * movie.will_rate, 100.0 * movie.rated_4_or_more);
            let title = shortened(&movie.title, 40);
            writeln!(text, "  {:>2}  {rate:>7.1} %  {like:>7.1} %  {title:<40}  {happened}", place + 1)?;
        }
        let rated = top.movies.iter().filter(|movie| movie.stars.is_some()).count();
        writeln!(text, "\n  {rated} of the {} were rated later.", top.movies.len())?;
        writeln!(
            text,
            "  The request took {:.1} ms; again, with the history cached, {:.1} ms.\n",
            top.first_ms, top.again_ms
        )
    }

    fn write_sides(&self, text: &mut String) -> std::fmt::Result {
        let (with, without) = (&self.cached, &self.plain);
        writeln!(text, "The same requests                   with the cache   without")?;
        for (name, with, without) in [
            ("latency, median", with.median_ms, without.median_ms),
            ("latency, 99th percentile", with.p99_ms, without.p99_ms),
        ] {
            writeln!(text, "  {name:<32} {with:>11.2} ms {without:>9.2} ms   × {:.1}", without / with)?;
        }
        let times = without.computed_rows as f64 / with.computed_rows.max(1) as f64;
        let computed = (words::count(with.computed_rows), words::count(without.computed_rows));
        writeln!(
            text,
            "  {:<32} {:>14} {:>12}   × {times:.0}",
            "events of histories computed", computed.0, computed.1
        )?;
        let zero = "0.0 %";
        writeln!(text, "  {:<32} {:>12.1} % {zero:>12}", "events that were cached", self.cached_rows_percent)?;
        writeln!(text, "  {:<32} {:>12.1} % {zero:>12}", "returning users found", self.found_percent)?;
        if let Some(hits) = self.movie_hit_percent {
            writeln!(text, "  {:<32} {hits:>12.1} %", "movies found in the table's cache")?;
        }
        writeln!(text)
    }

    fn write_tasks(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "AUC on the test set      samples   popularity     torch   with the cache   without   difference"
        )?;
        for task in &self.tasks {
            let samples = words::count((task.positive + task.negative) as u64);
            writeln!(
                text,
                "  {:<18} {samples:>11} {:>12.4} {:>9.4} {:>16.4} {:>9.4} {:>12.6}{}",
                task.name,
                task.popularity_auc,
                task.torch_auc,
                task.cached_auc,
                task.plain_auc,
                task.difference(),
                if task.agrees { "" } else { "  WRONG" }
            )?;
        }
        let verdict = if self.agrees() { "as it has to be: below" } else { "it has to be below" };
        writeln!(text, "  The difference to torch is {verdict} {TOLERANCE}.")?;
        match self.largest_score_difference {
            0.0 => writeln!(text, "  With the cache and without, every score is the same to the bit.\n"),
            most => writeln!(text, "  With the cache and without, no score differs by more than {most:.1e}.\n"),
        }
    }
}

fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

/// A duration in the largest unit of which it has at least one.
fn span(seconds: i64) -> String {
    let (count, unit) = match seconds {
        ..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    words::counted(count as u64, unit)
}

/// The day of a time since 1970, by the civil calendar.
fn date(seconds: i64) -> String {
    // Years begin on 1 March here, so that the leap day is the last day of a year.
    let days = seconds.div_euclid(86_400) + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (number, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{month:02}-{number:02}", year + 400 * era + i64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_spans_read_as_people_say_them() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (889_237_269, "1998-03-07"),
            (-1, "1969-12-31"),
        ] {
            assert_eq!(date(seconds), day);
        }
        let spans = [(0, "0 seconds"), (61, "1 minute"), (7300, "2 hours"), (90_000, "1 day")];
        assert!(spans.iter().all(|&(seconds, text)| span(seconds) == text));
        assert_eq!((shortened("abcdef", 4), shortened("äöü", 3)), ("abc…".to_owned(), "äöü".to_owned()));
    }
}
