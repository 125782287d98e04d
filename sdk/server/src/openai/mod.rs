//! OpenAI's protocol: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

mod answer;
mod chat;
mod chat_objects;
mod common;
mod completion_objects;
mod completions;
mod logprobs;
mod messages;
mod models;
mod streams;
mod tools;

pub use chat::chat_completions;
pub use completions::completions;
pub use models::{model, models};
pub use tools::Form as ToolForm;
