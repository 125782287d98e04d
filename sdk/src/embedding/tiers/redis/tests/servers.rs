//! A real cluster for one test.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pagoda_test_support::Folder;
use redis::FromRedisValue;

use super::super::connector::Connector;
use crate::embedding::options::{Address, RedisOptions, Secret, TlsOptions};

/// No more than this for anything that should come about by itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until something holds.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// How a cluster is set up.
#[derive(Clone, Default)]
pub(super) struct Setup {
    pub(super) password: Option<&'static str>,
    pub(super) tls: Option<Certificates>,
    /// Whether the first node has a replica.
    pub(super) replica: bool,
    /// No cluster at all, only nodes.
    pub(super) alone: bool,
}

/// Files of a certificate authority that signed one certificate for all nodes.
#[derive(Clone)]
pub(super) struct Certificates {
    pub(super) ca: PathBuf,
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// Three nodes, each with a third of the slots, and perhaps a replica of the first.
pub(super) struct Servers {
    pub(super) servers: Vec<Server>,
    setup: Setup,
    connector: Connector,
}

pub(super) struct Server {
    pub(super) port: u16,
    bus_port: u16,
    folder: Folder,
    child: Option<Child>,
}

impl Servers {
    pub(super) fn start() -> Self {
        Self::with(Setup::default())
    }

    pub(super) fn with(setup: Setup) -> Self {
        let count = if setup.replica { 4 } else { 3 };
        Self::prepare(setup, count).run()
    }

    /// Knows where the nodes will be, but does not start them.
    pub(super) fn prepare(setup: Setup, count: usize) -> Self {
        let servers = (0..count).map(|_| Server::new()).collect();
        let mut servers = Self { servers, connector: Connector::new(&options(&setup)).unwrap(), setup };
        servers.connector = Connector::new(&servers.options()).unwrap();
        servers
    }

    pub(super) fn run(mut self) -> Self {
        for number in 0..self.servers.len() {
            self.start_one(number);
        }
        if !self.setup.alone {
            self.join();
        }
        self
    }

    /// Options that find the cluster.
    pub(super) fn options(&self) -> RedisOptions {
        let node = |server: &Server| Address { host: "127.0.0.1".into(), port: server.port };
        RedisOptions { nodes: self.servers.iter().map(node).collect(), ..options(&self.setup) }
    }

    pub(super) fn start_one(&mut self, number: usize) {
        self.servers[number].start(&self.setup);
        eventually("the node answers", || {
            let ended = self.servers[number].child.as_mut().unwrap().try_wait().unwrap();
            let log = || std::fs::read_to_string(self.servers[number].folder.path().join("log")).unwrap_or_default();
            assert!(ended.is_none(), "redis-server ended: {ended:?} {}", log());
            self.try_ask::<String>(number, &["PING"]).is_ok()
        });
    }

    pub(super) fn kill(&mut self, number: usize) {
        let mut child = self.servers[number].child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGSTOP or SIGCONT.
    pub(super) fn signal(&self, number: usize, signal: i32) {
        let child = self.servers[number].child.as_ref().unwrap();
        // SAFETY: the process is our child and has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    }

    /// Runs a command on one node.
    pub(super) fn ask<T: FromRedisValue>(&self, number: usize, command: &[&str]) -> T {
        self.try_ask(number, command).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    fn try_ask<T: FromRedisValue>(&self, number: usize, command: &[&str]) -> redis::RedisResult<T> {
        let mut connection =
            self.connector.connect(&Address { host: "127.0.0.1".into(), port: self.servers[number].port })?;
        let mut packed = redis::cmd(command[0]);
        packed.arg(&command[1..]).query(&mut connection)
    }

    /// Makes one cluster of the nodes.
    fn join(&self) {
        for (number, slots) in [(0, 0..5461), (1, 5461..10_923), (2, 10_923..16_384)] {
            let (first, last) = (slots.start.to_string(), (slots.end - 1).to_string());
            let _: () = self.ask(number, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        for (number, server) in self.servers.iter().enumerate() {
            let _: () = self.ask(number, &["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            if number > 0 {
                let (port, bus_port) = (server.port.to_string(), server.bus_port.to_string());
                let _: () = self.ask(0, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port]);
            }
        }
        self.wait_until_well();
        if self.setup.replica {
            let first: String = self.ask(0, &["CLUSTER", "MYID"]);
            let _: () = self.ask(3, &["CLUSTER", "REPLICATE", &first]);
            eventually("the replica is in step", || {
                self.ask::<String>(3, &["INFO", "replication"]).contains("master_link_status:up")
                    && self.ask::<String>(0, &["INFO", "replication"]).contains("state=online")
            });
        }
    }

    pub(super) fn wait_until_well(&self) {
        let known = format!("cluster_known_nodes:{}\r\n", self.servers.len());
        for number in 0..self.servers.len() {
            eventually("the nodes know each other", || {
                let info: String = self.ask(number, &["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("slots_ok:16384") && info.contains(&known)
            });
        }
    }
}

impl Server {
    fn new() -> Self {
        Self { port: free_port(), bus_port: free_port(), folder: Folder::new(), child: None }
    }

    fn start(&mut self, setup: &Setup) {
        let mut command = Command::new("redis-server");
        let settings = ["--bind", "127.0.0.1", "--save", "", "--logfile", "log", "--cluster-node-timeout", "1000"];
        command.args(settings).arg("--dir").arg(self.folder.path());
        let full = ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"];
        command.args(full).args(["--cluster-replica-validity-factor", "0"]);
        if !setup.alone {
            command.args(["--cluster-enabled", "yes", "--cluster-port", &self.bus_port.to_string()]);
        }
        let port = self.port.to_string();
        match &setup.tls {
            None => command.args(["--port", &port]),
            Some(Certificates { ca, certificate, key }) => command
                .args(["--port", "0", "--tls-port", &port, "--tls-cluster", "yes"])
                .arg("--tls-ca-cert-file")
                .arg(ca)
                .arg("--tls-cert-file")
                .arg(certificate)
                .arg("--tls-key-file")
                .arg(key),
        };
        if let Some(password) = setup.password {
            command.args(["--requirepass", password, "--masterauth", password]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: prctl only sets a number of the new process. With it no server outlives the test, however it ends.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        self.child = Some(command.spawn().unwrap_or_else(|error| {
            panic!("redis-server can not be started: {error}. Install it (on Debian: apt-get install redis-server)")
        }));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn options(setup: &Setup) -> RedisOptions {
    let tls = setup.tls.as_ref().map(|files| TlsOptions {
        authorities: Some(files.ca.clone()),
        client: Some((files.certificate.clone(), files.key.clone())),
    });
    RedisOptions {
        password: setup.password.map(Secret::new).unwrap_or_default(),
        tls,
        // A busy machine takes its time; what is fast enough is not what these tests are about.
        timeout: Duration::from_secs(5),
        breaker_failures: 3,
        breaker_pause: Duration::from_millis(200),
        connections_per_node: 2,
        ..RedisOptions::default()
    }
}

/// Makes certificates for 127.0.0.1 with openssl.
pub(super) fn certificates(folder: &Path) -> Certificates {
    let openssl = |arguments: &str| {
        let run = Command::new("openssl").current_dir(folder).args(arguments.split(' ')).output();
        let run = run.unwrap_or_else(|error| {
            panic!("openssl can not be started: {error}. Install it (on Debian: apt-get install openssl)")
        });
        assert!(run.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&run.stderr));
    };
    std::fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    let new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!("req -x509 {new} -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"));
    openssl(&format!("req {new} -subj /CN=node -keyout node.key -out node.csr"));
    openssl("x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out node.pem");
    Certificates { ca: folder.join("ca.pem"), certificate: folder.join("node.pem"), key: folder.join("node.key") }
}

/// A free port. Not one that the system gives to connections that go out: a node could then not be
/// started again where it was.
fn free_port() -> u16 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_mul(97) + COUNT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (number % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
