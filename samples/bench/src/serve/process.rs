//! A server in a process of its own.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pagoda::{Error, Result, Status};

/// The name of the model.
pub const NAME: &str = "model";

/// `pagoda serve`, until it is dropped.
pub struct Server {
    process: Child,
    address: String,
}

impl Server {
    /// Serves a model folder, or an ONNX file.
    pub fn start(model: &Path, threads: u32) -> Result<Self> {
        let program = std::env::current_exe().map_err(failed)?.with_file_name("pagoda");
        let mut process = Command::new(&program)
            .args(["serve", "--listen", "127.0.0.1:0", "--provider", "cpu", "--threads", &threads.to_string()])
            .arg(format!("{NAME}={}", model.display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Error::new(Status::Io, format!("{} does not start: {error}", program.display())))?;
        let output = process.stdout.take();
        let mut server = Self { process, address: String::new() };
        let mut line = String::new();
        BufReader::new(output.ok_or_else(|| unexpected("no output"))?).read_line(&mut line).map_err(failed)?;
        let found = line.split_once("http://").and_then(|(_, rest)| rest.split_once(','));
        server.address = found.map(|(address, _)| address.to_owned()).ok_or_else(|| unexpected(&line))?;
        Ok(server)
    }

    /// A connection to it.
    pub fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(&self.address).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(stream)
    }

    /// The number of its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn failed(error: std::io::Error) -> Error {
    Error::new(Status::Io, format!("the server can not be asked: {error}"))
}

pub fn unexpected(what: &str) -> Error {
    Error::new(Status::Io, format!("the server answers with {}", what.trim()))
}
