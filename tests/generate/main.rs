//! The generator on real model folders, against a naive oracle that computes every token from the whole sequence.

mod beams;
mod cases;
mod crash;
mod decoders;
mod folders;
mod formats;
mod grammars;
mod limits;
mod policies;
mod scheduling;
mod sessions;
mod sharing;
mod speculation;
mod streams;
mod threads;
mod tokens;
