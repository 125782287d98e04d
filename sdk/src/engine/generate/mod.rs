//! The language-model engine: a request brings a prompt and gets tokens.

#[allow(dead_code, unused_imports, reason = "until the engine's requests use it")]
mod sampling;
