//! The Redis Cluster that has the embedding tables of a ranker.

use pagoda::embedding::{Address, RedisOptions, Secret, TierOptions, TlsOptions};
use pagoda::engine::TableOptions;
use pagoda::{Error, Result};
use serde::Deserialize;

/// Redis's own port.
const PORT: u16 = 6379;

/// A Redis Cluster that servers share. Rows that it does not have come from the model folder.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisConfig {
    /// Nodes through which the others are found, such as `10.0.0.1:7000`.
    pub nodes: Vec<String>,
    /// The user; Redis's default one if left out.
    pub user: Option<String>,
    /// The variable of the environment that has the password.
    pub password_variable: Option<String>,
    /// Whether connections are encrypted, with the authorities that this machine trusts.
    #[serde(default)]
    pub tls: bool,
}

impl RedisConfig {
    /// How an engine keeps its tables there.
    pub fn tables(&self) -> Result<TableOptions> {
        let default = RedisOptions::default();
        let redis = RedisOptions {
            nodes: self.nodes.iter().map(|node| address(node)).collect::<Result<_>>()?,
            user: self.user.clone().unwrap_or(default.user),
            password: self.password()?,
            tls: self.tls.then(TlsOptions::default),
            ..default
        };
        let tiers = TierOptions { memory: None, redis: Some(redis), disk: None };
        Ok(TableOptions { tiers: Some(tiers), ..TableOptions::default() })
    }

    fn password(&self) -> Result<Secret> {
        let Some(name) = &self.password_variable else { return Ok(Secret::default()) };
        let unset =
            |_| Error::invalid("redis.password_variable", format!("the variable {name} is not set, or not UTF-8"));
        std::env::var(name).map(Secret::new).map_err(unset)
    }
}

fn address(node: &str) -> Result<Address> {
    let wrong = || Error::invalid("redis.nodes", format!("{node:?} is no address such as \"10.0.0.1:7000\""));
    let (host, port) = match node.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
        _ => (node, PORT),
    };
    let host = host.trim_matches(['[', ']']);
    if host.is_empty() {
        return Err(wrong());
    }
    Ok(Address { host: host.to_owned(), port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_addresses() {
        let of = |node: &str| address(node).map(|address| (address.host, address.port));
        assert_eq!(of("10.0.0.1:7000").unwrap(), ("10.0.0.1".into(), 7000));
        assert_eq!(of("redis").unwrap(), ("redis".into(), 6379));
        assert_eq!(of("[::1]:7").unwrap(), ("::1".into(), 7));
        assert_eq!(of("::1").unwrap(), ("::1".into(), 6379));
        for wrong in ["", ":7", "a:b", "a:70000"] {
            assert!(of(wrong).unwrap_err().to_string().contains("is no address such as"), "{wrong}");
        }
    }
}
