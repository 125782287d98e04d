//! What a request brings to a model, and what comes back: tensors by name.

use std::sync::Arc;

use pagoda::json::Json;
use pagoda::{Error, Result, Tensor};

/// Tensors for a model.
#[derive(Default)]
pub struct InferRequest {
    /// The client's own id of it.
    pub id: String,
    /// The inputs, by name.
    pub inputs: Vec<(String, Arc<Tensor>)>,
    /// The names of the outputs; none: all.
    pub outputs: Vec<String>,
    /// How a language model answers.
    pub parameters: Vec<(String, Json)>,
}

/// Tensors of a model, by name.
pub type Outputs = Vec<(String, Tensor)>;

impl InferRequest {
    /// Refuses two inputs of one name.
    pub fn check(&self) -> Result<()> {
        let mut seen: Vec<&str> = Vec::new();
        for (at, (name, _)) in self.inputs.iter().enumerate() {
            pagoda_requests::fields::once(&mut seen, name, &format!("inputs[{at}].name"))?;
        }
        Ok(())
    }

    /// The input of a name.
    pub fn input(&self, name: &str) -> Option<&Arc<Tensor>> {
        self.inputs.iter().find(|(other, _)| other == name).map(|(_, tensor)| tensor)
    }

    /// Those of `outputs` that the request asks for, in its order.
    pub fn choose(&self, mut outputs: Outputs) -> Result<Outputs> {
        if self.outputs.is_empty() {
            return Ok(outputs);
        }
        let take = |name: &String| {
            let at = outputs.iter().position(|(other, _)| other == name);
            at.map(|at| outputs.swap_remove(at))
                .ok_or_else(|| Error::invalid("outputs", format!("there is no {name:?}")))
        };
        self.outputs.iter().map(take).collect()
    }
}
