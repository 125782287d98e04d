//! Gives libpagoda.so its SONAME, whose number is the ABI version of include/pagoda.h (a test compares them), and hides what
//! dependencies would export beside `pagoda_*`: llguidance has a C interface of its own.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagoda.so.1");
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
