//! Work that takes longer than other connections should wait.

/// The bytes of a request that are read and turned into tokens in no time: about a millisecond.
const LIGHT: usize = 32 << 10;

/// Does work whose time grows with these bytes. Where they are many, the thread leaves its other connections to another one first:
/// a prompt of megabytes takes seconds to become tokens, and the server has as few threads for connections as cores.
pub fn work<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes > LIGHT { tokio::task::block_in_place(work) } else { work() }
}
