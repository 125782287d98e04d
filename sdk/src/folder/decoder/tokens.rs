//! Special tokens, the defaults of generation and the files of text, out of the files in which a checkpoint may say them.

use std::collections::HashMap;
use std::path::Path;

use super::document::{Document, Found, wrong};
use super::sizes::Configs;
use crate::error::{Error, Result, Status};
use crate::folder::generate::folder::{Generation, SpecialTokens, TextFiles};
use crate::folder::generate::read::MOST;
use crate::json::Json;

/// The file of the tokenizer.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// Where a chat template may be, in this order; JSON files have it as `chat_template`.
const TEMPLATES: [&str; 3] = ["chat_template.jinja", "chat_template.json", TOKENIZER_CONFIG];
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// What a folder says of texts.
pub(super) struct Texts {
    generation_config: Option<Document>,
    tokenizer: Document,
    tokenizer_config: Option<Document>,
    /// The ids of all tokens.
    vocabulary: HashMap<String, u32>,
}

impl Texts {
    /// Reads the files of a folder. The model has `vocab_size` logits.
    pub(super) fn read(folder: &Path, vocab_size: u32) -> Result<Self> {
        let tokenizer = Document::read(folder, TOKENIZER)?.ok_or_else(|| {
            let message = "there is no tokenizer.json in it: copy the one of the model's checkpoint, or make it with transformers \
                           (AutoTokenizer.from_pretrained(…).save_pretrained(…))";
            Error::new(Status::NotFound, message)
        })?;
        let vocabulary = vocabulary(&tokenizer, vocab_size)?;
        Ok(Self {
            generation_config: Document::read(folder, GENERATION_CONFIG)?,
            tokenizer,
            tokenizer_config: Document::read(folder, TOKENIZER_CONFIG)?,
            vocabulary,
        })
    }

    /// The files that were read.
    pub(super) fn files(&self) -> impl Iterator<Item = &'static str> {
        let others = [&self.generation_config, &self.tokenizer_config];
        others.into_iter().flatten().map(|document| document.name).chain([TOKENIZER])
    }

    /// Tokens with a meaning.
    pub(super) fn special(&self, configs: &Configs, vocab_size: u32) -> Result<SpecialTokens> {
        let token = |found: &Found<'_>| found.whole(0..=vocab_size - 1);
        let single = |name: &str| match self.id(configs, name) {
            Some(found) => token(&found).map(Some),
            None => self.by_text(name),
        };
        let mut eos = match self.id(configs, "eos") {
            None => Vec::new(),
            Some(found) => match found.list() {
                Some(list) => list.iter().map(token).collect::<Result<_>>()?,
                None => vec![token(&found)?],
            },
        };
        // The token that ends a turn of a chat may be one that the configurations do not call eos.
        eos.extend(self.by_text("eos")?.filter(|turn| !eos.contains(turn)));
        // Old checkpoints of Llama have -1 where there is none.
        let has_pad = self.id(configs, "pad").is_none_or(|found| *found.json() != Json::Whole(-1));
        let bos = single("bos")?;
        Ok(SpecialTokens {
            bos,
            eos,
            pad: if has_pad { single("pad")? } else { None },
            unk: self.by_text("unk")?,
            add_bos: bos.map_or(Ok(false), |bos| self.adds(bos))?,
        })
    }

    /// The entry for the id of a special token.
    fn id<'a>(&'a self, configs: &'a Configs, name: &str) -> Option<Found<'a>> {
        let key = format!("{name}_token_id");
        let generation = self.generation_config.as_ref().and_then(|document| document.at(&[&key]));
        generation.or_else(|| configs.genai(&["model", &key])).or_else(|| configs.model(&[&key]))
    }

    /// The id of a special token by its text.
    fn by_text(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.text(name)?.and_then(|text| self.vocabulary.get(text).copied()))
    }

    fn text(&self, name: &str) -> Result<Option<&str>> {
        let Some(config) = &self.tokenizer_config else { return Ok(None) };
        let key = format!("{name}_token");
        let Some(found) = config.at(&[&key, "content"]).or_else(|| config.at(&[&key])) else { return Ok(None) };
        found.text().map(Some)
    }

    /// Whether the tokenizer puts the token before a text.
    fn adds(&self, bos: u32) -> Result<bool> {
        if let Some(found) = self.tokenizer_config.as_ref().and_then(|config| config.at(&["add_bos_token"])) {
            return found.flag();
        }
        let processor = self.tokenizer.at(&["post_processor"]).map(|found| found.json());
        let steps = match processor.and_then(|processor| member(processor, "processors")) {
            Some(Json::List(steps)) => steps.iter().collect(),
            _ => Vec::from_iter(processor),
        };
        let first_of = |step: &&Json| {
            let Some(Json::List(single)) = member(step, "single") else { return None };
            let Json::Text(id) = member(member(single.first()?, "SpecialToken")?, "id")? else { return None };
            match member(member(member(step, "special_tokens")?, id)?, "ids") {
                Some(Json::List(ids)) => Some(ids.clone()),
                _ => None,
            }
        };
        // There are templates that add the eos token alone.
        Ok(steps.iter().filter_map(first_of).any(|ids| ids.contains(&Json::Whole(bos.into()))))
    }

    /// The defaults of requests: generation_config.json's, or those of genai_config.json.
    pub(super) fn generation(&self, configs: &Configs) -> Result<Generation> {
        let at = |key: &str| match &self.generation_config {
            Some(document) => document.at(&[key]),
            None => configs.genai(&["search", key]),
        };
        let whole = |key, least: u32| at(key).map(|found| found.whole(least..=MOST)).transpose();
        let real = |key, most| at(key).map(|found| found.real(0.0..=most)).transpose();
        let read = Generation {
            do_sample: at("do_sample").map(|found| found.flag()).transpose()?,
            temperature: real("temperature", f64::MAX)?,
            top_k: whole("top_k", 0)?,
            top_p: real("top_p", 1.0)?,
            min_p: real("min_p", 1.0)?,
            repetition_penalty: real("repetition_penalty", f64::MAX)?,
            no_repeat_ngram_size: whole("no_repeat_ngram_size", 0)?,
            max_new_tokens: whole("max_new_tokens", 1)?,
            min_new_tokens: whole("min_new_tokens", 0)?,
        };
        if let Some(penalty) = at("repetition_penalty").filter(|_| read.repetition_penalty == Some(0.0)) {
            // Logits are divided by it.
            return Err(penalty.expected("a number above 0"));
        }
        match (read.min_new_tokens, read.max_new_tokens, at("min_new_tokens")) {
            (Some(least), Some(most), Some(found)) if least > most => {
                Err(found.expected(&format!("at most `max_new_tokens`, {most}")))
            }
            _ => Ok(read),
        }
    }

    /// The tokenizer, and the chat template.
    pub(super) fn text_files(&self, folder: &Path) -> Result<TextFiles> {
        let texts = ["bos", "eos", "pad", "unk"].map(|name| Ok((format!("{name}_token"), self.text(name)?)));
        let texts = texts.into_iter().collect::<Result<Vec<_>>>()?;
        let named = texts.into_iter().filter_map(|(name, text)| Some((name, text?.to_owned())));
        Ok(TextFiles {
            tokenizer: TOKENIZER.to_owned(),
            chat_template: chat_template(folder)?,
            template_tokens: named.collect(),
        })
    }
}

/// The file with the chat template, if there is one.
fn chat_template(folder: &Path) -> Result<Option<String>> {
    for name in TEMPLATES {
        let path = folder.join(name);
        let has = match std::fs::read_to_string(&path) {
            Ok(text) if name.ends_with(".json") => {
                template_in(&text).map_err(|error| wrong(name, error.message()))?.is_some()
            }
            Ok(_) => true,
            Err(_) => false,
        };
        if has {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

/// The chat template in a JSON file: a text, or the one with the name `default` of a list. Errors name their place.
pub(in super::super) fn template_in(text: &str) -> Result<Option<String>> {
    let document = Document::parse("the chat template", text)?;
    let Some(found) = document.at(&["chat_template"]) else { return Ok(None) };
    let Json::List(list) = found.json() else { return found.text().map(|text| Some(text.to_owned())) };
    let is_default = |entry: &&Json| member(entry, "name") == Some(&Json::Text("default".to_owned()));
    match list.iter().find(is_default).and_then(|entry| member(entry, "template")) {
        Some(Json::Text(text)) => Ok(Some(text.clone())),
        _ => Err(found.expected("a text, or a list with a template that has the name \"default\"")),
    }
}

fn member<'a>(json: &'a Json, key: &str) -> Option<&'a Json> {
    let Json::Object(members) = json else { return None };
    members.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value)
}

/// The ids of all tokens. Added ones may be beyond the model's: tokenizers of models with images are shared with their text models.
fn vocabulary(tokenizer: &Document, vocab_size: u32) -> Result<HashMap<String, u32>> {
    let damaged = |what: &str| wrong(TOKENIZER, format!("{what}: it is damaged, or of another library"));
    let vocab = tokenizer.at(&["model", "vocab"]);
    let mut ids: HashMap<String, u32> = match vocab.map(|found| found.json()) {
        Some(Json::Object(members)) => {
            let id = |(text, id): &(String, Json)| Some((text.clone(), token_id(id)?));
            members
                .iter()
                .map(id)
                .collect::<Option<_>>()
                .ok_or_else(|| damaged("`model.vocab` has an id that is no number"))?
        }
        // Unigram has a list of [text, score].
        Some(Json::List(list)) => {
            let text = |(index, entry): (u32, &Json)| match entry {
                Json::List(pair) => match pair.first()? {
                    Json::Text(text) => Some((text.clone(), index)),
                    _ => None,
                },
                _ => None,
            };
            let all: Option<_> = (0..).zip(list).map(text).collect();
            all.ok_or_else(|| damaged("`model.vocab` is no list of texts with scores"))?
        }
        _ => return Err(damaged("there is no vocabulary under `model.vocab`")),
    };
    let added = match tokenizer.at(&["added_tokens"]).map(|found| found.json()) {
        Some(Json::List(added)) => added.as_slice(),
        _ => &[],
    };
    let text = |token: &Json| match (member(token, "content"), member(token, "id").and_then(token_id)) {
        (Some(Json::Text(text)), Some(id)) => Some((text.clone(), id)),
        _ => None,
    };
    let added: Option<Vec<_>> = added.iter().map(text).collect();
    let added = added.ok_or_else(|| damaged("an entry of `added_tokens` has no id or no content"))?;
    let is_added = |text: &str| added.iter().any(|(other, _)| other == text);
    let most = ids.iter().filter(|(_, id)| **id >= vocab_size).find(|(text, _)| !is_added(text));
    if let Some((text, id)) = most {
        let message = format!(
            "it has the token {id}, {text:?}, and the model has {vocab_size}, from 0 on: they do not belong together"
        );
        return Err(wrong(TOKENIZER, message));
    }
    ids.extend(added);
    Ok(ids)
}

fn token_id(json: &Json) -> Option<u32> {
    let Json::Whole(id) = json else { return None };
    u32::try_from(*id).ok()
}
