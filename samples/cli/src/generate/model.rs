//! The options of a generator on the command line, for `pagoda generate` and `pagoda chat`.

use std::path::{Path, PathBuf};

use pagoda::engine::{EngineStore, KvPolicy};
use pagoda::{Error, Generator, GeneratorOptions, KvFormat, KvSize, ModelOptions, Provider, Result};
use pagoda_requests::words::parse_bytes;

use crate::progress::Progress;
use crate::words::KV_FORMATS;

/// Where the model runs, and what it keeps.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the model")]
pub struct ModelArguments {
    /// Where the model runs; auto: on a GPU if there is one that can be used.
    #[arg(long, default_value = "auto", value_name = "WHERE", value_parser = ["auto", "cpu", "cuda"])]
    provider: String,
    /// Which GPU.
    #[arg(long, default_value_t = 0, value_name = "N")]
    device: u32,
    /// Compute threads; 0 = one for each core.
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: u32,
    /// Memory for keys and values, such as 512MiB: GPU memory if the model runs there.
    #[arg(long, default_value = "1GiB", value_name = "BYTES", value_parser = parse_bytes)]
    cache: u64,
    /// How keys and values are kept; by default as the model was exported. int8 takes about half of the memory of f16.
    #[arg(long, value_name = "FORMAT", value_parser = KV_FORMATS)]
    kv_format: Option<String>,
    /// Keep only --cache-length tokens of each sequence, however long it is: by default all are kept.
    #[arg(long, value_name = "NAME", requires = "cache_length", value_parser = POLICIES)]
    kv_policy: Option<String>,
    /// The tokens that --kv-policy keeps: a number, or one for each layer, with commas.
    #[arg(long, value_name = "N", requires = "kv_policy", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Vec<u32>,
    /// With --kv-policy: the tokens of a prompt that a step reads once --cache-length is reached.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunk_size: u32,
    /// With lastrec and smart-lastrec: the tokens at the beginning that always stay.
    #[arg(long, value_name = "N", requires = "kv_policy")]
    protect: Option<u32>,
    /// With h2o: the newest tokens, so many of them, stay whatever their weights.
    #[arg(long, default_value_t = 0, value_name = "N")]
    grace_period: u32,
    /// Guess tokens with this smaller model, which has the same tokenizer; without it they are looked up (--max-draft).
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    draft_model: Option<PathBuf>,
    /// Host memory for keys and values that leave --cache; 0 = none.
    #[arg(long, default_value = "0", value_name = "BYTES", value_parser = parse_bytes)]
    host_cache: u64,
    /// Keep the keys and values of sessions in this folder, and use those that are there.
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    pub store: Option<PathBuf>,
}

/// The policies of --kv-policy.
const POLICIES: [&str; 8] = ["dense", "lastrec", "smart-lastrec", "h2o", "h2o-vlen", "qh2o", "qh2o-vlen", "h2o-orig"];

/// How requests share the model.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of batches")]
pub struct BatchArguments {
    /// Compute equal beginnings of prompts for each request anew.
    #[arg(long)]
    no_sharing: bool,
    /// The maximum number of sequences that run together.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_batch: u32,
    /// The maximum number of tokens that one step computes, for all sequences together.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_batch_tokens: u32,
    /// How much longer a step may take because of new prompts, while others wait for their next tokens; 0 = any time.
    #[arg(long, default_value_t = 1.5, value_name = "TIMES")]
    max_stretch: f32,
}

impl ModelArguments {
    /// Opens the model of a folder. `batches` changes the options of batches.
    pub fn open(&self, folder: &Path, batches: impl FnOnce(&mut GeneratorOptions)) -> Result<Generator> {
        let _progress = Progress::spinner(format!("opening {}", folder.display()));
        let mut options = self.options();
        batches(&mut options);
        Generator::open(folder, options).map_err(in_flags)
    }

    fn options(&self) -> GeneratorOptions {
        let provider = match self.provider.as_str() {
            "cpu" => Provider::Cpu,
            "cuda" => Provider::Cuda,
            _ => Provider::Auto,
        };
        GeneratorOptions {
            model: ModelOptions {
                provider,
                device_id: self.device,
                intra_op_threads: self.threads,
                ..ModelOptions::default()
            },
            kv_size: KvSize::Bytes(self.cache),
            kv_format: self.kv_format.as_deref().and_then(KvFormat::named),
            kv_policy: self.policy(),
            draft_model: self.draft_model.clone(),
            host_bytes: self.host_cache,
            store: self.store.clone().map(EngineStore::new),
            ..GeneratorOptions::default()
        }
    }
}

impl ModelArguments {
    fn policy(&self) -> Option<KvPolicy> {
        let mut policy = KvPolicy::new(self.kv_policy.clone()?, *self.cache_length.first()?);
        if self.cache_length.len() > 1 {
            policy.cache_lengths.clone_from(&self.cache_length);
        }
        policy.chunk_size = self.chunk_size;
        (policy.protect, policy.grace_period) = (self.protect, self.grace_period);
        Some(policy)
    }
}

impl BatchArguments {
    /// Sets them in the options of a generator.
    pub fn set(&self, options: &mut GeneratorOptions) {
        options.share_prefixes = !self.no_sharing;
        options.max_batch = self.max_batch;
        options.max_batch_tokens = self.max_batch_tokens;
        options.max_stretch = self.max_stretch;
    }
}

/// The error in the words of the command line.
pub fn in_flags(error: Error) -> Error {
    // A name that begins another one comes after it.
    const FLAGS: [(&str, &str); 15] = [
        ("options.kv_size", "--cache"),
        ("options.kv_format", "--kv-format"),
        ("options.draft_model", "--draft-model"),
        ("options.kv_policy.cache_lengths", "--cache-length"),
        ("options.kv_policy.cache_length", "--cache-length"),
        ("options.kv_policy.protect", "--protect"),
        ("options.kv_policy.grace_period", "--grace-period"),
        ("options.kv_policy.name", "--kv-policy"),
        ("options.kv_policy", "--kv-policy"),
        ("options.store", "--store"),
        ("options.host_bytes", "--host-cache"),
        ("options.max_batch_tokens", "--max-batch-tokens"),
        ("options.max_batch", "--max-batch"),
        ("options.max_stretch", "--max-stretch"),
        ("options.model.device_id", "--device"),
    ];
    let replace = |text: &str| FLAGS.iter().fold(text.to_owned(), |text, (name, flag)| text.replace(name, flag));
    let said = Error::new(error.status(), replace(error.message()));
    match error.argument() {
        Some(argument) => said.about(replace(argument)),
        None => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_flags() {
        let error = in_flags(Error::invalid("options.max_batch_tokens", "more than options.kv_size has"));
        assert_eq!(error.to_string(), "--max-batch-tokens: more than --cache has");
        assert_eq!(in_flags(Error::invalid("n", "0 is too few")).to_string(), "n: 0 is too few");
    }
}
