//! gRPC on top of HTTP/2: how messages are framed, and how failures are said. hyper has the connections, prost the messages.

mod frame;
mod messages;
mod reply;
mod status;

pub use messages::{Messages, decode, read};
pub use reply::{encode, of, parts, stream};
pub use status::{in_grpcs_shape, is_grpc};
