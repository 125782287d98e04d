//! The fields that say how a prompt is answered: how tokens are chosen, and where answers end.

use std::time::Duration;

use pagoda::engine::{BeamOptions, ContextEnd, EarlyStop, Grammar, KvPolicy};
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Result};

use crate::fields::{At, flag, items, once, plain, real, text, whole, wholes};
use crate::words::did_you_mean;

/// Sets the field of this name. Returns false if there is none.
pub fn set_field(request: &mut GenerateRequest, name: &str, value: &Json) -> Result<bool> {
    let narrow = |value| real(name, value).map(|number| number as f32);
    match name {
        "max_new_tokens" => request.max_new_tokens = Some(whole(name, value)?),
        "min_new_tokens" => request.min_new_tokens = Some(whole(name, value)?),
        "do_sample" => request.do_sample = Some(flag(name, value)?),
        "temperature" => request.temperature = Some(narrow(value)?),
        "top_k" => request.top_k = Some(whole(name, value)?),
        "top_p" => request.top_p = Some(narrow(value)?),
        "min_p" => request.min_p = Some(narrow(value)?),
        "repetition_penalty" => request.repetition_penalty = Some(narrow(value)?),
        "presence_penalty" => request.presence_penalty = narrow(value)?,
        "frequency_penalty" => request.frequency_penalty = narrow(value)?,
        "no_repeat_ngram_size" => request.no_repeat_ngram_size = Some(whole(name, value)?),
        "logit_bias" => request.logit_bias = read_biases(value)?,
        "forced_eos" => request.forced_eos = Some(whole(name, value)?),
        "ignore_eos" => request.ignore_eos = flag(name, value)?,
        "stop" => {
            request.stop = match value {
                Json::Text(text) => vec![text.clone()],
                _ => items(name, value, "texts", |path, value| text(path, value))?,
            }
        }
        "stop_tokens" => request.stop_tokens = wholes(name, value, "tokens")?,
        "include_stop" => request.include_stop = flag(name, value)?,
        "skip_special" => request.skip_special = Some(flag(name, value)?),
        "seed" => request.seed = Some(whole(name, value)?),
        "logprobs" => request.logprobs = Some(whole(name, value)?),
        "prompt_logprobs" => request.prompt_logprobs = Some(whole(name, value)?),
        "n" => request.n = Some(whole(name, value)?),
        "echo" => request.echo = flag(name, value)?,
        "session" => request.session = Some(text(name, value)?),
        "priority" => request.priority = whole(name, value)?,
        "timeout" => request.timeout = Some(read_timeout(value)?),
        "context_end" => {
            let word = text(name, value)?;
            let wrong = || Error::invalid(name, format!("{value} is neither \"refuse\" nor \"stop\""));
            request.context_end = context_end(&word).ok_or_else(wrong)?;
        }
        "kv_policy" => request.kv_policy = Some(read_policy(value)?),
        "max_draft" => request.max_draft = Some(whole(name, value)?),
        "grammar" => request.grammar = Some(Grammar::from_json(&plain(name, value)?)?),
        "beams" => request.beams = Some(read_beams(value)?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// `refuse` or `stop`.
pub fn context_end(word: &str) -> Option<ContextEnd> {
    match word {
        "refuse" => Some(ContextEnd::Refuse),
        "stop" => Some(ContextEnd::Stop),
        _ => None,
    }
}

/// `true`, `false` or `never`, as transformers has them.
pub fn early_stop(word: &str) -> Option<EarlyStop> {
    match word {
        "false" => Some(EarlyStop::WhenUnlikely),
        "true" => Some(EarlyStop::WhenFull),
        "never" => Some(EarlyStop::Never),
        _ => None,
    }
}

/// `4`, or an object with options: `{"width": 4, "length_penalty": 0.5, "early_stop": true}`.
fn read_beams(value: &Json) -> Result<BeamOptions> {
    const FIELDS: [&str; 3] = ["width", "length_penalty", "early_stop"];
    let members = match value {
        Json::Whole(_) => return Ok(BeamOptions::new(whole("beams", value)?)),
        Json::Object(members) => members,
        _ => {
            let message = format!("{value} is neither a number of beams nor an object such as {{\"width\": 4}}");
            return Err(Error::invalid("beams", message));
        }
    };
    let (mut beams, mut seen) = (BeamOptions::new(0), Vec::new());
    for (name, value) in members {
        let path = format!("beams.{name}");
        once(&mut seen, name, &path)?;
        match (name.as_str(), value) {
            ("width", _) => beams.width = whole(&path, value)?,
            ("length_penalty", _) => beams.length_penalty = real(&path, value)? as f32,
            ("early_stop", Json::Text(word)) if word == "never" => beams.early_stop = EarlyStop::Never,
            ("early_stop", Json::Flag(true)) => beams.early_stop = EarlyStop::WhenFull,
            ("early_stop", Json::Flag(false)) => beams.early_stop = EarlyStop::WhenUnlikely,
            ("early_stop", _) => {
                return Err(Error::invalid(path, format!("{value} is neither true nor false nor \"never\"")));
            }
            _ => return Err(Error::invalid(path, format!("no such option{}", did_you_mean(name, &FIELDS)))),
        }
    }
    if !seen.contains(&"width") {
        return Err(Error::invalid("beams.width", "missing: send the number of beams, such as 4"));
    }
    Ok(beams)
}

/// `{"42": -5}`, as JSON's names are texts, or `[[42, -5]]`.
fn read_biases(value: &Json) -> Result<Vec<(u32, f32)>> {
    const PATH: &str = "logit_bias";
    match value {
        Json::Object(members) => {
            let mut seen = Vec::new();
            let pairs = members.iter().map(|(token, bias)| {
                let path = format!("{PATH}.{token}");
                once(&mut seen, token, &path)?;
                let token = token.parse().map_err(|_| Error::invalid(&path, "the name is no token: expected a number"));
                Ok((token?, real(&path, bias)? as f32))
            });
            pairs.collect()
        }
        _ => items(PATH, value, "pairs of a token and a number", |path, pair| match pair {
            Json::List(pair) if pair.len() == 2 => {
                Ok((whole(At(path, 0), &pair[0])?, real(At(path, 1), &pair[1])? as f32))
            }
            _ => Err(Error::invalid(path, format!("{pair} is not a pair such as [42, -5]"))),
        }),
    }
}

/// `"lastrec"`, or an object with its name and options: `{"name": "lastrec", "protect": 40}`. The slots are the generator's.
fn read_policy(value: &Json) -> Result<KvPolicy> {
    const PATH: &str = "kv_policy";
    const FIELDS: [&str; 8] = [
        "name",
        "chunk_size",
        "protect",
        "protect_first_message",
        "grace_period",
        "keep_initial_fraction",
        "normalise",
        "score_share",
    ];
    let members = match value {
        Json::Text(name) => return Ok(KvPolicy::new(name, 0)),
        Json::Object(members) => members,
        _ => {
            let message =
                format!("{value} is neither a name such as \"lastrec\" nor an object with a name and options");
            return Err(Error::invalid(PATH, message));
        }
    };
    let (mut policy, mut seen) = (KvPolicy::new("", 0), Vec::new());
    for (name, value) in members {
        let path = format!("{PATH}.{name}");
        once(&mut seen, name, &path)?;
        match name.as_str() {
            "name" => policy.name = text(&path, value)?,
            "chunk_size" => policy.chunk_size = whole(&path, value)?,
            "protect" => policy.protect = Some(whole(&path, value)?),
            "protect_first_message" => policy.protect_first_message = flag(&path, value)?,
            "grace_period" => policy.grace_period = whole(&path, value)?,
            "keep_initial_fraction" => policy.keep_initial_fraction = real(&path, value)? as f32,
            "normalise" => policy.normalise = flag(&path, value)?,
            "score_share" => policy.score_share = real(&path, value)? as f32,
            _ => return Err(Error::invalid(path, format!("no such option{}", did_you_mean(name, &FIELDS)))),
        }
    }
    if policy.name.is_empty() {
        return Err(Error::invalid("kv_policy.name", "missing: send the name of a policy, such as \"lastrec\""));
    }
    Ok(policy)
}

fn read_timeout(value: &Json) -> Result<Duration> {
    let seconds = Duration::try_from_secs_f64(real("timeout", value)?).ok().filter(|seconds| !seconds.is_zero());
    seconds.ok_or_else(|| Error::invalid("timeout", format!("{value} is not a number of seconds above 0")))
}
