//! From the command line to a server.

use std::process::ExitCode;

use pagoda::{Provider, Result};
use pagoda_server::{Config, KeysFrom, LogFormat, ModelConfig, Server};

use super::Arguments;
use crate::output;
use crate::progress::Progress;

/// Serves until a signal ends it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = config(arguments)?;
    let server = {
        let _progress = Progress::spinner("opening models");
        Server::open(config)?
    };
    output::line(server.describe())?;
    server.run();
    Ok(ExitCode::SUCCESS)
}

fn config(arguments: &Arguments) -> Result<Config> {
    let mut config = arguments.config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
    if let Some(listen) = &arguments.listen {
        config.listen.clone_from(listen);
    }
    if let Some(file) = &arguments.keys_file {
        config.keys = Some(KeysFrom::File(file.clone()));
    }
    if let Some(name) = &arguments.keys_variable {
        config.keys = Some(KeysFrom::Variable(name.clone()));
    }
    if let Some(format) = arguments.log.as_deref().and_then(LogFormat::named) {
        config.log = format;
    }
    config.models.extend(arguments.models.iter().map(|text| model(arguments, text)));
    Ok(config)
}

fn model(arguments: &Arguments, text: &str) -> ModelConfig {
    let named = ModelConfig::parse(text);
    ModelConfig {
        provider: match arguments.provider.as_str() {
            "cpu" => Provider::Cpu,
            "cuda" => Provider::Cuda,
            _ => Provider::Auto,
        },
        device: arguments.device,
        threads: arguments.threads,
        cache: arguments.cache,
        host_cache: arguments.host_cache,
        store: arguments.store.as_ref().map(|store| store.join(&named.name)),
        ..named
    }
}
