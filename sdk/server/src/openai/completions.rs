//! `/v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use pagoda::engine::Prompt;
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Generator, Result, Status};
use pagoda_requests::fields::{flag, object, whole};
use pagoda_requests::generate::read_prompt;

use super::common::{self, Common};
use super::completion_objects::{Completion, CompletionStream};
use crate::failure::Failure;
use crate::gate::caller_of;
use crate::run::Running;
use crate::state::State;
use crate::{body, events, heavy, reply};

const NAMES: [&str; 6] = ["prompt", "max_tokens", "logprobs", "echo", "best_of", "suffix"];
/// The tokens of an answer where the request does not say, as OpenAI has it.
const MAX_TOKENS: u32 = 16;
/// The maximum number of prompts of a request.
const MOST_PROMPTS: usize = 256;

/// Answers a request.
pub async fn completions(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let text = body::read_text(request, &state.limits).await?;
    let Asked { common, prompts } = heavy::work(text.len(), || read(&text))?;
    state.models.wait(&common.model).await;
    let (served, generator) = state.models.generator(&common.model)?;
    let answering = common.answering;
    let (n, logprobs, echo) = (answering.n.unwrap_or(1), answering.logprobs.is_some(), answering.echo);
    let tokenizer = generator.tokenizer();
    let echoed = match common.stream {
        true => heavy::work(text.len(), || echoed(&generator, &answering, &prompts))?,
        false => Vec::new(),
    };
    let requests = prompts.into_iter().map(|prompt| GenerateRequest { prompt, ..answering.clone() }).collect();
    let running = Running::start(&generator, requests, &state.running, state.tally(&served, caller))?;
    if common.stream {
        let stream = CompletionStream::new(&served, n as usize, echoed, common.include_usage, Arc::clone(tokenizer));
        return Ok(events::response(running, stream));
    }
    let responses = running.responses().await?;
    Ok(reply::json(StatusCode::OK, &Completion::new(&served, responses, logprobs, echo, tokenizer)))
}

/// The texts that the answers to each prompt begin with. Streams of the generator do not have them.
fn echoed(generator: &Generator, answering: &GenerateRequest, prompts: &[Prompt]) -> Result<Vec<String>> {
    let text = |prompt: &Prompt| match answering.echo {
        true => generator.tokenizer().decode(&generator.tokens(prompt)?, answering.skip_special.unwrap_or(true)),
        false => Ok(String::new()),
    };
    prompts.iter().map(text).collect()
}

struct Asked {
    common: Common,
    prompts: Vec<Prompt>,
}

fn read(body: &str) -> Result<Asked> {
    let members = object(body, r#"{"model": "…", "prompt": "Once upon a time"}"#)?;
    let (mut prompts, mut most, mut logprobs, mut echo, mut best_of) = (Vec::new(), None, None, false, None);
    let mut common = common::read(&members, &NAMES, |name, value| {
        match name {
            "prompt" => prompts = read_prompts(value)?,
            "max_tokens" => most = Some(whole(name, value)?),
            "logprobs" => logprobs = Some(whole(name, value)?),
            "echo" => echo = flag(name, value)?,
            "best_of" => best_of = Some(whole::<u32>(name, value)?),
            "suffix" if *value == Json::Text(String::new()) => {}
            "suffix" => {
                let message = "this version does not fill in the middle: leave it out";
                return Err(Error::new(Status::Unsupported, message).about(name));
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    if prompts.is_empty() {
        return Err(Error::invalid("prompt", "missing: send a text, a list of tokens, or a list of either"));
    }
    let answering = &mut common.answering;
    if let Some(best_of) = best_of.filter(|&best_of| best_of != answering.n.unwrap_or(1)) {
        let message = format!("{best_of} is not `n`: this version returns all answers that it generates");
        return Err(Error::new(Status::Unsupported, message).about("best_of"));
    }
    if answering.session.is_some() && prompts.len() > 1 {
        let message = format!("{} prompts in a session, which goes on after one of them: send 1", prompts.len());
        return Err(Error::invalid("session", message));
    }
    answering.max_new_tokens = most.or(Some(MAX_TOKENS));
    (answering.logprobs, answering.echo) = (logprobs, echo);
    if echo {
        answering.prompt_logprobs = logprobs;
    }
    Ok(Asked { common, prompts })
}

/// A text, a list of tokens, or a list of either.
fn read_prompts(value: &Json) -> Result<Vec<Prompt>> {
    let Json::List(list) = value else { return Ok(vec![read_prompt("prompt", value)?]) };
    match list.first() {
        Some(Json::Text(_) | Json::List(_)) if list.len() > MOST_PROMPTS => {
            let message = format!("{} prompts are more than the {MOST_PROMPTS} of a request: send several", list.len());
            Err(Error::invalid("prompt", message))
        }
        Some(Json::Text(_) | Json::List(_)) => {
            list.iter().enumerate().map(|(at, value)| read_prompt(&format!("prompt[{at}]"), value)).collect()
        }
        _ => Ok(vec![read_prompt("prompt", value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_four_shapes() {
        let prompts = |json: &str| read(&format!(r#"{{"model": "m", "prompt": {json}}}"#)).unwrap().prompts;
        assert_eq!(prompts("\"a\""), ["a".into()]);
        assert_eq!(prompts("[\"a\", \"b\"]"), ["a".into(), "b".into()]);
        assert_eq!(prompts("[1, 2]"), [vec![1, 2].into()]);
        assert_eq!(prompts("[[1], [2, 3]]"), [vec![1].into(), vec![2, 3].into()]);
    }

    #[test]
    fn what_is_not_said_is_as_openai_has_it() {
        let answering = read(r#"{"model": "m", "prompt": "a"}"#).unwrap().common.answering;
        assert_eq!((answering.max_new_tokens, answering.logprobs, answering.echo), (Some(16), None, false));
        let body = r#"{"model": "m", "prompt": "a", "echo": true, "logprobs": 2, "best_of": 1}"#;
        let answering = read(body).unwrap().common.answering;
        assert_eq!((answering.prompt_logprobs, answering.logprobs, answering.echo), (Some(2), Some(2), true));
    }

    #[test]
    fn errors_name_the_field() {
        for (fields, message) in [
            (r#""promt": 1"#, "promt: no such field; did you mean `prompt`?"),
            (r#""stream": true"#, "prompt: missing"),
            (r#""prompt": []"#, "prompt: an empty list"),
            (r#""prompt": ["a", 1]"#, "prompt[1]: 1 is neither a text nor a list of tokens"),
            (r#""prompt": [[1], [-1]]"#, "prompt[1][0]: -1 is not a whole number"),
            (r#""prompt": "a", "suffix": "b""#, "suffix: this version does not"),
            (r#""prompt": "a", "best_of": 3"#, "best_of: 3 is not `n`"),
            (r#""prompt": ["a", "b"], "session": "s""#, "session: 2 prompts in a session"),
        ] {
            let error = read(&format!(r#"{{"model": "m", {fields}}}"#)).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{fields}\n{error}");
        }
    }
}
