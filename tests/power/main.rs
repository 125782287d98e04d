//! Loss of power, full disks and failing ones under the files that sled and the embedding tables write: every call to the
//! system that changes a file is recorded, and each moment of the record is a moment at which the power could be lost.

mod faults;
mod recorder;
mod store;
mod tables;
