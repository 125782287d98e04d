//! The chart: latency of a request as the history grows, with the cache and without.

use std::fmt::Write;

use super::replay::{Answered, Visit};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 760.0;
const TOP: f64 = 132.0;
const BOTTOM: f64 = 480.0;
/// The events of one step on the axis, and the minimum number of requests of a step.
const STEP: usize = 32;
const ENOUGH: usize = 25;
const CACHED: &str = "#0b7a75";
const PLAIN: &str = "#c8553d";
const INK: &str = "#22313f";
const FAINT: &str = "#6b7a88";

/// Median, 10th and 90th percentile of the latency, in milliseconds, around a length of the history.
struct Point {
    history: f64,
    low: f64,
    median: f64,
    high: f64,
}

/// The chart as SVG. `about` is a line that says what was measured.
pub fn latency(requests: &[Visit], about: &str) -> String {
    let groups = groups(requests);
    let cached = points(&groups, |visit| &visit.cached);
    let plain = points(&groups, |visit| &visit.plain);
    let highest = plain.iter().chain(&cached).fold(0.01, |most: f64, point| most.max(point.high));
    let longest = plain.last().map_or(1.0, |point| point.history.max(1.0));
    let (up, along) = (round_step(highest / 5.0), round_step(longest / 7.0));
    let scale = Scale { most: (highest / up).ceil() * up, longest };
    let mut svg = head(about);
    axes(&mut svg, &scale, up, along);
    for (points, colour) in [(&plain, PLAIN), (&cached, CACHED)] {
        band(&mut svg, &scale, points, colour);
        line(&mut svg, &scale, points, colour);
    }
    if let (Some(cached), Some(plain)) = (cached.last(), plain.last()) {
        ends(&mut svg, &scale, cached, plain);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Requests by the length of their history. A step with few requests is merged into the one before it.
fn groups(requests: &[Visit]) -> Vec<Vec<&Visit>> {
    let mut sorted: Vec<&Visit> = requests.iter().collect();
    sorted.sort_by_key(|visit| visit.history);
    let mut groups: Vec<Vec<&Visit>> = Vec::new();
    for step in sorted.chunk_by(|a, b| a.history / STEP == b.history / STEP) {
        match groups.last_mut() {
            Some(last) if step.len() < ENOUGH => last.extend(step),
            _ => groups.push(step.to_vec()),
        }
    }
    groups
}

fn points(groups: &[Vec<&Visit>], of: impl Fn(&Visit) -> &Answered) -> Vec<Point> {
    let point = |group: &Vec<&Visit>| {
        let mut times: Vec<f64> = group.iter().map(|visit| of(visit).latency.as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
        let history = group.iter().map(|visit| visit.history as f64).sum::<f64>() / group.len() as f64;
        Point { history, low: at(0.1), median: at(0.5), high: at(0.9) }
    };
    groups.iter().map(point).collect()
}

/// Rounds up to 1, 2, 2.5 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-6).log10().floor());
    let fits = |factor: &f64| factor * power >= least * 0.999;
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(fits).unwrap_or(10.0) * power
}

/// Maps values to coordinates.
struct Scale {
    most: f64,
    longest: f64,
}

impl Scale {
    fn x(&self, history: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * history / self.longest
    }

    fn y(&self, milliseconds: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * milliseconds / self.most
    }
}

fn head(about: &str) -> String {
    let middle = f64::midpoint(LEFT, RIGHT);
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif" fill="{INK}">
<title>Latency of a request as the history grows, with the cache of keys and values and without</title>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<text x="{LEFT}" y="42" font-size="23" font-weight="600">Latency of a request as the history grows</text>
<text x="{LEFT}" y="67" font-size="14" fill="{FAINT}">{}</text>
<text x="{middle}" y="{}" font-size="14" text-anchor="middle" fill="{FAINT}">events in the user's history</text>
"##,
        escaped(about),
        BOTTOM + 50.0
    );
    let mut x = LEFT;
    for (colour, name, width) in [(PLAIN, "without the cache", 166.0), (CACHED, "with the cache", 142.0)] {
        let _ = writeln!(
            svg,
            r#"<rect x="{x}" y="87" width="24" height="14" rx="2" fill="{colour}" opacity="0.16"/><path d="M{x} 94h24" stroke="{colour}" stroke-width="2.5"/><text x="{}" y="99" font-size="14">{name}</text>"#,
            x + 31.0
        );
        x += width;
    }
    let note = "line: median request; band: 10th to 90th percentile";
    let _ = writeln!(svg, r#"<text x="{}" y="99" font-size="13" fill="{FAINT}">{note}</text>"#, x + 12.0);
    svg
}

fn axes(svg: &mut String, scale: &Scale, up: f64, along: f64) {
    let steps = |most: f64, step: f64| (0..=(most / step + 1e-6) as usize).map(move |count| count as f64 * step);
    for value in steps(scale.most, up) {
        let (y, colour) = (scale.y(value), if value == 0.0 { FAINT } else { "#e6eaee" });
        let unit = if value == 0.0 { "" } else { " ms" };
        let _ = writeln!(
            svg,
            r#"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="{colour}"/><text x="{}" y="{:.1}" font-size="13" text-anchor="end" fill="{FAINT}">{}{unit}</text>"#,
            LEFT - 10.0,
            y + 4.5,
            short(value)
        );
    }
    for value in steps(scale.longest, along) {
        let x = scale.x(value);
        let _ = writeln!(
            svg,
            r#"<path d="M{x:.1} {BOTTOM}v6" stroke="{FAINT}"/><text x="{x:.1}" y="{}" font-size="13" text-anchor="middle" fill="{FAINT}">{}</text>"#,
            BOTTOM + 24.0,
            short(value)
        );
    }
}

fn band(svg: &mut String, scale: &Scale, points: &[Point], colour: &str) {
    let there = points.iter().map(|point| (point.history, point.high));
    let back = points.iter().rev().map(|point| (point.history, point.low));
    let path = path(scale, there.chain(back));
    let _ = writeln!(svg, r#"<path d="{path}Z" fill="{colour}" opacity="0.16"/>"#);
}

/// The medians, with a dot at each measured step.
fn line(svg: &mut String, scale: &Scale, points: &[Point], colour: &str) {
    let path = path(scale, points.iter().map(|point| (point.history, point.median)));
    let _ = writeln!(
        svg,
        r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round" stroke-linecap="round"/>"#
    );
    for point in points {
        let (x, y) = (scale.x(point.history), scale.y(point.median));
        let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#);
    }
}

fn path(scale: &Scale, places: impl Iterator<Item = (f64, f64)>) -> String {
    let mut path = String::new();
    for (history, milliseconds) in places {
        let command = if path.is_empty() { 'M' } else { 'L' };
        let _ = write!(path, "{command}{:.1} {:.1}", scale.x(history), scale.y(milliseconds));
    }
    path
}

/// Names and figures beside the ends of the lines.
fn ends(svg: &mut String, scale: &Scale, cached: &Point, plain: &Point) {
    let x = scale.x(plain.history);
    // Each label has two lines of text. They must not overlap if the curves end close together.
    let (upper, lower) = (scale.y(plain.median), scale.y(cached.median));
    let apart = ((44.0 - (lower - upper).abs()) / 2.0).max(0.0);
    let (upper, lower) = (upper - apart, lower + apart);
    let faster = format!("{:.2} ms, {:.1} × as long", plain.median, plain.median / cached.median);
    for (name, figure, colour, point, y) in [
        ("without the cache", faster, PLAIN, plain, upper),
        ("with the cache", format!("{:.2} ms", cached.median), CACHED, cached, lower),
    ] {
        let _ = writeln!(
            svg,
            r##"<circle cx="{x:.1}" cy="{:.1}" r="4.5" fill="{colour}" stroke="#ffffff" stroke-width="1.5"/><text x="{:.1}" y="{:.1}" font-size="15" font-weight="600" fill="{colour}">{name}</text><text x="{:.1}" y="{:.1}" font-size="14" fill="{colour}">{figure}</text>"##,
            scale.y(point.median),
            x + 14.0,
            y - 2.0,
            x + 14.0,
            y + 17.0
        );
    }
}

/// A number without trailing zeros.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn visit(history: usize, cached: u64, plain: u64) -> Visit {
        let answered = |micros| Answered { latency: Duration::from_micros(micros), cached_rows: 0, computed_rows: 0 };
        Visit { history, told: None, cached: answered(cached), plain: answered(plain) }
    }

    #[test]
    fn steps_are_round() {
        for (least, step) in [(0.7, 1.0), (1.1, 2.0), (2.2, 2.5), (30.0, 50.0), (99.0, 100.0), (100.0, 100.0)] {
            assert!((round_step(least) - step).abs() < 1e-9, "{least}");
        }
        assert_eq!([short(0.5), short(2.0), short(100.0), short(1.25)], ["0.5", "2", "100", "1.25"]);
    }

    #[test]
    fn few_requests_make_no_point_of_their_own() {
        let mut requests: Vec<Visit> = (0..100).map(|_| visit(10, 1000, 2000)).collect();
        requests.extend((0..30).map(|_| visit(40, 1000, 4000)));
        requests.extend((0..3).map(|_| visit(700, 1000, 90_000)));
        let groups = groups(&requests);
        assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [100, 33]);
        let points = points(&groups, |visit| &visit.plain);
        assert_eq!((points[0].median, points[1].median), (2.0, 4.0));
    }

    #[test]
    fn every_request_may_be_of_one_length_or_there_may_be_none() {
        for requests in [Vec::new(), vec![visit(3, 1, 1)]] {
            let svg = latency(&requests, "a < b");
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
