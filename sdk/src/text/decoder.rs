//! Tokens to text: the decoder of a `tokenizer.json`, one token at a time.
//!
//! The crate `tokenizers` decodes whole sequences. Its decoders are done again here, each with what it has to keep of
//! earlier tokens, so that text comes as soon as no later token can change it. The text is the same, with one exception: in a
//! run of byte tokens that is not UTF-8, characters that are whole stay, as in SentencePiece, which such vocabularies come
//! from. `tokenizers` makes U+FFFD of the entire run, so nothing of a run could be passed on before its end.

use serde_json::Value;

/// The decoder of one sequence.
#[derive(Clone, Debug)]
pub(super) struct Decoder {
    stages: Vec<Stage>,
}

impl Decoder {
    pub(super) fn new(steps: &[Step]) -> Self {
        let mut fused = false;
        let mut stages = Vec::new();
        for step in steps {
            stages.push(match step {
                Step::Replace { pattern, content } => {
                    Stage::Replace { pattern: pattern.clone(), content: content.clone() }
                }
                Step::ByteFallback => Stage::ByteFallback(Vec::new()),
                Step::ByteLevel => Stage::ByteLevel(Vec::new()),
                Step::Fuse => Stage::Fuse,
                &Step::Strip { content, start, stop } if fused => Stage::StripWhole { content, start, stop, held: 0 },
                &Step::Strip { content, start, stop } => Stage::StripEach { content, start, stop },
                &Step::Metaspace { replacement, drop_first } => {
                    Stage::Metaspace { replacement, drop: drop_first, fused }
                }
                Step::WordPiece { prefix, cleanup } => {
                    Stage::WordPiece { prefix: prefix.clone(), cleanup: *cleanup, first: true }
                }
                Step::Suffix(suffix) => Stage::Suffix { suffix: suffix.clone(), last: None },
                Step::Spaces => Stage::Spaces { first: true },
            });
            fused |= matches!(step, Step::Fuse | Step::ByteLevel);
        }
        Self { stages }
    }

    /// Takes the next token and appends the text that is new. `bytes` are those of [`token_bytes`].
    pub(super) fn push(&mut self, token: impl FnOnce() -> Option<String>, bytes: &[u8], text: &mut String) {
        if let [Stage::ByteLevel(pending)] = &mut self.stages[..] {
            // By far the most common decoder, and the bytes are at hand.
            pending.extend_from_slice(bytes);
            take_characters(pending, Invalid::Once, text);
        } else if let Some(token) = token() {
            feed(&mut self.stages, &token, text);
        }
    }

    /// Ends the sequence and appends the text that is left.
    pub(super) fn finish(mut self, text: &mut String) {
        let mut stages = &mut self.stages[..];
        while let Some((stage, rest)) = stages.split_first_mut() {
            stage.finish(&mut |token| feed(rest, token, text));
            stages = rest;
        }
    }
}

/// One step of a decoder, as `tokenizer.json` has it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Replaces a text in each token.
    Replace { pattern: String, content: String },
    /// Tokens `<0x00>` to `<0xFF>` are bytes.
    ByteFallback,
    /// Makes one token of all.
    Fuse,
    /// Cuts a character off the ends of each token, up to `start` and `stop` times.
    Strip { content: char, start: usize, stop: usize },
    /// A character stands for a space; in the first token it may stand for nothing.
    Metaspace { replacement: char, drop_first: bool },
    /// A token begins a word unless it has the prefix.
    WordPiece { prefix: String, cleanup: bool },
    /// A token ends a word if it has the suffix.
    Suffix(String),
    /// Each character of a token stands for a byte. The result is one token.
    ByteLevel,
    /// What is done without a decoder: a space between tokens.
    Spaces,
}

/// The steps of a decoder, or `None` where one of them can not be done token by token.
pub(super) fn steps(decoder: &Value) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    if decoder.is_null() {
        steps.push(Step::Spaces);
    } else {
        read(decoder, &mut steps)?;
    }
    // Behind some steps, what the next one takes for a token arrives in parts. Those that look at a whole token, or count
    // tokens, do not work there.
    let (mut in_parts, mut fused) = (false, false);
    for step in &steps {
        let takes_parts = match step {
            Step::Fuse | Step::Metaspace { .. } => true,
            Step::Replace { pattern, .. } => pattern.chars().count() == 1,
            Step::Strip { .. } => fused,
            _ => false,
        };
        if in_parts && !takes_parts {
            return None;
        }
        in_parts |= matches!(step, Step::Fuse | Step::ByteLevel | Step::ByteFallback);
        fused |= matches!(step, Step::Fuse | Step::ByteLevel);
    }
    Some(steps)
}

fn read(decoder: &Value, steps: &mut Vec<Step>) -> Option<()> {
    let text = |key: &str| decoder.get(key).and_then(Value::as_str).map(str::to_owned);
    let character = |key: &str| text(key)?.chars().next();
    let count = |key: &str| decoder.get(key).and_then(Value::as_u64).map(|count| count as usize);
    match decoder.get("type").and_then(Value::as_str)? {
        "Sequence" => {
            for part in decoder.get("decoders")?.as_array()? {
                read(part, steps)?;
            }
        }
        "Replace" => {
            // The other kind of pattern is a regular expression.
            let pattern = decoder.get("pattern")?.get("String")?.as_str().filter(|pattern| !pattern.is_empty())?;
            steps.push(Step::Replace { pattern: pattern.to_owned(), content: text("content")? });
        }
        "ByteFallback" => steps.push(Step::ByteFallback),
        "Fuse" => steps.push(Step::Fuse),
        "Strip" => {
            steps.push(Step::Strip { content: character("content")?, start: count("start")?, stop: count("stop")? });
        }
        "Metaspace" => steps.push(Step::Metaspace {
            replacement: character("replacement")?,
            drop_first: text("prepend_scheme")? != "never",
        }),
        "WordPiece" => {
            steps.push(Step::WordPiece { prefix: text("prefix")?, cleanup: decoder.get("cleanup")?.as_bool()? });
        }
        "BPEDecoder" => steps.push(Step::Suffix(text("suffix")?)),
        "ByteLevel" => steps.push(Step::ByteLevel),
        _ => return None,
    }
    Some(())
}

/// The bytes that a token stands for in the middle of a text.
pub(super) fn token_bytes(steps: &[Step], token: &str) -> Vec<u8> {
    let mut text = token.to_owned();
    for step in steps {
        match step {
            Step::Replace { pattern, content } => text = text.replace(pattern, content),
            Step::ByteFallback => {
                if let Some(byte) = fallback_byte(&text) {
                    return vec![byte];
                }
            }
            Step::Metaspace { replacement, .. } => text = text.replace(*replacement, " "),
            Step::WordPiece { prefix, .. } => {
                text = text.strip_prefix(prefix).map_or_else(|| format!(" {text}"), str::to_owned);
            }
            Step::Suffix(suffix) => text = text.replace(suffix, " "),
            Step::ByteLevel => return level_bytes(&text),
            Step::Spaces => text.insert(0, ' '),
            Step::Fuse | Step::Strip { .. } => {}
        }
    }
    text.into_bytes()
}

/// A step with what it keeps from one token to the next.
#[derive(Clone, Debug)]
enum Stage {
    Replace {
        pattern: String,
        content: String,
    },
    /// Bytes that are not a whole character yet.
    ByteFallback(Vec<u8>),
    /// Bytes that are not a whole character yet.
    ByteLevel(Vec<u8>),
    Fuse,
    StripEach {
        content: char,
        start: usize,
        stop: usize,
    },
    /// How often the beginning may still be cut, and how many characters at the end are cut if nothing follows.
    StripWhole {
        content: char,
        start: usize,
        stop: usize,
        held: usize,
    },
    /// Whether the character stands for nothing now.
    Metaspace {
        replacement: char,
        drop: bool,
        fused: bool,
    },
    WordPiece {
        prefix: String,
        cleanup: bool,
        first: bool,
    },
    /// The last token, which gets no space for its suffix if nothing follows.
    Suffix {
        suffix: String,
        last: Option<String>,
    },
    Spaces {
        first: bool,
    },
}

impl Stage {
    fn push(&mut self, token: &str, next: &mut dyn FnMut(&str)) {
        match self {
            Self::Replace { pattern, content } => next(&token.replace(&*pattern, content)),
            Self::ByteFallback(pending) => match fallback_byte(token) {
                Some(byte) => {
                    let mut text = String::new();
                    pending.push(byte);
                    take_characters(pending, Invalid::EachByte, &mut text);
                    if !text.is_empty() {
                        next(&text);
                    }
                }
                None => {
                    self.finish(next);
                    next(token);
                }
            },
            Self::ByteLevel(pending) => {
                let mut text = String::new();
                pending.extend(level_bytes(token));
                take_characters(pending, Invalid::Once, &mut text);
                next(&text);
            }
            Self::Fuse => next(token),
            Self::StripEach { content, start, stop } => {
                let mut token = token;
                (0..*start).for_each(|_| token = token.strip_prefix(*content).unwrap_or(token));
                (0..*stop).for_each(|_| token = token.strip_suffix(*content).unwrap_or(token));
                next(token);
            }
            Self::StripWhole { content, start, stop, held } => {
                let mut token = token;
                while *start > 0 && !token.is_empty() {
                    match token.strip_prefix(*content) {
                        Some(rest) => (token, *start) = (rest, *start - 1),
                        None => *start = 0,
                    }
                }
                let text: String = std::iter::repeat_n(*content, *held).chain(token.chars()).collect();
                *held = text.chars().rev().take(*stop).take_while(|character| character == content).count();
                next(&text[..text.len() - *held * content.len_utf8()]);
            }
            Self::Metaspace { replacement, drop, fused } => {
                next(&token.replace(*replacement, if *drop { "" } else { " " }));
                *drop &= *fused;
            }
            Self::WordPiece { prefix, cleanup, first } => {
                let text = match token.strip_prefix(&*prefix) {
                    _ if *first => token.to_owned(),
                    Some(rest) => rest.to_owned(),
                    None => format!(" {token}"),
                };
                *first = false;
                next(&if *cleanup { tokenizers::decoders::wordpiece::cleanup(&text) } else { text });
            }
            Self::Suffix { suffix, last } => {
                if let Some(token) = last.replace(token.to_owned()) {
                    next(&token.replace(&*suffix, " "));
                }
            }
            Self::Spaces { first } => {
                if !std::mem::replace(first, false) {
                    next(" ");
                }
                next(token);
            }
        }
    }

    fn finish(&mut self, next: &mut dyn FnMut(&str)) {
        match self {
            Self::ByteFallback(pending) => pending.drain(..).for_each(|_| next("\u{fffd}")),
            Self::ByteLevel(pending) if !pending.is_empty() => next("\u{fffd}"),
            Self::Suffix { suffix, last: Some(token) } => next(&token.replace(&*suffix, "")),
            _ => {}
        }
    }
}

fn feed(stages: &mut [Stage], token: &str, text: &mut String) {
    match stages.split_first_mut() {
        Some((stage, rest)) => stage.push(token, &mut |token| feed(rest, token, text)),
        None => text.push_str(token),
    }
}

/// How many U+FFFD the bytes of a broken character become.
#[derive(Clone, Copy)]
enum Invalid {
    /// One, as `String::from_utf8_lossy` does it.
    Once,
    /// One for each byte.
    EachByte,
}

/// Moves whole characters out of `pending`, and bytes that no later byte makes a character. The beginning of a character
/// stays.
fn take_characters(pending: &mut Vec<u8>, invalid: Invalid, text: &mut String) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&pending[done..]) {
            Ok(valid) => {
                text.push_str(valid);
                pending.clear();
                return;
            }
            Err(error) => {
                let valid = done + error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&pending[done..valid]));
                let Some(length) = error.error_len() else {
                    pending.drain(..valid);
                    return;
                };
                let count = match invalid {
                    Invalid::Once => 1,
                    Invalid::EachByte => length,
                };
                text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
                done = valid + length;
            }
        }
    }
}

/// The byte of a token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The bytes of a token of byte-level BPE. A token with a character that stands for no byte, as added tokens can have, is
/// its own text.
fn level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(level_byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte that a character stands for in byte-level BPE: printable Latin-1 for itself, and those from U+0100 on for the
/// bytes that are not printable, in order.
fn level_byte(character: char) -> Option<u8> {
    match character as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121) as u8 + 0x7f),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..=0x143).filter_map(char::from_u32).filter_map(level_byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(level_bytes("Ġhi\u{10a}"), b" hi\n");
        assert_eq!(level_bytes("<|日|>"), "<|日|>".as_bytes());
    }

    #[test]
    fn a_step_that_needs_a_whole_token_is_not_done_in_parts() {
        let fuse = r#"{"type":"Fuse"}"#;
        let of = |parts: &[&str]| {
            let text = format!(r#"{{"type":"Sequence","decoders":[{}]}}"#, parts.join(","));
            steps(&serde_json::from_str(&text).unwrap())
        };
        assert!(of(&[fuse, r#"{"type":"Replace","pattern":{"String":"▁"},"content":" "}"#]).is_some());
        assert_eq!(of(&[fuse, r#"{"type":"Replace","pattern":{"String":"ab"},"content":" "}"#]), None);
        assert_eq!(of(&[r#"{"type":"Replace","pattern":{"Regex":"a+"},"content":" "}"#]), None);
        assert_eq!(of(&[fuse, r#"{"type":"ByteFallback"}"#]), None);
        assert_eq!(of(&[r#"{"type":"ByteFallback"}"#, r#"{"type":"BPEDecoder","suffix":"</w>"}"#]), None);
        assert_eq!(of(&[r#"{"type":"CTC","pad_token":"a","word_delimiter_token":"|","cleanup":true}"#]), None);
    }

    #[test]
    fn the_bytes_of_tokens() {
        let llama = [
            Step::Replace { pattern: "▁".to_owned(), content: " ".to_owned() },
            Step::ByteFallback,
            Step::Fuse,
            Step::Strip { content: ' ', start: 1, stop: 0 },
        ];
        assert_eq!(token_bytes(&llama, "▁the"), b" the");
        assert_eq!(token_bytes(&llama, "<0xE2>"), [0xe2]);
        assert_eq!(token_bytes(&llama, "<0xE>"), b"<0xE>");
        assert_eq!(token_bytes(&[Step::ByteLevel], "Ã"), [0xc3]);
    }
}
