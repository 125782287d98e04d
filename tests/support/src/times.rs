//! How often tests repeat what they repeat.

/// `few`, or `all` where `SHIPPED` is set, as it is in `make soak`.
pub fn times(few: usize, all: usize) -> usize {
    if std::env::var_os("SHIPPED").is_some() { all } else { few }
}

/// How many random calls the CPU kernels are compared with their references on.
pub fn kernel_cases() -> u64 {
    if cfg!(miri) { 4 } else { times(60, 300) as u64 }
}
