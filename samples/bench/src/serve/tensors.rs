//! A tensor of a megabyte to a model that gives it back, over gRPC; against the copies that no server on a socket can do without.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use pagoda::{ElementType, Result};
use pagoda_test_support::{Dim, Folder, Graph};

use super::super::{Row, side_by_side};
use super::calls::Calls;
use super::process::{NAME, Server, failed, unexpected};

const FLOATS: usize = 256 << 10;
const BYTES: usize = 4 * FLOATS;
const ROUNDS: usize = 40;

/// The time of a call, and of an echo over a socket with two copies in memory: into a tensor, and out of another.
pub fn measure(threads: u32) -> Result<Row> {
    let folder = Folder::new();
    let (element, any) = (ElementType::F32 as i32, [Dim::Is(FLOATS as i64)]);
    let graph = Graph::new().input("x", element, &any).node("Identity", &["x"], &["y"], &[]).output("y", element, &any);
    let model = folder.path().join("identity.onnx");
    std::fs::write(&model, graph.to_bytes()).map_err(failed)?;
    let server = Server::start(&model, threads)?;
    let mut calls = Calls::new(&server, "/inference.GRPCInferenceService/ModelInfer")?;
    let tensor: Vec<u8> = (0..FLOATS).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let message = message(&tensor);
    let mut answer = Vec::new();
    calls.call(&message, &mut answer)?;
    if !answer.ends_with(&tensor) {
        return Err(unexpected("another tensor"));
    }
    let mut echo = echo()?;
    let mut back = vec![0; BYTES];
    let (value, baseline) = side_by_side(
        ROUNDS,
        || calls.call(&message, &mut answer),
        || {
            echo.write_all(&tensor).map_err(failed)?;
            echo.read_exact(&mut back).map_err(failed)
        },
    )?;
    Ok(Row {
        bench: "serve",
        case: "gRPC infer of a tensor of 1 MiB, goal 0.5".into(),
        value: value * 1e6,
        unit: "us",
        baseline: baseline * 1e6,
        baseline_name: "echo by TCP and 2 copies",
        ratio: baseline / value,
    })
}

/// A server that copies what it gets into another buffer, that into a third, and sends it.
fn echo() -> Result<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let stream = TcpStream::connect(listener.local_addr().map_err(failed)?).map_err(failed)?;
    let (mut other, _) = listener.accept().map_err(failed)?;
    for socket in [&stream, &other] {
        socket.set_nodelay(true).map_err(failed)?;
    }
    std::thread::spawn(move || {
        let [mut read, mut tensor, mut written] = [(); 3].map(|()| vec![0_u8; BYTES]);
        while other.read_exact(&mut read).is_ok() {
            tensor.copy_from_slice(&read);
            written.copy_from_slice(&tensor);
            if other.write_all(&written).is_err() {
                break;
            }
        }
    });
    Ok(stream)
}

/// A `ModelInferRequest` in its frame.
fn message(tensor: &[u8]) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| {
        let mut field = vec![number << 3 | 2];
        varint(bytes.len(), &mut field);
        field.extend_from_slice(bytes);
        field
    };
    let mut shape = Vec::new();
    varint(FLOATS, &mut shape);
    let input = [field(1, b"x"), field(2, b"FP32"), field(3, &shape)].concat();
    let body = [field(1, NAME.as_bytes()), field(5, &input), field(7, tensor)].concat();
    let mut message = vec![0];
    message.extend((body.len() as u32).to_be_bytes());
    message.extend(body);
    message
}

fn varint(mut number: usize, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}
