//! Text in and out of language models: tokenizers, detokenisation token by token, stop strings, chat templates.
//!
//! Nothing here knows the engine. A [`Tokenizer`] and a [`ChatTemplate`] are shared between threads; a [`Detokeniser`] and
//! [`Stops`] belong to one sequence each.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use pagoda::text::{Detokeniser, Stopped, Stops, Tokenizer};
//!
//! let tokenizer = Arc::new(Tokenizer::from_file("model/tokenizer.json")?);
//! let prompt = tokenizer.encode("The capital of France is", true)?;
//! # let generated: Vec<u32> = Vec::new();
//! let mut detokeniser = Detokeniser::new(tokenizer, true);
//! let mut stops = Stops::new(vec!["\n".to_owned()])?;
//! for id in generated {
//!     match stops.push(&detokeniser.push(id)?) {
//!         Stopped::Pass { text } => print!("{text}"),
//!         Stopped::Found { text, .. } => {
//!             print!("{text}");
//!             break;
//!         }
//!     }
//! }
//! # Ok::<(), pagoda::Error>(())
//! ```

mod decoder;
mod detokenise;
mod stops;
mod template;
mod tokenizer;

#[cfg(test)]
mod random;
#[cfg(test)]
mod samples;

pub use detokenise::Detokeniser;
pub use stops::{Stopped, Stops};
pub use template::{ChatInput, ChatTemplate};
pub use tokenizer::Tokenizer;
