//! Compiles cuda/*.cu with nvcc into fatbins that the library carries (src/cuda/module.rs). `PAGODA_NVCC` names nvcc;
//! without it the one on the path is used; without any the fatbins are empty, and the library says so when asked.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Each file with the chips that it is compiled for: machine code, and PTX for chips that come later.
const FILES: &[(&str, &[&str])] = &[
    ("append", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("plain", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("bag", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("table", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("tokens", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("dense", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("ends", &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"]),
    ("mma", &["arch=compute_80,code=sm_80", "arch=compute_80,code=compute_80"]),
    ("hopper", &["arch=compute_90a,code=sm_90a"]),
    ("dense_hopper", &["arch=compute_90a,code=sm_90a"]),
    ("linear_hopper", &["arch=compute_90a,code=sm_90a"]),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-env-changed=PAGODA_NVCC");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let nvcc = find_nvcc();
    if nvcc.is_none() {
        println!("cargo:warning=no nvcc (`make deps` fetches one; PAGODA_NVCC names another): built for the CPU alone");
    }
    // One process a file: nvcc's own threads would each hold a file's worth of memory too.
    let compiled: Vec<_> = FILES
        .iter()
        .map(|(name, chips)| (name, out.join(format!("{name}.fatbin")), chips))
        .map(|(name, to, chips)| match &nvcc {
            Some(nvcc) => (name, Some(compile(nvcc, name, chips, &to))),
            None => (name, std::fs::write(&to, []).map(|()| None).expect("OUT_DIR is writable")),
        })
        .collect();
    for (name, child) in compiled {
        let Some(mut child) = child else { continue };
        let status = child.wait().expect("nvcc was started");
        assert!(status.success(), "nvcc could not compile cuda/{name}.cu (its messages are above): {status}");
    }
}

fn find_nvcc() -> Option<PathBuf> {
    let named = std::env::var_os("PAGODA_NVCC").map(PathBuf::from).filter(|nvcc| nvcc.is_file());
    if let Some(nvcc) = &named {
        println!("cargo:rerun-if-changed={}", nvcc.display());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    named.or_else(|| std::env::split_paths(&path).map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file()))
}

fn compile(nvcc: &Path, name: &str, chips: &[&str], to: &Path) -> std::process::Child {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fatbin", "-Werror", "all-warnings"]);
    command.args(chips.iter().flat_map(|chip| ["-gencode", chip]));
    command.arg(format!("cuda/{name}.cu")).arg("-o").arg(to);
    command.spawn().unwrap_or_else(|error| panic!("{} does not start: {error}", nvcc.display()))
}
