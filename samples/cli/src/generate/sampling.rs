//! How tokens are chosen and where answers end, on the command line.

use std::time::Duration;

use pagoda::GenerateRequest;

/// The fields of a request that `pagoda generate` and `pagoda chat` share.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of answers (the model's own defaults stand where one is left out)")]
pub struct SamplingArguments {
    /// The maximum number of tokens of an answer.
    #[arg(long, short = 'm', value_name = "N")]
    max_new_tokens: Option<u32>,
    /// The number of tokens before which an answer does not end by itself.
    #[arg(long, value_name = "N")]
    min_new_tokens: Option<u32>,
    /// Take the likeliest token each time: the same as --temperature 0.
    #[arg(long, conflicts_with = "temperature")]
    greedy: bool,
    /// The temperature of sampling: more is more varied; 0 = take the likeliest token.
    #[arg(long, short = 't', value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from so many likeliest tokens; 0 = from all.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Sample from the likeliest tokens that have this probability together.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from tokens with at least this part of the likeliest one's probability.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divide the logits of tokens that the prompt or the answer has; 1 = no penalty.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Subtract from the logits of tokens that the answer has.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens, as often as the answer has them.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Let no sequence of so many tokens come twice; 0 = any may.
    #[arg(long, value_name = "N")]
    no_repeat_ngram_size: Option<u32>,
    /// Add to the logit of a token: 42=-5. May be given several times.
    #[arg(long, value_name = "TOKEN=X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// The token that the last one of --max-new-tokens has to be.
    #[arg(long, value_name = "TOKEN")]
    forced_eos: Option<u32>,
    /// Go on after end-of-sequence tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// End the answer before this text. May be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// End the answer with this token. May be given several times.
    #[arg(long = "stop-token", value_name = "TOKEN")]
    stop_tokens: Vec<u32>,
    /// Keep the stop text in the answer.
    #[arg(long)]
    include_stop: bool,
    /// Show special tokens in the text.
    #[arg(long)]
    show_special: bool,
    /// The seed of sampling; the same seed gives the same tokens. Without it every answer has its own.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Guess up to so many tokens for one step, where the answer repeats what came before. The answer is the same.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    max_draft: Option<u32>,
    /// The time limit of an answer; it then has what was generated until then.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
}

impl SamplingArguments {
    /// A request with them.
    pub fn request(&self) -> GenerateRequest {
        GenerateRequest {
            max_new_tokens: self.max_new_tokens,
            min_new_tokens: self.min_new_tokens,
            temperature: if self.greedy { Some(0.0) } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            logit_bias: self.logit_bias.clone(),
            forced_eos: self.forced_eos,
            ignore_eos: self.ignore_eos,
            stop: self.stop.clone(),
            stop_tokens: self.stop_tokens.clone(),
            include_stop: self.include_stop,
            skip_special: self.show_special.then_some(false),
            seed: self.seed,
            timeout: self.timeout,
            max_draft: self.max_draft,
            ..GenerateRequest::default()
        }
    }
}

/// `42=-5`.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text.split_once('=').and_then(|(token, bias)| Some((token.parse().ok()?, bias.parse().ok()?)));
    pair.ok_or_else(|| format!("{text:?} is not a token and a number such as 42=-5"))
}

/// A time in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let seconds = seconds.filter(|seconds| !seconds.is_zero());
    seconds.ok_or_else(|| format!("{text:?} is not a number of seconds above 0, such as 1.5"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_and_times_are_read() {
        assert_eq!(bias("42=-5"), Ok((42, -5.0)));
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for text in ["", "42", "=1", "a=1", "42=b", "-1=2"] {
            assert!(bias(text).is_err(), "{text}");
        }
        for text in ["", "0", "-1", "soon", "inf", "NaN"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
