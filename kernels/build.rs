//! Compiles cuda/**/*.cu with nvcc into fatbins that the library carries (src/cuda/common/module.rs).
//!
//! `PAGODA_NVCC` names nvcc; if it is not set, nvcc is looked for on the path. Without one, as where the variable is empty,
//! the fatbins are empty: the library is built for the CPU alone, and says so when it is asked for a GPU.
//!
//! `PAGODA_NVCC_QUICK=1` has nvcc check the kernels rather than optimise them, in a tenth of the time: for tests on hosts without
//! a GPU, where no kernel runs.
//!
//! `PAGODA_FATBINS` names a folder in which fatbins are kept by the hash of what they were made from, because nvcc takes
//! minutes: all profiles share them, and a build that had no nvcc for a while finds them again.

/// The structs that Rust and CUDA share (src/cuda/common/mirrored.rs).
#[path = "src/cuda"]
mod cuda {
    pub mod common {
        pub mod mirrored;
        pub mod raw;
    }
    pub mod embedding {
        pub mod raw;
    }
    pub mod hstu {
        pub mod raw;
    }
    pub mod llm {
        pub mod raw;
    }
}

use std::collections::HashSet;
use std::fmt::Write;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use cuda::common::mirrored::Layout;
use cuda::{common, embedding, hstu, llm};

/// Machine code for sm_80 and sm_90, and PTX for chips that come later.
const ALL: &[&str] = &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"];
const SM80: &[&str] = &["arch=compute_80,code=sm_80", "arch=compute_80,code=compute_80"];
const SM90A: &[&str] = &["arch=compute_90a,code=sm_90a"];

/// Each file of cuda/ with the chips that it is compiled for. Its fatbin has the file's name without the folder.
const FILES: &[(&str, &[&str])] = &[
    ("common/kv_pack", ALL),
    ("embedding/embedding_bag", ALL),
    ("embedding/embedding_table", ALL),
    ("hstu/hstu_attention_simt", ALL),
    ("hstu/hstu_attention_sm80", SM80),
    ("hstu/hstu_attention_sm90", SM90A),
    ("hstu/hstu_embed", ALL),
    ("hstu/hstu_gemm_simt", ALL),
    ("hstu/hstu_gemm_sm90", SM90A),
    ("hstu/hstu_linear_sm90", SM90A),
    ("hstu/hstu_norm", ALL),
    ("hstu/hstu_unit", ALL),
    ("hstu/paged_kv_append", ALL),
    ("hstu/quantised_pool", ALL),
    ("llm/block_projection_sm90", SM90A),
    ("llm/cache_policy", ALL),
    ("llm/cut_rows", ALL),
    ("llm/gated_gemm_sm90", SM90A),
    ("llm/glu", ALL),
    ("llm/paged_attention_simt", ALL),
    ("llm/paged_attention_sm90", SM90A),
    ("llm/paged_decode_sm80", ALL),
    ("llm/paged_prefill_sm80", ALL),
    ("llm/projection_sm90", SM90A),
    ("llm/rms_norm", ALL),
    ("llm/sampling", ALL),
    ("llm/sampling_sm90", SM90A),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-env-changed=PAGODA_NVCC");
    println!("cargo:rerun-if-env-changed=PAGODA_NVCC_QUICK");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let layouts = [
        ("common", common::raw::LAYOUTS),
        ("embedding", embedding::raw::LAYOUTS),
        ("hstu", hstu::raw::LAYOUTS),
        ("llm", llm::raw::LAYOUTS),
    ];
    let header = layouts_in_cuda(&layouts);
    fs::write(out.join("pagoda_layouts.h"), &header).expect("OUT_DIR is writable");
    for (family, layouts) in layouts {
        let path = out.join(format!("layouts_{family}.rs"));
        fs::write(path, layouts_in_rust(layouts)).expect("OUT_DIR is writable");
    }
    expect_mirrored(&layouts);
    match find_nvcc() {
        Some(nvcc) => compile_all(&nvcc, &out, &header),
        None => {
            FILES.iter().for_each(|(file, _)| fs::write(fatbin(&out, name_of(file)), []).expect("OUT_DIR is writable"))
        }
    }
}

/// A macro for each struct, which cuda/common/mirrored.cuh calls by family and name: the layout that Rust has.
fn layouts_in_cuda(families: &[(&str, &[Layout])]) -> String {
    let mut header =
        String::from("// By kernels/build.rs, from src/cuda/*/raw.rs.\n#pragma once\n#include <cstddef>\n");
    let differs = "differs from src/cuda/*/raw.rs";
    for (family, layouts) in families {
        for Layout { name, size, align, fields } in *layouts {
            let whole = format!("sizeof({name}) == {size} && alignof({name}) == {align}");
            let mut checks = format!("static_assert({whole}, \"{name} {differs}\");");
            for (field, offset, size) in *fields {
                let place = format!("offsetof({name}, {field}) == {offset} && sizeof({name}::{field}) == {size}");
                write!(checks, " \\\n    static_assert({place}, \"{name}::{field} {differs}\");").expect("to a string");
            }
            writeln!(header, "#define PAGODA_LAYOUT_{family}_{name} {checks}").expect("to a string");
        }
    }
    header
}

/// The same numbers for the library, which may be compiled for another machine than this program.
fn layouts_in_rust(layouts: &[Layout]) -> String {
    let mut checks = String::new();
    for Layout { name, size, fields, .. } in layouts {
        writeln!(checks, "const _: () = assert!(size_of::<{name}>() == {size});").expect("to a string");
        for (field, offset, _) in *fields {
            writeln!(checks, "const _: () = assert!(std::mem::offset_of!({name}, {field}) == {offset});")
                .expect("to a string");
        }
    }
    checks
}

/// Stops where a struct is compared nowhere in cuda/.
fn expect_mirrored(families: &[(&str, &[Layout])]) {
    let mut folders = vec![PathBuf::from("cuda")];
    let mut sources = String::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the repository") {
            let path = entry.expect("a folder of the repository").path();
            match path.extension() {
                None => folders.push(path),
                Some(extension) if extension == "cu" || extension == "cuh" => {
                    sources += &fs::read_to_string(&path).expect("a file of the repository");
                }
                Some(_) => {}
            }
        }
    }
    for (family, layouts) in families {
        for Layout { name, .. } in *layouts {
            let check = format!("PAGODA_MIRRORED({family}, {name})");
            assert!(sources.contains(&check), "nothing in kernels/cuda has {check} behind its declaration of {name}");
        }
    }
}

fn find_nvcc() -> Option<PathBuf> {
    let nvcc = match std::env::var_os("PAGODA_NVCC") {
        Some(named) => Some(PathBuf::from(named)).filter(|nvcc| nvcc.is_file()),
        None => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file())
        }
    };
    match &nvcc {
        Some(nvcc) => println!("cargo:rerun-if-changed={}", nvcc.display()),
        None if Path::new("/dev/nvidiactl").exists() => println!(
            "cargo:warning=there is a GPU but no nvcc: building for the CPU alone (`make deps` fetches nvcc, PAGODA_NVCC \
             names another)"
        ),
        None => {}
    }
    nvcc
}

fn name_of(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

fn fatbin(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.fatbin"))
}

fn compile_all(nvcc: &Path, out: &Path, layouts: &str) {
    let version = Command::new(nvcc).arg("--version").output().unwrap_or_else(|error| does_not_start(nvcc, &error));
    let kept = std::env::var_os("PAGODA_FATBINS").map_or_else(|| out.join("kept"), PathBuf::from);
    fs::create_dir_all(&kept).unwrap_or_else(|error| panic!("{} can not be made: {error}", kept.display()));
    let quick = std::env::var_os("PAGODA_NVCC_QUICK").is_some_and(|quick| quick == "1");
    // One process a file: nvcc's own threads would each hold a file's worth of memory too.
    let mut running = Vec::new();
    for (file, chips) in FILES {
        let (name, source) = (name_of(file), format!("cuda/{file}.cu"));
        let to = fatbin(out, name);
        let mut command = Command::new(nvcc);
        command.args(["-std=c++17", "-O3", "-fatbin", "-I", "cuda", "-Werror", "all-warnings"]);
        if quick {
            command.args(["--Ofast-compile", "max"]);
        }
        command.args(chips.iter().flat_map(|chip| ["-gencode", chip])).arg(&source);
        let mut hasher = DefaultHasher::new();
        (&version.stdout, command.get_args().collect::<Vec<_>>()).hash(&mut hasher);
        let mut seen = HashSet::new();
        // The versions of the toolkit's headers.
        hash_file(Path::new("cuda/requirements.txt"), layouts, &mut seen, &mut hasher);
        hash_file(Path::new(&source), layouts, &mut seen, &mut hasher);
        let kept = fatbin(&kept, &format!("{name}-{:016x}", hasher.finish()));
        if fs::copy(&kept, &to).is_err() {
            let child = command
                .arg("-I")
                .arg(out)
                .arg("-o")
                .arg(&to)
                .spawn()
                .unwrap_or_else(|error| does_not_start(nvcc, &error));
            running.push((source, child, to, kept));
        }
    }
    running.into_iter().for_each(|(source, child, to, kept)| finish(&source, child, &to, &kept));
}

/// Hashes a file with all that it includes of cuda/, which includes are relative to, and the layouts that it compares: a struct of
/// other files does not make nvcc compile this one again.
fn hash_file(path: &Path, layouts: &str, seen: &mut HashSet<PathBuf>, hasher: &mut DefaultHasher) {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{} can not be read: {error}", path.display()));
    if !seen.insert(path.canonicalize().expect("it was read")) {
        return;
    }
    text.hash(hasher);
    for compared in text.lines().filter_map(|line| line.strip_prefix("PAGODA_MIRRORED(")?.split(')').next()) {
        let define = format!("define PAGODA_LAYOUT_{} ", compared.replace(", ", "_"));
        layouts.split('#').find(|layout| layout.starts_with(&define)).hash(hasher);
    }
    let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
    included.for_each(|name| hash_file(&Path::new("cuda").join(name), layouts, seen, hasher));
}

/// Waits for nvcc and keeps what it made. Another build may do the same at this time: the name is given to a whole file.
fn finish(source: &str, mut child: Child, to: &Path, kept: &Path) {
    let status = child.wait().expect("nvcc was started");
    assert!(status.success(), "nvcc could not compile {source} (its messages are above): {status}");
    let partial = kept.with_extension(std::process::id().to_string());
    fs::copy(to, &partial)
        .and_then(|_| fs::rename(&partial, kept))
        .unwrap_or_else(|error| panic!("{} can not be written: {error}", kept.display()));
}

fn does_not_start<T>(nvcc: &Path, error: &std::io::Error) -> T {
    panic!("{} does not start: {error}", nvcc.display())
}
