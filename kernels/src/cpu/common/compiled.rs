//! Kernels that are compiled once, in this crate.

/// Declares a trait of functions over an element type, and implements it for `f32`, `f16` and `bf16` by the generic functions
/// of the same names beside it. A generic function is compiled anew in every crate that calls it, which takes minutes for
/// vectorised kernels, and with that crate's optimisation; a trait's function for a given type is compiled here.
macro_rules! compiled {
    (
        $(#[$doc:meta])*
        pub trait $trait:ident {
            $(fn $function:ident($($argument:ident: $type:ty),* $(,)?) -> $output:ty;)*
        }
    ) => {
        $(#[$doc])*
        pub trait $trait: $crate::Element {
            $(#[doc(hidden)] fn $function($($argument: $type),*) -> $output;)*
        }

        compiled!(impl $trait for f32 { $(fn $function($($argument: $type),*) -> $output;)* });
        // The tests inside of this crate need no others, which take a minute to compile.
        #[cfg(not(test))]
        compiled!(impl $trait for half::f16 { $(fn $function($($argument: $type),*) -> $output;)* });
        #[cfg(not(test))]
        compiled!(impl $trait for half::bf16 { $(fn $function($($argument: $type),*) -> $output;)* });
    };
    (impl $trait:ident for $element:ty { $(fn $function:ident($($argument:ident: $type:ty),*) -> $output:ty;)* }) => {
        impl $trait for $element {
            $(fn $function($($argument: $type),*) -> $output {
                $function($($argument),*)
            })*
        }
    };
}
