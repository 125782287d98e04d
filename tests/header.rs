//! include/pagoda.h is what the sources say, and libpagoda.so exports what the list says.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The sections of the header, in an order in which every type is declared before it is used: the title, what is in it,
/// and the files that it is made of. The items of a file keep their order.
const SECTIONS: [(&str, &str, &[&str]); 9] = [
    ("Statuses and errors", "How a call ended, and why.", &["error.rs"]),
    ("The library", "Versions, the log, the metrics, live objects.", &["process.rs"]),
    ("Tensors", "Typed arrays: the inputs and outputs of models.", &["tensor.rs"]),
    ("Embedding tables", "Rows by key: a cache over host memory, a Redis Cluster and disk.", &["embedding.rs"]),
    ("Models", "ONNX models, opened and run by themselves.", &["model.rs", "run.rs"]),
    ("Stores", "Histories on disk.", &["store.rs"]),
    ("Caches of keys and values", "The histories of users, as pages in a pool.", &["kv_options.rs", "kv.rs"]),
    ("Leases", "The part of a cache that a batch uses while a model runs.", &["kv_lease.rs"]),
    ("Engines", "Model folders, served: users and candidates in, scores out.", &["engine_options.rs", "engine.rs"]),
];

const OPENING: &str = "#ifndef PAGODA_H\n#define PAGODA_H\n\n#include <stddef.h>\n#include <stdint.h>\n\n\
    #ifdef __cplusplus\nextern \"C\" {\n#endif\n";
const CLOSING: &str = "#ifdef __cplusplus\n} /* extern \"C\" */\n#endif\n\n#endif /* PAGODA_H */\n";

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn generated() -> String {
    let config = cbindgen::Config::from_file(Path::new(ROOT).join("include/cbindgen.toml")).expect("cbindgen.toml");
    let sources = SECTIONS.iter().flat_map(|(_, _, files)| files.iter());
    let builder = sources.fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        builder.with_src(Path::new(ROOT).join("sdk/src/ffi").join(source))
    });
    let mut header = Vec::new();
    builder.generate().expect("the sources can be read by cbindgen").write(&mut header);
    let header = tidy(&String::from_utf8(header).expect("the header is UTF-8"));
    let header = header
        .replace("@MAJOR@", env!("CARGO_PKG_VERSION_MAJOR"))
        .replace("@MINOR@", env!("CARGO_PKG_VERSION_MINOR"))
        .replace("@PATCH@", env!("CARGO_PKG_VERSION_PATCH"));
    in_sections(&header)
}

/// Puts the items, which cbindgen sorts by their kind, into the sections. The INIT macro of a struct follows it.
fn in_sections(header: &str) -> String {
    let mut items: Vec<(String, &str)> = header.trim().split("\n\n").map(|item| (name_of(item), item)).collect();
    let mut text = items.remove(0).1.to_owned() + "\n\n" + OPENING;
    let mut take = |name: &str| {
        let at = items.iter().position(|(of, _)| of == name);
        at.map_or(String::new(), |at| format!("\n{}\n", items.remove(at).1))
    };
    for (title, about, files) in SECTIONS {
        text += &format!("\n/* ---- {title} {}\n * {about}\n */\n", "-".repeat(110 - title.len()));
        // The handles first.
        for file in files {
            for part in read(&format!("sdk/src/ffi/{file}")).split("\npub struct ").skip(1) {
                if let Some((name, _)) = part.split_once(" {\n    _private:") {
                    text += &take(name);
                }
            }
        }
        for file in files {
            if *file == "process.rs" {
                for part in ["", "_MAJOR", "_MINOR", "_PATCH", "_NUMBER"] {
                    text += &take(&format!("PAGODA_VERSION{part}"));
                }
            }
            let source = read(&format!("sdk/src/ffi/{file}"));
            for line in source.lines().filter(|line| line.starts_with("pub ")) {
                let name = line
                    .split(|c: char| c != '_' && !c.is_ascii_alphanumeric())
                    .find(|word| word.starts_with("pagoda_") || word.starts_with("PAGODA_"));
                let Some(name) = name else { continue };
                // The constants of a type stand together.
                let item = take(name);
                text += if line.starts_with("pub const")
                    && text.lines().last().is_some_and(|last| last.starts_with("#def"))
                {
                    item.trim_start_matches('\n')
                } else {
                    &item
                };
                if line.starts_with("pub struct") {
                    text += &take(&format!("{}_INIT", name.to_uppercase()));
                }
            }
        }
    }
    assert!(items.is_empty(), "these have no section: {items:?}");
    text + "\n" + CLOSING
}

/// What a part of the header declares.
fn name_of(item: &str) -> String {
    let code = if item.starts_with("/*") { item.split_once("*/").expect("its end").1.trim() } else { item };
    let word = |text: &str| -> String {
        text.chars().take_while(|&c| c == '_' || c.is_ascii_alphanumeric()).collect::<String>()
    };
    if let Some(rest) = code.strip_prefix("#define ") {
        return word(rest);
    }
    if code.starts_with("typedef") && !code.contains("(*") {
        let name = code.trim_end_matches(';').rsplit([' ', '\n']).next().expect("a name");
        return word(name);
    }
    // A function, or the type of one.
    code.find("pagoda_").map_or(String::new(), |_| {
        let open = if code.starts_with("typedef") { code.find("(*").expect("a type") + 2 } else { 0 };
        let end = code[open..].find(['(', ')']).expect("its end") + open;
        let start = code[..end].rfind("pagoda_").expect("its name");
        code[start..end].to_owned()
    })
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
                    let text = &lines[lines.len() - 1];
                    let joined = format!("{}{} */", lines[lines.len() - 2], text.trim().trim_start_matches('*'));
                    if joined.len() <= 120 {
                        lines.truncate(lines.len() - 2);
                        lines.push(joined);
                        continue;
                    }
                }
                lines.push(line.to_owned());
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
fn constants_begin_with_the_name_of_their_type() {
    let header = read("include/pagoda.h");
    let types: Vec<String> = header
        .lines()
        .filter_map(|line| line.strip_prefix("typedef int32_t ")?.strip_suffix(';'))
        .map(|name| name.to_uppercase() + "_")
        .collect();
    assert!(types.len() > 10, "{types:?}");
    let constants = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split_once(' '));
    let numbers = constants.filter(|(name, value)| {
        value.parse::<i32>().is_ok() && *name != "PAGODA_ABI_VERSION" && !name.starts_with("PAGODA_VERSION_")
    });
    for (name, _) in numbers {
        assert!(types.iter().any(|of| name.starts_with(of)), "{name} begins with the name of no type");
    }
}

#[test]
fn the_versions_are_those_of_the_package() {
    let header = read("include/pagoda.h");
    let version = env!("CARGO_PKG_VERSION");
    assert!(header.contains(&format!("#define PAGODA_VERSION \"{version}\"\n")), "{version}");
    let parts: Vec<u32> = version.split('.').map(|part| part.parse().expect("a number")).collect();
    for (name, part) in ["MAJOR", "MINOR", "PATCH"].iter().zip(&parts) {
        assert!(header.contains(&format!("#define PAGODA_VERSION_{name} {part}\n")), "{name} {part}");
    }
    let number = parts.iter().fold(0, |number, part| 1000 * number + part);
    assert_eq!(pagoda::ffi::pagoda_version_number(), number);
    // SAFETY: the text is static.
    let text = unsafe { std::ffi::CStr::from_ptr(pagoda::ffi::pagoda_version()) };
    assert_eq!(text.to_str(), Ok(version));
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
    ("pagoda_error_status", "the call that made the error has returned it"),
];

fn cpp() -> String {
    let mut cpp = String::new();
    for entry in std::fs::read_dir(Path::new(ROOT).join("bindings/cpp")).expect("bindings/cpp") {
        let path = entry.expect("a file of bindings/cpp").path();
        if path.extension().is_some_and(|end| end == "hpp") {
            cpp += &std::fs::read_to_string(path).expect("a header can be read");
        }
    }
    cpp
}

#[test]
fn cpp_has_everything() {
    let cpp = cpp();
    let words: HashSet<&str> = cpp.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    for name in read("tests/exports.txt").lines() {
        let without = NOT_IN_CPP.iter().any(|(listed, _)| *listed == name);
        assert!(words.contains(name) != without, "{name}: either pagoda.hpp uses it or the list here says why not");
    }
}

/// The fields of a struct of the header.
fn fields<'a>(header: &'a str, name: &str) -> Vec<&'a str> {
    let end = header.find(&format!("}} {name};")).unwrap_or_else(|| panic!("{name} is not in the header"));
    let body = &header[header[..end].rfind("typedef struct {").expect("its beginning")..end];
    let lines = body.lines().map(str::trim).filter(|line| line.ends_with(';') && !line.starts_with(['*', '/']));
    lines.filter_map(|line| line.trim_end_matches(';').rsplit([' ', '*']).next()).collect()
}

/// pagoda.hpp hands out structs of statistics as they are; it has structs of its own for the others.
#[test]
fn cpp_has_every_field() {
    let (header, cpp) = (read("include/pagoda.h"), cpp());
    let structs = header.lines().filter_map(|line| line.strip_prefix("} ")?.strip_suffix(';'));
    let structs: Vec<&str> = structs.filter(|name| !name.ends_with("_stats") && !name.ends_with("_user")).collect();
    assert!(structs.len() >= 9, "{structs:?}");
    for name in structs {
        for field in fields(&header, name) {
            let used = [".", "->"].iter().any(|access| {
                let needle = format!("{access}{field}");
                cpp.match_indices(&needle).any(|(at, _)| {
                    !cpp[at + needle.len()..].starts_with(|c: char| c == '_' || c.is_ascii_alphanumeric())
                })
            });
            assert!(used || field == "struct_size", "{name}.{field} is not used in pagoda.hpp");
        }
    }
}

#[test]
fn the_soname_is_the_abi_version() {
    let output = Command::new("readelf").arg("-d").arg(library("libpagoda.so")).output().expect("readelf runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let soname = format!("[libpagoda.so.{}]", pagoda::ffi::PAGODA_ABI_VERSION);
    assert!(text.contains(&soname), "{soname} expected in:\n{text}");
}
