//! Loss of power, full and failing disks, for the files that sled and the embedding tables write. Every system call
//! that changes a file is recorded, and the power is lost at each point of the record.

mod faults;
mod recorder;
mod store;
mod tables;
