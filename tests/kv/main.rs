//! The KV cache over a real store on disk.

mod behaviour;
mod crash;
mod damage;
mod model;
mod pattern;
mod sharing;
mod threads;
