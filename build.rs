//! Gives libpagoda.so its SONAME. The number is the ABI version of include/pagoda.h (a test compares them).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagoda.so.1");
    }
}
