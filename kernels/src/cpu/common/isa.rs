//! Instruction sets.

use std::sync::OnceLock;

/// An instruction set that kernels are compiled for; later ones are faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// What every CPU of the architecture has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F and DQ.
    Avx512,
}

impl Isa {
    /// The best set this CPU has. The environment variable `PAGODA_CPU` (`portable`, `avx2`, `avx512`) may lower it
    /// and never raises it; it is read once.
    pub fn detect() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::best().min(Isa::limit(std::env::var("PAGODA_CPU").ok().as_deref())))
    }

    /// Every set this CPU has, slowest first, whatever `PAGODA_CPU` says.
    pub fn available() -> Vec<Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::best()).collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn best() -> Isa {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq");
        match (avx2, avx512) {
            (true, true) => Isa::Avx512,
            (true, false) => Isa::Avx2,
            _ => Isa::Portable,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Isa {
        Isa::Portable
    }

    fn limit(wish: Option<&str>) -> Isa {
        match wish {
            Some("portable") => Isa::Portable,
            Some("avx2") => Isa::Avx2,
            _ => Isa::Avx512,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_only_lowers() {
        assert_eq!(Isa::limit(Some("portable")), Isa::Portable);
        assert_eq!(Isa::limit(Some("avx2")), Isa::Avx2);
        assert_eq!(Isa::limit(Some("nonsense")), Isa::Avx512);
        assert_eq!(Isa::limit(None), Isa::Avx512);
        assert!(Isa::available().contains(&Isa::detect()));
    }
}
