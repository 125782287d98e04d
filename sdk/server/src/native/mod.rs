//! Pagoda's own protocol: `/v1/rank`, and the names that servers of this kind had before OpenAI's.

mod old_names;
mod old_streams;
mod rank;

pub use old_names::{chat, completion, engine_check, ping};
pub use rank::{rank, run_rank};
