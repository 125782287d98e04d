//! The ranking engine on real model folders, against the scores of the float64 oracle (tests/data/engine/make.py).

mod bad_input;
mod batching;
mod callbacks;
mod cases;
mod folders;
mod formats;
mod histories;
mod limits;
mod random;
mod scores;
mod swap;
