//! Structs that the kernels get by value and that CUDA declares a second time.
//!
//! The `raw.rs` of each family declares them by [`mirrored!`], with the names that the fields have in CUDA. build.rs includes
//! the same files, and writes the size of each struct and the offset and size of each field into a header. Behind its own
//! declaration CUDA compares by `PAGODA_MIRRORED(family, name)`. So nvcc stops where the two sides differ, whichever changed.
//! This file and `raw.rs` depend on nothing else, so that build.rs can include them.

/// The layout of a struct in Rust.
#[allow(dead_code, reason = "build.rs reads it")]
pub struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    /// Name, offset, size.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Declares structs with the layout of C, and `LAYOUTS`, what build.rs reads.
macro_rules! mirrored {
    ($($(#[$meta:meta])* struct $name:ident { $($(#[$of_field:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default)]
            pub struct $name {
                $($(#[$of_field])* pub $field: $type,)*
            }
        )*

        #[allow(dead_code, reason = "build.rs reads it")]
        pub const LAYOUTS: &[Layout] = &[$(
            Layout {
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>()),)*],
            },
        )*];
    };
}

pub(crate) use mirrored;
