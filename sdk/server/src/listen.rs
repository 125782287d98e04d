//! Connections: how many, by which version of HTTP, and how long a slow client may take.

use std::io::{Error, ErrorKind};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::activity::Activity;
use crate::config::Limits;
use crate::patience::Patient;

/// The maximum bytes of the head of a request.
const LONGEST_HEAD: usize = 64 << 10;
/// How long to wait when the process has no more file descriptors.
const EXHAUSTED: Duration = Duration::from_millis(50);
/// How long to wait for the rest of a first word.
const FIRST_WORD: Duration = Duration::from_millis(5);
/// How long a client has to agree that an idle connection ends.
const PARTING: Duration = Duration::from_secs(5);
/// What a client of HTTP/2 sends first begins so, and no method of HTTP/1 does.
const PREFACE: &[u8] = b"PRI ";
/// The requests of one connection at the same time, in HTTP/2.
const MOST_STREAMS: u32 = 256;
/// The bytes that a client may send before the server asks for more: a tensor of a megabyte comes at once.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// The bytes of one frame, and those that wait to be written. A message in one frame is not copied together.
const LARGEST_FRAME: u32 = STREAM_WINDOW;
const SEND_BUFFER: usize = 2 << 20;

/// The connections that are open.
pub struct Connections {
    ending: watch::Sender<bool>,
}

impl Default for Connections {
    fn default() -> Self {
        Self { ending: watch::Sender::new(false) }
    }
}

impl Connections {
    /// Lets each end after its requests, and waits for all.
    pub async fn end(&self) {
        self.ending.send_replace(true);
        self.ending.closed().await;
    }
}

/// Accepts connections until it is dropped. `connections` watches them. Without `tls` they are plain.
pub async fn accept(
    listener: &TcpListener,
    tls: Option<&TlsAcceptor>,
    router: Router,
    limits: &Limits,
    connections: &Connections,
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
        let serving = Serving {
            router: router.clone(),
            timeout: limits.header_timeout,
            write_timeout: limits.write_timeout,
            ending: connections.ending.subscribe(),
        };
        let tls = tls.cloned();
        tokio::spawn(async move {
            match tls {
                None => serving.plain(stream).await,
                Some(tls) => serving.encrypted(stream, &tls).await,
            }
            drop(permit);
        });
    }
}

/// What a connection needs.
struct Serving {
    router: Router,
    timeout: Duration,
    write_timeout: Duration,
    ending: watch::Receiver<bool>,
}

impl Serving {
    async fn plain(self, stream: TcpStream) {
        match tokio::time::timeout(self.timeout, speaks_http2(&stream)).await {
            Ok(Ok(true)) => self.http2(stream).await,
            Ok(Ok(false)) => self.http1(stream).await,
            Ok(Err(error)) => log::debug!("a connection ended: {error}"),
            Err(_) => log::debug!("a client sent nothing within {} s", self.timeout.as_secs_f64()),
        }
    }

    async fn encrypted(self, stream: TcpStream, tls: &TlsAcceptor) {
        match tokio::time::timeout(self.timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => self.http2(stream).await,
            Ok(Ok(stream)) => self.http1(stream).await,
            Ok(Err(error)) => log::debug!("a client and the server agree on no TLS: {error}"),
            Err(_) => log::debug!("a client did not begin TLS within {} s", self.timeout.as_secs_f64()),
        }
    }

    async fn http1(mut self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.timeout)
            .max_buf_size(LONGEST_HEAD)
            .serve_connection(
                TokioIo::new(Patient::new(stream, self.write_timeout)),
                TowerToHyperService::new(self.router),
            );
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = told(&mut self.ending) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        report(ended);
    }

    async fn http2(mut self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let activity = Arc::new(Activity::default());
        let (router, requests) = (TowerToHyperService::new(self.router), Arc::clone(&activity));
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            let (busy, answer) = (requests.begin(), router.call(request));
            async move {
                let response = answer.await?;
                Ok::<_, std::convert::Infallible>(response.map(|body| busy.answers(body)))
            }
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            // A client that is gone without a word is found.
            .keep_alive_interval(self.timeout)
            .keep_alive_timeout(self.timeout)
            .max_header_list_size(LONGEST_HEAD as u32)
            .max_concurrent_streams(MOST_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(LARGEST_FRAME)
            .max_send_buf_size(SEND_BUFFER)
            .serve_connection(TokioIo::new(Patient::new(stream, self.write_timeout)), service);
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = activity.unread(self.write_timeout) => {
                log::debug!("a client has left a response unread for {} s", 2.0 * self.write_timeout.as_secs_f64());
                return;
            }
            () = told(&mut self.ending) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = activity.idle(self.timeout) => {
                connection.as_mut().graceful_shutdown();
                tokio::time::timeout(PARTING, connection).await.unwrap_or(Ok(()))
            }
        };
        report(ended);
    }
}

/// Whether the client begins as one of HTTP/2 does. Nothing is taken from the connection.
async fn speaks_http2(stream: &TcpStream) -> Result<bool, Error> {
    let mut first = [0; PREFACE.len()];
    loop {
        let count = stream.peek(&mut first).await?;
        match PREFACE.starts_with(&first[..count]) {
            _ if count == 0 => return Err(ErrorKind::UnexpectedEof.into()),
            true if count < PREFACE.len() => tokio::time::sleep(FIRST_WORD).await,
            is_preface => return Ok(is_preface),
        }
    }
}

/// Waits until the server ends.
async fn told(ending: &mut watch::Receiver<bool>) {
    let _ = ending.wait_for(|ending| *ending).await;
}

fn report(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        // A client that hangs up in the middle of an answer is nothing to report.
        log::debug!("a connection ended: {error}");
    }
}
