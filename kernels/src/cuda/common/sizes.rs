//! Sizes that kernels can take.

use cudarc::driver::sys::CUdeviceptr;

use super::error::CudaError;

/// The most of anything that kernels count in 32 bits.
pub const MOST: usize = i32::MAX as usize - 4096;

/// The widest copies, in bytes, that kernels are compiled for and that rows of so many bytes and all `addresses`, put
/// together by or, are a multiple of.
pub fn copy_width(row_bytes: usize, addresses: CUdeviceptr) -> usize {
    let divides = |width: usize| row_bytes.is_multiple_of(width) && addresses.is_multiple_of(width as u64);
    [16, 4, 2].into_iter().find(|width| divides(*width)).unwrap_or(2)
}

/// Refuses what kernels can not count.
pub fn check_sizes(sizes: &[(&str, usize)]) -> Result<(), CudaError> {
    match sizes.iter().find(|(_, size)| *size > MOST) {
        Some((name, size)) => Err(CudaError::Unsupported(format!("{name} {size}, expected up to {MOST}"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_as_wide_as_rows_and_addresses_allow() {
        for (bytes, addresses, width) in [(32, 0, 16), (32, 64 | 4, 4), (20, 16, 4), (6, 16, 2), (32, 2, 2)] {
            assert_eq!(copy_width(bytes, addresses), width, "{bytes} {addresses}");
        }
    }
}
