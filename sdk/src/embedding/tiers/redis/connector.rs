//! Connections to nodes, and requests about the cluster.

use std::fs;
use std::path::Path;
use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, Connection, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, RedisResult,
    TlsCertificates, Value,
};

use super::address::SLOTS;
use super::commands::SCRIPTS;
use crate::embedding::options::{Address, REDIS, RedisOptions, TlsOptions};
use crate::error::{Error, Result, Status};

/// The least time limit for connecting. It takes longer than an answer, because of the handshake, but is rare.
const LEAST_CONNECT: Duration = Duration::from_millis(250);

/// The settings of all connections.
pub(super) struct Connector {
    settings: RedisConnectionInfo,
    certificates: Option<TlsCertificates>,
    timeout: Duration,
}

/// A range of slots, and the node that has them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) address: Address,
}

impl Connector {
    pub(super) fn new(options: &RedisOptions) -> Result<Self> {
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if !options.user.is_empty() {
            settings = settings.set_username(&options.user);
        }
        if !options.password.reveal().is_empty() {
            settings = settings.set_password(options.password.reveal());
        }
        let certificates = options.tls.as_ref().map(read).transpose()?;
        let connector = Self { settings, certificates, timeout: options.timeout };
        // Checks the certificates: later, bad ones would look like a node that is down.
        let nowhere = Address { host: "localhost".into(), port: 1 };
        connector.client(&nowhere).map_err(|error| {
            let message = format!("the certificates can not be used: {error}. Check that the files are in PEM");
            Error::invalid(format!("{REDIS}.tls"), message)
        })?;
        Ok(connector)
    }

    fn client(&self, address: &Address) -> RedisResult<Client> {
        let Address { host, port } = address.clone();
        let place = match self.certificates {
            Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(host, port),
        };
        let info = place.into_connection_info()?.set_redis_settings(self.settings.clone());
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(tcp);
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    /// A connection with the time limit for reads and writes.
    pub(super) fn connect(&self, address: &Address) -> RedisResult<Connection> {
        let connection = self.client(address)?.get_connection_with_timeout(self.timeout.max(LEAST_CONNECT))?;
        connection.set_read_timeout(Some(self.timeout))?;
        connection.set_write_timeout(Some(self.timeout))?;
        Ok(connection)
    }

    /// A connection to a node that has our scripts.
    pub(super) fn connect_with_scripts(&self, address: &Address) -> RedisResult<Connection> {
        let mut connection = self.connect(address)?;
        load_scripts(&mut connection)?;
        Ok(connection)
    }

    /// Asks a node for the slots of all nodes.
    pub(super) fn ranges(&self, address: &Address) -> RedisResult<Vec<Range>> {
        let mut connection = self.connect(address)?;
        let slots = redis::cmd("CLUSTER").arg("SLOTS").query(&mut connection)?;
        Ok(parse(&slots, address))
    }
}

fn read(tls: &TlsOptions) -> Result<TlsCertificates> {
    // Without a default, rustls panics if the program links a second provider. A default that the program has set
    // stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let file = |path: &Path| {
        fs::read(path).map_err(|error| {
            let message = format!("{} can not be read: {error}. Check the path and the permissions", path.display());
            Error::new(Status::Io, message).about(format!("{REDIS}.tls"))
        })
    };
    let client = tls.client.as_ref().map(|(certificate, key)| {
        Ok::<_, Error>(ClientTlsConfig { client_cert: file(certificate)?, client_key: file(key)? })
    });
    let root_cert = tls.authorities.as_deref().map(file).transpose()?;
    Ok(TlsCertificates { client_tls: client.transpose()?, root_cert })
}

/// Whether the node reports a healthy cluster.
pub(super) fn is_healthy(connection: &mut Connection) -> RedisResult<bool> {
    let info: String = redis::cmd("CLUSTER").arg("INFO").query(connection)?;
    Ok(info.contains("cluster_state:ok"))
}

/// Loads our scripts into the node.
pub(super) fn load_scripts(connection: &mut Connection) -> RedisResult<()> {
    SCRIPTS.iter().try_for_each(|script| script.load(connection).map(drop))
}

/// Parses the answer to CLUSTER SLOTS. Ranges that are not as documented are skipped: no node has their slots then.
fn parse(slots: &Value, asked: &Address) -> Vec<Range> {
    let Value::Array(ranges) = slots else { return Vec::new() };
    let mut ranges: Vec<_> = ranges.iter().filter_map(|range| parse_range(range, asked)).collect();
    ranges.sort_by_key(|range| range.first);
    ranges
}

fn parse_range(range: &Value, asked: &Address) -> Option<Range> {
    // First slot, last slot, the primary node, the replicas.
    let Value::Array(range) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = range.as_slice() else { return None };
    let [host, Value::Int(port), ..] = primary.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        _ => "",
    };
    let host = match host {
        "?" => return None,
        // The node does not know its own name: use the one by which it was found.
        "" => asked.host.clone(),
        host => host.into(),
    };
    let address = Address { host, port: u16::try_from(*port).ok()? };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    (first <= last && last < SLOTS).then_some(Range { first, last, address })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: i64, last: i64, host: Value) -> Value {
        let node = Value::Array(vec![host, Value::Int(7000), Value::BulkString(b"id".into()), Value::Array(vec![])]);
        Value::Array(vec![Value::Int(first), Value::Int(last), node.clone(), node])
    }

    #[test]
    fn slots_are_read() {
        let name = |host: &str| Value::BulkString(host.into());
        let asked = Address { host: "asked".into(), port: 1 };
        let slots = Value::Array(vec![
            range(100, 199, name("b")),
            range(0, 99, Value::Nil),
            range(200, 299, name("?")),
            range(300, 70_000, name("c")),
            range(300, 16_384, name("c")),
            range(301, 300, name("c")),
            Value::Int(3),
        ]);
        let address = |host: &str| Address { host: host.into(), port: 7000 };
        let expected = [
            Range { first: 0, last: 99, address: address("asked") },
            Range { first: 100, last: 199, address: address("b") },
        ];
        assert_eq!(parse(&slots, &asked), expected);
        assert_eq!(parse(&Value::Nil, &asked), []);
    }

    #[test]
    fn bad_certificates_are_named() {
        let tls = |path: &str| RedisOptions {
            nodes: vec![Address { host: "localhost".into(), port: 1 }],
            tls: Some(TlsOptions { authorities: Some(path.into()), client: None }),
            ..Default::default()
        };
        let error = Connector::new(&tls("/no/such.pem")).err().unwrap();
        assert!(
            error.argument() == Some("EmbeddingOptions.tiers.redis.tls") && error.message().contains("/no/such.pem"),
            "{error}"
        );

        let folder = pagoda_test_support::Folder::new();
        let path = folder.path().join("bad.pem");
        fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        let error = Connector::new(&tls(path.to_str().unwrap())).err().unwrap();
        assert!(
            error.argument() == Some("EmbeddingOptions.tiers.redis.tls") && error.message().contains("PEM"),
            "{error}"
        );
    }
}
