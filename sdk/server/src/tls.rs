//! TLS by rustls, with ring as its cryptography.

use std::path::Path;
use std::sync::Arc;

use pagoda::{Error, Result, Status};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;

/// Reads the files.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor> {
    let certificates: Vec<CertificateDer> = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect)
        .map_err(|error| unreadable("tls.certificate", &files.certificate, "a certificate", error))?;
    if certificates.is_empty() {
        return Err(Error::invalid("tls.certificate", format!("{} has no certificate", files.certificate.display())));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| unreadable("tls.key", &files.key, "a private key", error))?;
    let unusable = |error: rustls::Error| {
        let (certificate, key) = (files.certificate.display(), files.key.display());
        Error::invalid("tls", format!("{certificate} and {key} can not be used together: {error}"))
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key))
        .map_err(unusable)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The error names the file, and nothing of what is in it.
fn unreadable(argument: &str, path: &Path, what: &str, error: pem::Error) -> Error {
    let path = path.display();
    match error {
        pem::Error::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Error::new(Status::NotFound, format!("{path} does not exist")).about(argument)
        }
        pem::Error::Io(error) => Error::new(Status::Io, format!("{path} can not be read: {error}")).about(argument),
        _ => Error::invalid(argument, format!("{path} is not {what} in PEM")),
    }
}
