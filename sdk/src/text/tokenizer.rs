//! Texts to token ids and back.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use super::decoder::{self, Decoder, Step};
use crate::error::{Error, Result, Status};

/// The largest number of ids. Tables have an entry for each, and a file with a mistyped id must not fill the memory.
const MAX_IDS: usize = 1 << 24;

/// A tokenizer, as Hugging Face's `tokenizer.json` describes it.
///
/// It is `Send` and `Sync`: all functions may be called from any number of threads at the same time.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// What errors call it: the file's path.
    name: String,
    /// `None` where the decoder has a step that needs the whole text.
    steps: Option<Vec<Step>>,
    /// The bytes of all tokens, one after the other; those of a token end at `ends[id]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

/// What an id is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No token: a gap in the vocabulary.
    Absent,
    Normal,
    /// A token that decoding can leave out.
    Special,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// `NotFound` and `Io` where the file can not be read, `Model` where it is not a tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|error| {
            let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            let what = "The folder of a language model has a tokenizer.json; check the path, or export the model again";
            Error::new(status, format!("the tokenizer {} can not be read: {error}. {what}", path.display()))
        })?;
        Self::load(&bytes, path.display().to_string())
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Model` where they are not a tokenizer.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::load(bytes, "(from memory)".to_owned())
    }

    fn load(bytes: &[u8], name: String) -> Result<Self> {
        let unusable = |error: &dyn Display| {
            let what = "It has to be a tokenizer.json of Hugging Face's tokenizers; export the model again";
            Error::new(Status::Model, format!("the tokenizer {name} can not be used: {error}. {what}"))
        };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(|error| unusable(&error))?;
        // Files saved by a training run can have both; a prompt that is cut or filled up without a word is a wrong prompt.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| unusable(&error))?;

        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|error| unusable(&error))?;
        let steps = decoder::steps(&decoder);
        let mut tokens: Vec<(u32, String)> = inner.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let count = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        if count > MAX_IDS {
            return Err(unusable(&format!("the id {} is more than {}", count - 1, MAX_IDS - 1)));
        }
        let added = inner.get_added_vocabulary();
        let (mut bytes, mut ends, mut kinds) = (Vec::new(), vec![0; count], vec![Kind::Absent; count]);
        let mut tokens = tokens.iter().peekable();
        for id in 0..count {
            // Two tokens of one id: the added one counts, as in decode.
            while let Some((_, token)) = tokens.next_if(|(other, _)| *other as usize == id) {
                let is_last = tokens.peek().is_none_or(|(other, _)| *other as usize != id);
                let is_added = added.get_vocab().get(token) == Some(&(id as u32));
                if kinds[id] == Kind::Absent && (is_added || is_last) {
                    // An added token is text; it is no spelling of bytes, but the decoder takes it for one all the same.
                    bytes.extend(decoder::token_bytes(steps.as_deref().unwrap_or_default(), token));
                    kinds[id] = if added.is_special_token(token) { Kind::Special } else { Kind::Normal };
                }
            }
            ends[id] = u32::try_from(bytes.len()).map_err(|_| unusable(&"its tokens have more than 4 GiB"))?;
        }
        Ok(Self { inner, name, steps, bytes, ends, kinds })
    }

    /// The ids of a text. Special tokens in the text are taken as such. `add_special` adds those that the tokenizer puts
    /// around a text, such as the beginning of a sequence; the text of a chat template has them already.
    ///
    /// # Errors
    /// `Model` where the text can not be spelt with this vocabulary.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode_fast(text, add_special)).map_err(|error| {
            let what = "The vocabulary can not spell it, or tokenizer.json is damaged; export the model again";
            Error::new(Status::Model, format!("the tokenizer {} can not encode the text: {error}. {what}", self.name))
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids, without special tokens if `skip_special` is set. Bytes that are not UTF-8 become U+FFFD. An id that
    /// is not in the vocabulary has no text: models can have more ids than their tokenizer has tokens.
    ///
    /// # Errors
    /// `Model` where the decoder of the tokenizer fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let Some(mut decoder) = self.decoder() else { return self.decode_whole(ids, skip_special) };
        let mut text = String::new();
        for &id in ids {
            self.decode_next(&mut decoder, id, skip_special, &mut text);
        }
        decoder.finish(&mut text);
        Ok(text)
    }

    /// The text of ids by the crate `tokenizers`.
    fn decode_whole(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        // Some of its decoders fail on no token at all.
        if !ids.iter().any(|&id| self.is_shown(id, skip_special)) {
            return Ok(String::new());
        }
        guarded(|| self.inner.decode(ids, skip_special)).map_err(|error| {
            let what = "Its decoder is damaged; export the model again";
            let count = ids.len();
            Error::new(
                Status::Model,
                format!("the tokenizer {} can not decode {count} ids: {error}. {what}", self.name),
            )
        })
    }

    /// A decoder for one sequence, or `None` where decoding needs the whole sequence.
    pub(super) fn decoder(&self) -> Option<Decoder> {
        self.steps.as_deref().map(Decoder::new)
    }

    /// Appends the text that an id adds to a sequence.
    pub(super) fn decode_next(&self, decoder: &mut Decoder, id: u32, skip_special: bool, text: &mut String) {
        if self.is_shown(id, skip_special) {
            decoder.push(|| self.token(id), self.token_bytes(id).unwrap_or_default(), text);
        }
    }

    /// The bytes that an id stands for in the middle of a text, or `None` where the vocabulary does not have it. They need
    /// not be UTF-8: a token can end within a character.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        if *self.kinds.get(id)? == Kind::Absent {
            return None;
        }
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        Some(&self.bytes[start..self.ends[id] as usize])
    }

    /// How many ids there are: the largest one plus one. The vocabulary can have gaps.
    pub fn vocab_size(&self) -> usize {
        self.kinds.len()
    }

    /// The id of a token by its name in the vocabulary, e.g. `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The name of a token in the vocabulary, e.g. `Ġthe`.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether an id is a special token: one that `skip_special` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Special)
    }

    /// Whether decoding has anything to do with an id.
    fn is_shown(&self, id: u32, skip_special: bool) -> bool {
        match self.kinds.get(id as usize) {
            None | Some(Kind::Absent) => false,
            Some(Kind::Special) => !skip_special,
            Some(Kind::Normal) => true,
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("name", &self.name).field("vocab_size", &self.vocab_size()).finish()
    }
}

/// Calls into `tokenizers`, which panics over some damaged files.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(Error::from_panic(&*panic).message().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::text::random::Random;
    use crate::text::samples;

    #[test]
    fn texts_and_ids() {
        let tokenizer = samples::byte_fallback();
        let ids = tokenizer.encode("the b", true).unwrap();
        let names: Vec<String> = ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect();
        assert_eq!(names, ["<s>", "▁", "t", "h", "e", "▁", "b"]);
        assert_eq!(tokenizer.encode("the b", false).unwrap(), ids[1..]);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the b");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s> the b");
        assert_eq!(tokenizer.encode("a<|end|>", false).unwrap().last(), tokenizer.token_id("<|end|>").as_ref());
        assert_eq!(tokenizer.token_id("nothing"), None);
    }

    /// The file of this test cuts texts to 4 tokens and fills them up to 8.
    #[test]
    fn texts_are_neither_cut_nor_filled_up() {
        let tokenizer = samples::byte_fallback();
        assert_eq!(tokenizer.encode("a b a b a b", false).unwrap().len(), 12);
        assert!(tokenizer.encode("", false).unwrap().is_empty());
    }

    #[test]
    fn ids_that_are_not_in_the_vocabulary_have_no_text() {
        let tokenizer = samples::byte_fallback();
        let (end, far) = (tokenizer.token_id("<|end|>").unwrap(), tokenizer.token_id("far").unwrap());
        assert_eq!(tokenizer.vocab_size(), end.max(far) as usize + 1);
        let absent = [far - 1, end.max(far) + 1, u32::MAX];
        assert!(absent.iter().all(|&id| tokenizer.token_bytes(id).is_none()));
        assert_eq!(tokenizer.token_bytes(end), Some(b"<|end|>".as_slice()));
        assert_eq!(tokenizer.decode(&absent, false).unwrap(), "");
        assert!(tokenizer.is_special(end) && !tokenizer.is_special(absent[0]));
        assert!(!tokenizer.is_special(tokenizer.token_id("<tool ▁日>").unwrap()));
    }

    #[test]
    fn the_bytes_of_all_tokens_make_the_text() {
        for (name, tokenizer) in samples::tokenizers() {
            if !samples::spells_everything(name) {
                continue;
            }
            for text in samples::TEXTS {
                let ids = tokenizer.encode(text, false).unwrap();
                let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
                let bytes = String::from_utf8(bytes).unwrap();
                // Llama's tokenizer puts a space before the text.
                assert_eq!(
                    if name == "byte level" { &bytes } else { bytes.strip_prefix(' ').unwrap() },
                    *text,
                    "{name}"
                );
            }
        }
    }

    /// Against the crate `tokenizers`, which decodes whole sequences.
    #[test]
    fn random_ids_decode_as_by_the_reference() {
        for (name, tokenizer) in samples::tokenizers() {
            let mut random = Random::new(29);
            let replacement = tokenizer.token_id("\u{fffd}");
            for case in 0..500 {
                let skip_special = case % 2 == 0;
                let ids: Vec<u32> = (0..case % 40).map(|_| random.below(tokenizer.vocab_size() + 2) as u32).collect();
                let shown = ids.iter().copied().filter(|&id| tokenizer.is_shown(id, skip_special)).collect();
                // The one difference: a byte that belongs to no character does not harm its neighbours.
                let ids_of_reference = if name.contains("fallback") {
                    without_lone_bytes(&tokenizer, shown, replacement.unwrap())
                } else {
                    shown
                };
                let expected = tokenizer.decode_whole(&ids_of_reference, skip_special).unwrap();
                assert_eq!(tokenizer.decode(&ids, skip_special).unwrap(), expected, "{name} {ids:?}");
            }
        }
    }

    /// Puts the token U+FFFD in place of each byte token that does not belong to a whole character.
    fn without_lone_bytes(tokenizer: &Tokenizer, mut ids: Vec<u32>, replacement: u32) -> Vec<u32> {
        let byte = |id: u32| {
            let name = tokenizer.token(id).unwrap();
            (name.len() == 6 && name.starts_with("<0x")).then(|| tokenizer.token_bytes(id).unwrap()[0])
        };
        let mut at = 0;
        while at < ids.len() {
            let run: Vec<u8> = ids[at..].iter().map_while(|&id| byte(id)).take(4).collect();
            let character = (1..=run.len()).find(|&length| std::str::from_utf8(&run[..length]).is_ok());
            if character.is_none() && !run.is_empty() {
                ids[at] = replacement;
            }
            at += character.unwrap_or(1);
        }
        ids
    }

    #[test]
    fn threads_share_one() {
        let tokenizer = samples::byte_level();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for text in samples::TEXTS.iter().cycle().take(200) {
                        let ids = tokenizer.encode(text, false).unwrap();
                        assert_eq!(tokenizer.decode(&ids, true).unwrap(), *text);
                    }
                });
            }
        });
    }

    #[test]
    fn errors_name_the_file() {
        let error = Tokenizer::from_file("no/such/tokenizer.json").unwrap_err();
        assert_eq!(error.status(), Status::NotFound);
        assert!(error.message().contains("no/such/tokenizer.json"), "{error}");

        let folder = std::env::temp_dir().join(format!("pagoda-tokenizer-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("tokenizer.json");
        let mut far = samples::json_of(Value::Null);
        far["model"]["vocab"]["too far"] = json!(4_000_000_000_u32);
        for contents in ["", "{}", "[1, 2]", r#"{"model": {"type": "None"}}"#, &far.to_string()] {
            std::fs::write(&path, contents).unwrap();
            let error = Tokenizer::from_file(&path).unwrap_err();
            assert_eq!(error.status(), Status::Model);
            assert!(error.message().contains(&*path.to_string_lossy()), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn damaged_files_do_not_panic() {
        let good = samples::json_of(json!({"type": "ByteLevel"})).to_string();
        for part in ["\"decoder\":{", "\"model\":{", "\"post_processor\":{", "\"normalizer\":{"] {
            let damaged = good.replacen(part, &format!("{part}\"type\":7,\"x\":"), 1);
            assert_ne!(damaged, good);
            assert!(Tokenizer::from_bytes(damaged.as_bytes()).is_err());
        }
    }
}
