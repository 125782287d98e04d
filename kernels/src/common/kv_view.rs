//! A layer's pool of keys and values, native or quantised.

use half::f16;

use super::input_error::{expect, refuse};
use super::kv_format::KvFormat;
use super::pages::Pages;
use crate::InputError;

/// The pool of a layer, which a call reads.
#[derive(Clone, Copy, Debug)]
pub enum KvView<'a, T> {
    /// `[pages, 2, page_size, H, D]`.
    Native(&'a [T]),
    /// A quantised pool.
    Quantised {
        /// Any but [`KvFormat::Native`].
        format: KvFormat,
        /// `[pages, 2, page_size, H, pool_width]`.
        codes: &'a [u8],
        /// `[pages, 2, page_size, H, scales_width]`.
        scales: &'a [f16],
    },
}

/// A quantised pool of a layer, which a call writes.
#[derive(Debug)]
pub struct QuantisedPool<'a> {
    /// Any but [`KvFormat::Native`].
    pub format: KvFormat,
    /// `[pages, 2, page_size, H, pool_width]`.
    pub codes: &'a mut [u8],
    /// `[pages, 2, page_size, H, scales_width]`.
    pub scales: &'a mut [f16],
}

impl<T> KvView<'_, T> {
    /// Checks pages and pool, but for the page ids that tokens need. `row`: the heads of a token, and the numbers of a head.
    pub(crate) fn check(&self, pages: &Pages<'_>, users: usize, row: [usize; 2]) -> Result<(), InputError> {
        match *self {
            Self::Native(pool) => pages.check(users, row, Some(pool.len())),
            Self::Quantised { format, codes, scales } => {
                check_quantised(format, pages, row, [codes.len(), scales.len()])?;
                pages.check(users, [row[0], format.pool_width(row[1])], Some(codes.len()))
            }
        }
    }
}

/// Checks that a pool has a quantised format, and that codes and scales are as long as the pages say.
pub(crate) fn check_quantised(
    format: KvFormat,
    pages: &Pages<'_>,
    [heads, head_size]: [usize; 2],
    [codes, scales]: [usize; 2],
) -> Result<(), InputError> {
    if format == KvFormat::Native {
        return refuse("kv_pool", None, "quantised, expected native numbers".into());
    }
    if format == KvFormat::Int4 && !head_size.is_multiple_of(2) {
        return refuse("key", None, format!("heads of {head_size} numbers, expected an even number for int4"));
    }
    pages.check_pool([heads, format.pool_width(head_size)], Some(codes))?;
    expect("kv_scales", scales, &[pages.pool_pages, 2, pages.page_size, heads, format.scales_width()])
}
