//! Numbers and names for people.

use pagoda::json::closest;

/// Bytes with the unit that leaves one to three digits before the point.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut size = count as f64 / 1024.0;
    let mut unit = 0;
    // A value that rounds to 1024.0 is 1.0 of the next unit.
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

/// Parses a size: `0`, `4096`, `512MiB`, `2G`; the units are those of [`bytes`].
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a number of bytes such as 4096, 512MiB or 2GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit = text[digits..].trim_start().to_ascii_lowercase();
    let shift = match unit.strip_suffix("ib").unwrap_or(&unit) {
        "" if unit.is_empty() => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// A count with thousands separators.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count of things: `1 layer`, `2 layers`.
pub fn counted(number: u64, one: &str) -> String {
    format!("{} {one}{}", count(number), if number == 1 { "" } else { "s" })
}

/// `; did you mean …?`, or the list of choices.
pub fn did_you_mean(found: &str, words: &[&str]) -> String {
    match closest(found, words.iter().copied()) {
        Some(word) => format!("; did you mean `{word}`?"),
        None if words.is_empty() => "; there is none".to_owned(),
        None => format!("; there is {}", list(words)),
    }
}

/// `a`, `b` and `c`.
pub fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => quoted.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_fits() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn sizes_are_read() {
        let sizes =
            [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("2G", 2 << 30), ("1 kib", 1024), ("3t", 3 << 40)];
        for (text, bytes) in sizes {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.5GiB", "1GB", "1ib", "99999999T", "1e9"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(count(number), text);
        }
        assert_eq!((counted(1, "layer"), counted(2000, "page")), ("1 layer".into(), "2,000 pages".into()));
    }

    #[test]
    fn typing_errors_are_understood() {
        let words = ["user", "events", "candidates", "time"];
        assert_eq!(did_you_mean("evnets", &words), "; did you mean `events`?");
        assert_eq!(did_you_mean("colour", &["a", "b", "c"]), "; there is `a`, `b` and `c`");
        assert_eq!(did_you_mean("colour", &[]), "; there is none");
    }
}
