//! A test pattern instead of keys and values: every row contains its user and its token.

use pagoda::KvLease;

/// The memory of the caches under test: that of the GPU with the number in `PAGODA_TEST_GPU`, or host memory.
pub fn device_id() -> Option<u32> {
    std::env::var("PAGODA_TEST_GPU").ok().map(|number| number.parse().expect("a number"))
}

/// The shape of the caches under test.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: u32,
    pub page_size: u32,
    /// Bytes of the keys, or of the values, of one token in one layer.
    pub row: usize,
}

impl Shape {
    /// Acts as the model: appends the new tokens of every user. `item` returns the token at a position.
    pub fn append(self, lease: &KvLease, mut item: impl FnMut(u64, u64) -> u64) {
        for layer in 0..self.layers {
            self.append_layer(lease, layer, &mut item);
        }
    }

    pub fn append_layer(self, lease: &KvLease, layer: u32, item: &mut impl FnMut(u64, u64) -> u64) {
        let pool = lease.pool(layer).unwrap();
        self.each(lease, true, |at, half, user, position| {
            let row = self.expected(layer, half, user, position, item(user, position));
            // SAFETY: a row of a page that only this lease writes and reads.
            unsafe { pool.copy_in(at, &row) }.unwrap();
        });
    }

    /// Checks every cached token of the lease.
    pub fn check(self, lease: &KvLease, mut item: impl FnMut(u64, u64) -> u64) {
        for layer in 0..self.layers {
            self.check_layer(lease, layer, &mut item);
        }
    }

    /// As [`check`](Self::check), of histories that others have begun: `token` tells which user has appended the token at a
    /// position, and what it is.
    pub fn check_shared(self, lease: &KvLease, mut token: impl FnMut(u64, u64) -> (u64, u64)) {
        for layer in 0..self.layers {
            self.check_tokens(lease, layer, &mut token);
        }
    }

    pub fn check_layer(self, lease: &KvLease, layer: u32, item: &mut impl FnMut(u64, u64) -> u64) {
        self.check_tokens(lease, layer, &mut |user, position| (user, item(user, position)));
    }

    fn check_tokens(self, lease: &KvLease, layer: u32, token: &mut impl FnMut(u64, u64) -> (u64, u64)) {
        let pool = lease.pool(layer).unwrap();
        // A copy from a GPU has a high latency: there the whole pool is copied at once.
        let mut all = Vec::new();
        if pool.device().is_some() {
            all.resize(pool.len() * pool.element_type().bits() / 8, 0);
            // SAFETY: rows that others write meanwhile are not read.
            unsafe { pool.copy_out(0, &mut all) }.unwrap();
        }
        let mut row = vec![0; self.row];
        self.each(lease, false, |at, half, user, position| {
            if all.is_empty() {
                // SAFETY: a row of a page that the lease may read, and that is not written.
                unsafe { pool.copy_out(at, &mut row) }.unwrap();
            } else {
                row.copy_from_slice(&all[at..][..self.row]);
            }
            let (author, item) = token(user, position);
            let expected = self.expected(layer, half, author, position, item);
            assert_eq!(row, expected, "user {user}, position {position}, layer {layer}, half {half}");
        });
    }

    /// Calls `visit` for every row of new or of cached tokens, with its offset in the pool, key or value, user and
    /// position.
    fn each(self, lease: &KvLease, new: bool, mut visit: impl FnMut(usize, u32, u64, u64)) {
        let pages = lease.page_ids().as_slice::<i32>().unwrap();
        let indptr = lease.page_indptr().as_slice::<i32>().unwrap();
        let page_size = self.page_size as usize;
        for (index, user) in lease.owners().enumerate() {
            let pages = &pages[indptr[index] as usize..indptr[index + 1] as usize];
            let cached = user.cached as usize;
            let tokens = if new { cached..cached + user.tokens as usize } else { 0..cached };
            for token in tokens {
                for half in 0..2 {
                    let page = usize::try_from(pages[token / page_size]).unwrap();
                    let at = ((page * 2 + half) * page_size + token % page_size) * self.row;
                    visit(at, half as u32, user.owner.0, user.start + token as u64);
                }
            }
        }
    }

    fn expected(self, layer: u32, half: u32, user: u64, position: u64, item: u64) -> Vec<u8> {
        let mut state = user ^ position.rotate_left(20) ^ item.rotate_left(40) ^ u64::from(layer * 2 + half);
        let words = std::iter::repeat_with(|| pagoda_test_support::mix(&mut state).to_le_bytes());
        words.flatten().take(self.row).collect()
    }
}
