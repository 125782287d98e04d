//! What the commands `pagoda` and `pagoda-bench` share.

pub mod bench;
pub mod output;
pub mod progress;
