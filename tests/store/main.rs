//! The host store when things go wrong: loss of power, failing disks, damaged files, other processes, full disks.

mod flips;
mod full;
mod heard;
mod io;
mod power;
mod processes;
mod simulated;
mod workload;
