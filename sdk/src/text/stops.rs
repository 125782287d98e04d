//! Stop strings: where a text that comes in pieces ends.

use crate::error::{Error, Result};

/// Looks for stop strings in a text that comes in pieces.
///
/// The text ends as soon as it has a whole stop string; of two that end at the same place the longer one counts. Text that
/// could be the beginning of a stop string is held back until later text decides. How the text is cut into pieces changes
/// nothing but when it is passed on. A byte of text costs the same however long the stop strings are.
#[derive(Clone, Debug)]
pub struct Stops {
    stops: Vec<Stop>,
    include: bool,
    /// The end of the text that is not passed on yet: a beginning of a stop string.
    held: String,
    found: Option<usize>,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No stop string so far.
    Pass {
        /// Text that belongs to no stop string.
        text: String,
    },
    /// The text has ended.
    Found {
        /// The text before the stop string, or with it if [`Stops::include`] is set.
        text: String,
        /// Which stop string, as an index into those given.
        stop: usize,
    },
}

impl Stops {
    /// Looks for these.
    ///
    /// # Errors
    /// `InvalidArgument` where one is empty: it would end the text before it begins.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            let what = "an empty stop string would end every text before it begins; leave it out";
            return Err(Error::invalid(format!("stop[{index}]"), what));
        }
        let stops = stops.into_iter().map(Stop::new).collect();
        Ok(Self { stops, include: false, held: String::new(), found: None })
    }

    /// Whether the text that is passed on ends with the stop string. It ends before it by default.
    #[must_use]
    pub fn include(mut self, include: bool) -> Self {
        self.include = include;
        self
    }

    /// Whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        !self.stops.is_empty()
    }

    /// Takes the next piece of text. Once a stop string is found, all later text is dropped.
    pub fn push(&mut self, piece: &str) -> Stopped {
        if let Some(stop) = self.found {
            return Stopped::Found { text: String::new(), stop };
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (index, &byte) in piece.as_bytes().iter().enumerate() {
            // All are advanced, and the longest of those that end here is taken.
            let mut ended: Option<(usize, usize)> = None;
            for (number, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && ended.is_none_or(|(_, longest)| longest < stop.text.len()) {
                    ended = Some((number, stop.text.len()));
                }
            }
            if let Some((stop, length)) = ended {
                let end = before + index + 1;
                self.held.truncate(if self.include { end } else { end - length });
                self.found = Some(stop);
                return Stopped::Found { text: self.finish(), stop };
            }
        }
        let undecided = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let passed = self.held.len() - undecided;
        Stopped::Pass { text: self.held.drain(..passed).collect() }
    }

    /// Ends the text and gives what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that was found, as an index into those given.
    pub fn found(&self) -> Option<usize> {
        self.found
    }
}

/// One stop string, looked for by Knuth, Morris and Pratt's method.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For each length of a beginning: how long the longest shorter beginning is that it ends with.
    shorter: Vec<usize>,
    /// How much of the stop string the text ends with.
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let mut stop = Self { shorter: vec![0; text.len() + 1], text, matched: 0 };
        for length in 1..stop.text.len() {
            stop.advance(stop.text.as_bytes()[length]);
            stop.shorter[length + 1] = stop.matched;
        }
        stop.matched = 0;
        stop
    }

    /// Takes the next byte, and says whether the text ends with the stop string now.
    fn advance(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes.get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched];
        }
        if bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::random::Random;

    fn stops(of: &[&str]) -> Stops {
        Stops::new(of.iter().map(|stop| (*stop).to_owned()).collect()).unwrap()
    }

    fn pass(text: &str) -> Stopped {
        Stopped::Pass { text: text.to_owned() }
    }

    fn found(text: &str, stop: usize) -> Stopped {
        Stopped::Found { text: text.to_owned(), stop }
    }

    #[test]
    fn a_beginning_is_held_back_until_it_is_decided() {
        let mut stops = stops(&["<|end|>"]);
        assert_eq!(stops.push("Hello <"), pass("Hello "));
        assert_eq!(stops.push("|en"), pass(""));
        assert_eq!(stops.push("ough <<|e"), pass("<|enough <"));
        assert_eq!(stops.push("nd|> and more"), found("", 0));
        assert_eq!(stops.push("more"), found("", 0));
        assert_eq!((stops.found(), stops.finish()), (Some(0), String::new()));
    }

    #[test]
    fn what_was_held_comes_at_the_end() {
        let mut stops = stops(&["\n\nUser:"]);
        assert_eq!(stops.push("a\n\nUs"), pass("a"));
        assert_eq!(stops.finish(), "\n\nUs");
    }

    #[test]
    fn the_stop_string_is_included_on_request() {
        let mut stops = stops(&["日本", "END"]).include(true);
        assert_eq!(stops.push("今日"), pass("今"));
        assert_eq!(stops.push("本語"), found("日本", 0));
    }

    #[test]
    fn the_first_to_end_wins_and_of_two_the_longer() {
        assert_eq!(stops(&["bc", "abcd"]).push("xabcd"), found("xa", 0));
        assert_eq!(stops(&["c", "abc"]).push("xabcd"), found("x", 1));
        assert_eq!(stops(&["\n", "\n\n"]).push("a\n\n"), found("a", 0));
    }

    #[test]
    fn without_stop_strings_all_text_passes() {
        assert_eq!(stops(&[]).push("text"), pass("text"));
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let error = Stops::new(vec!["a".to_owned(), String::new()]).unwrap_err();
        assert_eq!(error.argument(), Some("stop[1]"));
    }

    /// Random texts of few letters, some of them of several bytes, cut anywhere, against a search of the whole text.
    #[test]
    fn random_texts_are_cut_where_a_search_of_the_whole_text_cuts() {
        let mut random = Random::new(28);
        let letters = ["a", "b", "é", "è", "日", "👍", "👎"];
        for case in 0..20_000 {
            let few = 2 + random.below(letters.len() - 1);
            let mut word = |longest: usize| -> String {
                (0..1 + random.below(longest)).map(|_| letters[random.below(few)]).collect()
            };
            let strings: Vec<String> = (0..1 + case % 4).map(|_| word(6)).collect();
            let text = word(60);
            let include = random.below(2) == 1;

            let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
            let expected = ends.into_iter().find_map(|end| {
                let here = strings.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
                let stop = here.max_by_key(|stop| stop.len())?;
                Some(if include { &text[..end] } else { &text[..end - stop.len()] })
            });

            let mut stops = Stops::new(strings.clone()).unwrap().include(include);
            let (mut got, mut ended) = (String::new(), false);
            let characters: Vec<char> = text.chars().collect();
            let mut at = 0;
            while at < characters.len() && !ended {
                let next = characters.len().min(at + random.below(5));
                match stops.push(&characters[at..next].iter().collect::<String>()) {
                    Stopped::Pass { text } => got += &text,
                    Stopped::Found { text, stop } => {
                        got += &text;
                        ended = true;
                        assert!(stop < strings.len());
                    }
                }
                if !ended {
                    let so_far: String = characters[..next].iter().collect();
                    let held = so_far.strip_prefix(&got).unwrap();
                    assert!(
                        held.is_empty() || strings.iter().any(|stop| stop.starts_with(held)),
                        "{held:?} of {strings:?}"
                    );
                }
                at = next;
            }
            got += &stops.finish();
            assert_eq!((got.as_str(), ended), (expected.unwrap_or(&text), expected.is_some()), "{text:?} {strings:?}");
        }
    }
}
