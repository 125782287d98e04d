//! A server, from its configuration to its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pagoda::{Error, Result, Status};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

use crate::access::Keys;
use crate::config::{Config, KeysFrom};
use crate::drain::{Signals, drain};
use crate::files::allow_files;
use crate::listen::{Connections, accept};
use crate::logging;
use crate::models::Models;
use crate::page::watch;
use crate::routes::router;
use crate::state::State;
use crate::tls::acceptor;
use crate::traces::Traces;

/// How long connections have to close after the last request.
const CLOSING: Duration = Duration::from_secs(1);

/// A server whose models are open.
pub struct Server {
    runtime: Runtime,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    state: Arc<State>,
    signals: Signals,
}

impl Server {
    /// Takes the port, and opens the models.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a configuration that can not be used. IO if the port is not free. The errors of opening models. INTERNAL
    /// if signals can not be received.
    pub fn open(config: Config) -> Result<Self> {
        config.check()?;
        let keys = match &config.keys {
            Some(KeysFrom::File(path)) => Some(Keys::from_file(path)?),
            Some(KeysFrom::Variable(name)) => Some(Keys::from_variable(name)?),
            None => None,
        };
        let tls = config.tls.as_ref().map(acceptor).transpose()?;
        logging::start(config.log, &config.log_level)?;
        // Half of the cores: the others are the models'. Two threads that share the requests of few clients only wake each other.
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.enable_all().thread_name("pagoda-http").worker_threads(threads).build();
        let runtime =
            runtime.map_err(|error| Error::new(Status::Internal, format!("no threads can be started: {error}")))?;
        let listen = config.listen.as_str();
        let bound = runtime.block_on(async {
            let listener = TcpListener::bind(listen).await?;
            listener.local_addr().map(|address| (listener, address))
        });
        let (listener, address) = bound.map_err(|error| {
            let (status, what) = match error.kind() {
                std::io::ErrorKind::InvalidInput => {
                    (Status::InvalidArgument, "expected an address and a port such as 127.0.0.1:8000".to_owned())
                }
                std::io::ErrorKind::AddrInUse => {
                    (Status::Io, "another program has this port: choose another one".to_owned())
                }
                _ => (Status::Io, error.to_string()),
            };
            Error::new(status, format!("{listen} can not be listened on: {what}")).about("--listen")
        })?;
        let models = Models::open(&config.models)?;
        allow_files(config.limits.connections);
        let traces = config.traces.as_ref().map(|traces| Arc::new(Traces::start(traces, runtime.handle())));
        let state = Arc::new(State::new(models, keys, traces, config));
        // From here on a signal drains. Before, it ends the process, which opens its models.
        let signals = {
            let _inside = runtime.enter();
            Signals::receive()?
        };
        Ok(Self { runtime, listener, address, tls, state, signals })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens and what it serves, in one line.
    pub fn describe(&self) -> String {
        let models: Vec<String> =
            self.state.models.all().iter().map(|served| format!("{} ({})", served.name, served.kind.name())).collect();
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}", self.address);
        format!("listening on {url}, serving {}; the page is {url}/", models.join(", "))
    }

    /// Answers requests until SIGTERM or SIGINT, then ends: requests that run may end, up to a deadline, and keys and values
    /// are written to their stores.
    pub fn run(self) {
        let Self { runtime, listener, address: _, tls, state, mut signals } = self;
        let router = router(Arc::clone(&state));
        runtime.block_on(async {
            tokio::spawn(watch(Arc::clone(&state)));
            let connections = Connections::default();
            let end = async {
                signals.next().await;
                drain(&state, signals).await;
            };
            // Connections are accepted until the end: a load balancer asks whether the server is ready.
            tokio::select! {
                () = accept(&listener, tls.as_ref(), router, &state.limits, &connections) => {}
                () = end => {}
            }
            drop(listener);
            let _ = tokio::time::timeout(CLOSING, connections.end()).await;
            if let Some(traces) = &state.traces {
                traces.flush().await;
            }
        });
        runtime.shutdown_timeout(CLOSING);
        // The models close here, and write what they keep.
        drop(state);
    }
}
