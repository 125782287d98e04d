//! Copies keys and values between pages, `[pages, 2, page_size, heads, head_size]`, and tensors in which each head has its tokens
//! together.

use std::ops::Range;

use super::super::open_model::OpenModel;
use crate::error::Result;
use crate::tensor::Tensor;

/// The part of a page that has keys, and that of values.
pub(super) const PARTS: usize = 2;

/// The pool of a layer in host memory.
///
/// It is read and written by the rules of [`KvCache`](crate::kv::KvCache): a step reads the cached tokens of its leases, which nobody
/// writes, and writes those behind them, which are its own.
pub(super) struct PoolRows<'a> {
    tensor: &'a Tensor,
    page_size: usize,
    heads: usize,
    /// Bytes of a head of a token.
    head: usize,
}

/// The tokens of one sequence in a tensor `[heads, columns, head_size]`: token 0 is in column `first`.
pub(super) struct HeadMajor {
    pub(super) data: *mut u8,
    pub(super) columns: usize,
    pub(super) first: usize,
}

impl<'a> PoolRows<'a> {
    pub(super) fn new(model: &'a OpenModel, layer: usize) -> Result<Self> {
        let kv = &model.folder.kv;
        let head = kv.head_size as usize * kv.element.bits() / 8;
        let tensor = model.kv.pool(layer as u32)?;
        Ok(Self { tensor, page_size: kv.page_size as usize, heads: kv.heads as usize, head })
    }

    /// Where the pool begins, and its bytes.
    pub(super) fn memory(&self) -> Result<(*mut u8, usize)> {
        self.tensor.memory().map(|(data, bytes)| (data.cast(), bytes))
    }

    /// Bytes of the keys, or values, of a token.
    pub(super) fn row_bytes(&self) -> usize {
        self.heads * self.head
    }

    /// Which row of the pool, seen as `[rows, heads, head_size]`, has a token's key, or its value.
    pub(super) fn slot(&self, pages: &[i32], token: usize, part: usize) -> usize {
        (pages[token / self.page_size] as usize * PARTS + part) * self.page_size + token % self.page_size
    }

    /// Copies tokens out of pages.
    ///
    /// # Safety
    /// Nothing writes these tokens; `to` has room for them, and nothing else uses it.
    pub(super) unsafe fn gather(&self, pages: &[i32], part: usize, tokens: Range<usize>, to: &HeadMajor) -> Result<()> {
        // SAFETY: the caller's; `each` gives places inside of the pool.
        self.each(pages, part, tokens, to, |page, column| unsafe {
            std::ptr::copy_nonoverlapping(page, column, self.head);
        })
    }

    /// Copies tokens into pages.
    ///
    /// # Safety
    /// These tokens are the caller's alone; `from` has them.
    pub(super) unsafe fn scatter(
        &self,
        pages: &[i32],
        part: usize,
        tokens: Range<usize>,
        from: &HeadMajor,
    ) -> Result<()> {
        let _part = self.tensor.hold_part();
        // SAFETY: the caller's; `each` gives places inside of the pool.
        self.each(pages, part, tokens, from, |page, column| unsafe {
            std::ptr::copy_nonoverlapping(column, page, self.head);
        })
    }

    /// Copies rows `[tokens, heads, head_size]` into pages.
    ///
    /// # Safety
    /// These tokens are the caller's alone; `from` has as many rows.
    pub(super) unsafe fn put(&self, pages: &[i32], part: usize, tokens: Range<usize>, from: *const u8) -> Result<()> {
        let ((data, bytes), row) = (self.memory()?, self.row_bytes());
        let _part = self.tensor.hold_part();
        let mut done = 0;
        while done < tokens.len() {
            let token = tokens.start + done;
            let count = (self.page_size - token % self.page_size).min(tokens.len() - done);
            let at = self.slot(pages, token, part) * row;
            assert!(at + count * row <= bytes, "page {} is beyond the pool", pages[token / self.page_size]);
            // SAFETY: inside of the pool, by the line above; of `from` by contract.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done * row), data.add(at), count * row) };
            done += count;
        }
        Ok(())
    }

    /// Calls `copy` with the place of each head of each token in its page, and in a tensor.
    fn each(
        &self,
        pages: &[i32],
        part: usize,
        tokens: Range<usize>,
        other: &HeadMajor,
        copy: impl Fn(*mut u8, *mut u8),
    ) -> Result<()> {
        let ((data, bytes), row) = (self.memory()?, self.row_bytes());
        let mut token = tokens.start;
        while token < tokens.end {
            let count = (self.page_size - token % self.page_size).min(tokens.end - token);
            let at = self.slot(pages, token, part) * row;
            assert!(at + count * row <= bytes, "page {} is beyond the pool", pages[token / self.page_size]);
            assert!(other.first + token + count <= other.columns, "token {token} is beyond its tensor");
            for head in 0..self.heads {
                let column = (head * other.columns + other.first + token) * self.head;
                for index in 0..count {
                    // In bounds of both, by the lines above and by what the caller says of the tensor.
                    let page = data.wrapping_add(at + index * row + head * self.head);
                    copy(page, other.data.wrapping_add(column + index * self.head));
                }
            }
            token += count;
        }
        Ok(())
    }
}
