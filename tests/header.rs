//! include/pagoda.h is what the sources say, and libpagoda.so exports what the list says.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The sections of the header, in an order in which every type is declared before it is used: the title, what is in it,
/// and the files that it is made of. The items of a file keep their order.
const SECTIONS: [(&str, &str, &[&str]); 10] = [
    ("Statuses and errors", "How a call ended, and why.", &["error.rs"]),
    ("The library", "Versions, the log, the metrics, live objects.", &["process.rs"]),
    ("Tensors", "Typed arrays: the inputs and outputs of models.", &["tensor.rs"]),
    ("Embedding tables", "Rows by key: a cache over host memory, a Redis Cluster and disk.", &["embedding.rs"]),
    ("Models", "ONNX models, opened and run by themselves.", &["model.rs", "run.rs"]),
    ("Stores", "Histories on disk.", &["store.rs"]),
    ("Caches of keys and values", "The histories of owners, as pages in a pool.", &["kv_options.rs", "kv.rs"]),
    ("Leases", "The part of a cache that a batch uses while a model runs.", &["kv_lease.rs"]),
    ("Engines", "Model folders, served: users and candidates in, scores out.", &["engine_options.rs", "engine.rs"]),
    (
        "Generators",
        "Language models, served: prompts in, text out.",
        &["generator_options.rs", "generator_request.rs", "generator_response.rs", "generator.rs"],
    ),
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
    let as_it_is = |name: &&str| name.ends_with("_stats") || name.ends_with("_owner");
    let structs: Vec<&str> = structs.filter(|name| !as_it_is(name)).collect();
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

/// A struct of the header, its name in Rust, C++ and Java (in Go `Kv` is `KV`), and the file of the Rust type.
const STRUCTS: [(&str, &str, &str); 22] = [
    ("pagoda_table_stats", "TableStats", "embedding/table/stats.rs"),
    ("pagoda_model_options", "ModelOptions", "runtime/options.rs"),
    ("pagoda_store_options", "StoreOptions", "store/options.rs"),
    ("pagoda_store_stats", "StoreStats", "store/disk_store.rs"),
    ("pagoda_kv_options", "KvOptions", "kv/options.rs"),
    ("pagoda_kv_stats", "KvStats", "kv/stats.rs"),
    ("pagoda_kv_request", "KvRequest", "kv/mod.rs"),
    ("pagoda_kv_leased_owner", "LeasedOwner", "kv/lease.rs"),
    ("pagoda_graph_shape", "GraphShape", "engine/rank/options.rs"),
    ("pagoda_engine_options", "EngineOptions", "engine/rank/options.rs"),
    ("pagoda_rank_request", "RankRequest", "engine/rank/request.rs"),
    ("pagoda_rank_response", "RankResponse", "engine/rank/request.rs"),
    ("pagoda_engine_stats", "EngineStats", "engine/rank/stats.rs"),
    ("pagoda_generator_options", "GeneratorOptions", "engine/generate/options.rs"),
    ("pagoda_kv_policy", "KvPolicy", "engine/generate/kv_policy.rs"),
    ("pagoda_generator_stats", "GeneratorStats", "engine/generate/stats.rs"),
    ("pagoda_beam_options", "BeamOptions", "engine/generate/beam_options.rs"),
    ("pagoda_generate_request", "GenerateRequest", "engine/generate/request.rs"),
    ("pagoda_generate_info", "GenerateResponse", "engine/generate/request.rs"),
    ("pagoda_generate_choice", "Choice", "engine/generate/request.rs"),
    ("pagoda_generate_token", "Token", "engine/generate/request.rs"),
    ("pagoda_token_logprobs", "TokenLogprobs", "engine/generate/sampling/logprobs.rs"),
];

/// Fields of C that are another one elsewhere: those of lists, optional values and durations, for which C has no type.
/// "" if they are part of another field.
const OTHERWISE: [(&str, &str); 45] = [
    ("kv_options.size_unit", ""),
    ("kv_policy.cache_length_count", ""),
    ("kv_request.item_count", ""),
    ("engine_options.kv_size_unit", ""),
    ("engine_options.max_delay_us", "max_delay"),
    ("engine_options.cuda_graph_count", ""),
    ("rank_request.has_time", ""),
    ("rank_request.timeout_us", "timeout"),
    ("rank_request.event_count", ""),
    ("rank_request.event_feature_count", ""),
    ("rank_request.event_features", ""),
    ("rank_request.event_keys", "events"),
    ("rank_request.user_feature_count", ""),
    ("rank_request.user_features", ""),
    ("rank_request.candidate_count", ""),
    ("rank_request.candidate_feature_count", ""),
    ("rank_request.candidate_features", ""),
    ("rank_request.candidate_keys", "candidates"),
    ("rank_response.queue_ns", "queue_time"),
    ("rank_response.run_ns", "run_time"),
    ("generator_options.kv_size_unit", ""),
    ("generate_request.has_seed", ""),
    ("generate_request.timeout_us", "timeout"),
    ("generate_request.token_count", ""),
    ("generate_request.stop_count", ""),
    ("generate_request.stop_token_count", ""),
    ("generate_request.logit_bias_count", ""),
    ("generate_info.choice_count", "choices"),
    ("generate_info.prompt_token_count", ""),
    ("generate_info.prompt_logprob_count", "prompt_logprobs"),
    ("generate_choice.text_length", ""),
    ("generate_choice.token_count", ""),
    ("generate_choice.logprob_count", "logprobs"),
    ("generate_choice.queued_ns", "queued"),
    ("generate_choice.first_token_ns", "first_token"),
    ("generate_choice.generation_ns", "generation"),
    ("generate_choice.has_score", ""),
    ("generate_token.text_length", ""),
    ("token_logprobs.top_count", ""),
    ("token_logprobs.top_tokens", "top"),
    ("token_logprobs.top_logprobs", "top"),
    // The rest is about one language: a keyword, and what it has a struct, an argument or another type for.
    ("Rust kv_options.type", "element_type"),
    ("Rust generate_request.tokens", "prompt"),
    ("Rust generate_request.messages", "prompt"),
    ("Java rank_request.user_keys", "user_key"),
];

/// Fields that a language has in another place, and where.
const ELSEWHERE: [(&str, &str); 18] = [
    ("Rust kv_options.store", "an argument of KvCache::open"),
    ("C++ kv_options.store", "an argument of the constructor of KvCache"),
    ("Rust engine_options.store_path", "EngineStore::path"),
    ("Rust engine_options.store_options", "EngineStore::options"),
    ("Rust engine_options.table_cache_bytes", "TableOptions::cache"),
    ("Rust engine_options.table_tiers_path", "TableOptions::tiers"),
    ("Rust rank_request.event_times", "Events::times"),
    ("C++ rank_request.event_times", "Events::times"),
    ("Go rank_request.cancel", "the context of the call"),
    ("Go generate_request.cancel", "the context of the call"),
    ("Rust generator_options.store_path", "EngineStore::path"),
    ("Rust generator_options.store_options", "EngineStore::options"),
    ("Rust generate_request.tools", "Chat::tools"),
    ("Rust generate_request.variables", "Chat::variables"),
    ("Rust generate_request.add_generation_prompt", "Chat::add_generation_prompt"),
    ("Rust generate_choice.queued_ns", "Timings::queued"),
    ("Rust generate_choice.first_token_ns", "Timings::first_token"),
    ("Rust generate_choice.generation_ns", "Timings::generation"),
];

/// The names of fields and methods in the declaration of a type, in small letters and without underscores: the words
/// before one of these characters.
fn names(text: &str, begin: &str, end: &str, before: &[char]) -> HashSet<String> {
    let at = text.find(begin).unwrap_or_else(|| panic!("{begin} is not there"));
    let length = text[at..].find(end).unwrap_or(text.len() - at);
    let code = text[at..at + length].lines().filter(|line| !line.trim_start().starts_with(['*', '/']));
    let mut names = HashSet::new();
    for line in code.map(|line| line.split("//").next().unwrap_or(line).trim_end()) {
        let word = |c: char| c == '_' || c.is_ascii_alphanumeric();
        for (at, _) in
            line.match_indices(word).filter(|(at, _)| line[at + 1..].chars().next().is_some_and(|c| !word(c)))
        {
            let start = line[..at].rfind(|c| !word(c)).map_or(0, |before| before + 1);
            // In Go the type follows after a space.
            if line[at + 1..].starts_with(before) || line[at + 1..].trim_start().starts_with(before) {
                names.insert(line[start..=at].replace('_', "").to_lowercase());
            }
        }
    }
    names
}

/// The names of a type in each language. `None`: it is the struct of C.
fn names_of(name: &str, file: &str) -> Vec<(&'static str, Option<HashSet<String>>)> {
    let rust = names(&read(&format!("sdk/src/{file}")), &format!("pub struct {name}"), "\n}", &[':']);
    let (cpp, go_name) = (cpp(), name.replace("Kv", "KV"));
    let go: String =
        ["model", "store", "kv", "lease", "engine", "rank", "embedding", "generator", "generate", "stream"]
            .map(|file| read(&format!("bindings/go/{file}.go")))
            .concat();
    let aliased = cpp.contains(&format!("using {name} = pagoda_"));
    let cpp = (!aliased).then(|| names(&cpp, &format!("struct {name} {{"), "\n};", &[';', '=', '{']));
    let go = names(&go, &format!("type {go_name} struct {{"), "\n}", &[' ', ',']);
    let java = read(&format!("bindings/java/src/main/java/ai/pagoda/{name}.java"));
    let java = names(&java, "public ", "\n}", &['(', ',', ')']);
    vec![("Rust", Some(rust)), ("C++", cpp), ("Go", Some(go)), ("Java", Some(java))]
}

/// One name for one thing: each field of a struct has the same name in every language.
#[test]
fn fields_have_one_name_in_every_language() {
    let header = read("include/pagoda.h");
    let (mut otherwise, mut elsewhere) = (HashSet::new(), HashSet::new());
    for (of, name, file) in STRUCTS {
        for (language, names) in names_of(name, file) {
            let Some(names) = names else { continue };
            for field in fields(&header, of).into_iter().filter(|field| *field != "struct_size") {
                let field = format!("{}.{field}", of.trim_start_matches("pagoda_"));
                let here = format!("{language} {field}");
                if let Some((listed, _)) = ELSEWHERE.iter().find(|(listed, _)| *listed == here) {
                    elsewhere.insert(*listed);
                    continue;
                }
                let other = OTHERWISE.iter().find(|(listed, _)| *listed == here || *listed == field);
                otherwise.extend(other.map(|(listed, _)| *listed));
                let expected = other.map_or(field.split_once('.').expect("a field").1, |(_, name)| name);
                let found = expected.is_empty() || names.contains(&expected.replace('_', ""));
                assert!(found, "{language}: {name} has no {expected}, which is {field} in pagoda.h");
            }
        }
    }
    assert_eq!((otherwise.len(), elsewhere.len()), (OTHERWISE.len(), ELSEWHERE.len()), "a line above is not needed");
}

#[test]
fn the_soname_is_the_abi_version() {
    let output = Command::new("readelf").arg("-d").arg(library("libpagoda.so")).output().expect("readelf runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let soname = format!("[libpagoda.so.{}]", pagoda::ffi::PAGODA_ABI_VERSION);
    assert!(text.contains(&soname), "{soname} expected in:\n{text}");
}
