//! Connections: how many, and how long a slow client may take.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use crate::config::Limits;

/// The maximum bytes of the head of a request.
const LONGEST_HEAD: usize = 64 << 10;
/// How long to wait when the process has no more file descriptors.
const EXHAUSTED: Duration = Duration::from_millis(50);

/// Accepts connections until it is dropped. `connections` watches them. Without `tls` they are plain.
pub async fn accept(
    listener: &TcpListener,
    tls: Option<&TlsAcceptor>,
    router: Router,
    limits: &Limits,
    connections: &GracefulShutdown,
) {
    let room = Arc::new(Semaphore::new(limits.connections as usize));
    loop {
        // A connection beyond the limit waits in the queue of the operating system.
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // The client went away before it was accepted.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => continue,
            Err(error) => {
                log::warn!("no connection can be accepted now: {error}");
                tokio::time::sleep(EXHAUSTED).await;
                continue;
            }
        };
        // Without it a token would wait for the client to acknowledge the one before.
        let _ = stream.set_nodelay(true);
        let (router, watcher, timeout) = (router.clone(), connections.watcher(), limits.header_timeout);
        let tls = tls.cloned();
        tokio::spawn(async move {
            match tls {
                None => serve(stream, router, timeout, watcher).await,
                Some(tls) => match tokio::time::timeout(timeout, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve(stream, router, timeout, watcher).await,
                    Ok(Err(error)) => log::debug!("a client and the server agree on no TLS: {error}"),
                    Err(_) => log::debug!("a client did not begin TLS within {} s", timeout.as_secs_f64()),
                },
            }
            drop(permit);
        });
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    header_timeout: Duration,
    watcher: Watcher,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        // A client that hangs up in the middle of an answer is nothing to report.
        log::debug!("a connection ended: {error}");
    }
}
