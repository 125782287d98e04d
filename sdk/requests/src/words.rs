//! Words of error messages, and sizes as people write them.

use pagoda::json::closest;

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

/// Parses a size: `0`, `4096`, `512MiB`, `2G`; the units are powers of 1024.
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn typing_errors_are_understood() {
        let words = ["user", "events", "candidates", "time"];
        assert_eq!(did_you_mean("evnets", &words), "; did you mean `events`?");
        assert_eq!(did_you_mean("colour", &["a", "b", "c"]), "; there is `a`, `b` and `c`");
        assert_eq!(did_you_mean("colour", &[]), "; there is none");
    }
}
