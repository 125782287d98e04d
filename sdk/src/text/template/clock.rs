//! `strftime_now`: the local date in a prompt.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A local time. Names are English, as with Python's default locale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time {
    pub(super) year: i64,
    /// 1 to 12.
    pub(super) month: usize,
    pub(super) day: usize,
    pub(super) hour: usize,
    pub(super) minute: usize,
    pub(super) second: usize,
    pub(super) microsecond: u32,
    /// From Sunday, 0.
    pub(super) weekday: usize,
    /// From 1.
    pub(super) yearday: usize,
}

impl Time {
    pub(super) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since.as_secs() as libc::time_t;
        // SAFETY: all fields of `tm` are numbers or a pointer that may be null.
        let mut local: libc::tm = unsafe { std::mem::zeroed() };
        // SAFETY: both point to values of this function, and localtime_r keeps neither.
        unsafe { libc::localtime_r(&raw const seconds, &raw mut local) };
        Self {
            year: i64::from(local.tm_year) + 1900,
            month: local.tm_mon as usize + 1,
            day: (local.tm_mday as usize).max(1),
            hour: local.tm_hour as usize,
            minute: local.tm_min as usize,
            second: local.tm_sec as usize,
            microsecond: since.subsec_micros(),
            weekday: local.tm_wday as usize,
            yearday: local.tm_yday as usize + 1,
        }
    }

    /// As Python's `strftime`. What it does not know stays as it is.
    pub(super) fn format(self, format: &str) -> String {
        let mut text = String::new();
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let mut directive = rest.next();
            // glibc's flag for no padding.
            let bare = directive == Some('-');
            if bare {
                directive = rest.next();
            }
            match directive.and_then(|directive| self.field(directive)) {
                Some(field) if bare => {
                    let short = field.trim_start_matches(['0', ' ']);
                    text.push_str(if short.is_empty() { "0" } else { short });
                }
                Some(field) => text.push_str(&field),
                None => {
                    text.push_str(if bare { "%-" } else { "%" });
                    text.extend(directive);
                }
            }
        }
        text
    }

    fn field(self, directive: char) -> Option<String> {
        let day = DAYS[self.weekday % 7];
        let month = MONTHS[(self.month - 1) % 12];
        let half = if self.hour < 12 { "AM" } else { "PM" };
        let hour12 = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'C' => format!("{:02}", self.year.div_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'f' => format!("{:06}", self.microsecond),
            'j' => format!("{:03}", self.yearday),
            'p' => half.to_owned(),
            'A' => day.to_owned(),
            'a' => day[..3].to_owned(),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'w' => self.weekday.to_string(),
            'u' => ((self.weekday + 6) % 7 + 1).to_string(),
            'F' => self.format("%Y-%m-%d"),
            'T' | 'X' => self.format("%H:%M:%S"),
            'R' => self.format("%H:%M"),
            'D' | 'x' => self.format("%m/%d/%y"),
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            // Python gives nothing for a time without a zone.
            'z' | 'Z' => String::new(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_as_python_has_them() {
        let time = Time {
            year: 2026,
            month: 3,
            day: 7,
            hour: 15,
            minute: 4,
            second: 9,
            microsecond: 120,
            weekday: 6,
            yearday: 66,
        };
        assert_eq!(time.format("%d %b %Y"), "07 Mar 2026");
        assert_eq!(time.format("%A, %B %-d, %Y at %I:%M %p"), "Saturday, March 7, 2026 at 03:04 PM");
        assert_eq!(time.format("%F %T.%f %j %u%w %e %y %% %Q"), "2026-03-07 15:04:09.000120 066 66  7 26 % %Q");
    }

    #[test]
    fn now_is_now() {
        let year: i64 = Time::now().format("%Y").parse().unwrap();
        assert!((2024..3000).contains(&year));
    }
}
