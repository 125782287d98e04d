//! include/pagoda.h is what the sources say, and libpagoda.so exports what the list says.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The files the header is made of, in the order a reader wants them.
const SOURCES: [&str; 12] = [
    "error.rs",
    "process.rs",
    "tensor.rs",
    "embedding.rs",
    "model.rs",
    "run.rs",
    "store.rs",
    "kv_options.rs",
    "kv.rs",
    "kv_lease.rs",
    "engine_options.rs",
    "engine.rs",
];

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn generated() -> String {
    let config = cbindgen::Config::from_file(Path::new(ROOT).join("include/cbindgen.toml")).expect("cbindgen.toml");
    let builder = SOURCES.iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        builder.with_src(Path::new(ROOT).join("sdk/src/ffi").join(source))
    });
    let mut header = Vec::new();
    builder.generate().expect("the sources can be read by cbindgen").write(&mut header);
    let header = String::from_utf8(header).expect("the header is UTF-8");
    tidy(&header)
}

/// Leaves out Rust's safety sections, which say for Rust what the prototypes say for C, and puts a comment of one line
/// on one line.
fn tidy(header: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut in_safety = false;
    for line in header.lines() {
        match line.trim() {
            "* # Safety" => in_safety = true,
            "*/" => {
                while lines.last().is_some_and(|last| last.trim() == "*") {
                    lines.pop();
                }
                in_safety = false;
                if lines.len() >= 2 && lines[lines.len() - 2].trim() == "/**" {
                    let text = lines.pop().expect("two lines");
                    let opening = lines.pop().expect("two lines");
                    lines.push(format!("{opening}{} */", text.trim().trim_start_matches('*')));
                } else {
                    lines.push(line.to_owned());
                }
            }
            _ if in_safety => {}
            _ => lines.push(line.to_owned()),
        }
    }
    let mut text = lines.join("\n") + "\n";
    while text.contains("\n\n\n") {
        text = text.replace("\n\n\n", "\n\n");
    }
    text
}

#[test]
fn the_header_is_current() {
    let header = generated();
    if std::env::var_os("PAGODA_BLESS").is_some() {
        std::fs::write(Path::new(ROOT).join("include/pagoda.h"), &header).expect("writing include/pagoda.h");
    }
    assert!(read("include/pagoda.h") == header, "include/pagoda.h is stale: run `make header`");
}

/// The symbols a library exports.
fn exports(library: &Path) -> Vec<String> {
    let output =
        Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(library).output().expect("nm runs");
    assert!(output.status.success(), "nm {}: {}", library.display(), String::from_utf8_lossy(&output.stderr));
    let mut names: Vec<String> = String::from_utf8(output.stdout)
        .expect("symbols are ASCII")
        .lines()
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect();
    names.sort();
    names
}

/// Where cargo put the libraries: beside this test.
fn library(name: &str) -> std::path::PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    test.parent().expect("a folder").join(name)
}

#[test]
fn exports_are_the_list() {
    let list: Vec<String> = read("tests/exports.txt").lines().map(str::to_owned).collect();
    assert_eq!(exports(&library("libpagoda.so")), list, "tests/exports.txt is the list of what libpagoda.so exports");
    let header = read("include/pagoda.h");
    for name in &list {
        assert!(header.contains(&format!("{name}(")), "{name} is not in the header");
    }
}

/// What pagoda.hpp does without, and why.
const NOT_IN_CPP: [(&str, &str); 2] = [
    ("pagoda_abi_version", "pagoda_abi_check compares it with the header's"),
    ("pagoda_error_code", "the call that made the error has returned it"),
];

#[test]
fn cpp_has_everything() {
    let mut cpp = String::new();
    for entry in std::fs::read_dir(Path::new(ROOT).join("bindings/cpp")).expect("bindings/cpp") {
        let path = entry.expect("a file of bindings/cpp").path();
        if path.extension().is_some_and(|end| end == "hpp") {
            cpp += &std::fs::read_to_string(path).expect("a header can be read");
        }
    }
    let words: HashSet<&str> = cpp.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    for name in read("tests/exports.txt").lines() {
        let without = NOT_IN_CPP.iter().any(|(listed, _)| *listed == name);
        assert!(words.contains(name) != without, "{name}: either pagoda.hpp uses it or the list here says why not");
    }
}

#[test]
fn the_soname_is_the_abi_version() {
    let output = Command::new("readelf").arg("-d").arg(library("libpagoda.so")).output().expect("readelf runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let soname = format!("[libpagoda.so.{}]", pagoda::ffi::PAGODA_ABI_VERSION);
    assert!(text.contains(&soname), "{soname} expected in:\n{text}");
}
