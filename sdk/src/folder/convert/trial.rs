//! A run of a graph for one sequence, by hand: what is known of each value. Two runs of other lengths tell what depends on them.

use std::collections::HashMap;

use super::Names;
use super::graph::Graph;
use super::operators::{self, Made};
use super::value::Value;

/// The lengths of a trial, other than each other and than most sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// Tokens of the call.
    pub(super) new: usize,
    /// Tokens before it.
    pub(super) past: usize,
}

pub(super) struct Trial {
    pub(super) lengths: Lengths,
    values: HashMap<String, Value>,
    /// Why nodes can not stay in a graph of pages, by the first of their outputs.
    pub(super) issues: HashMap<String, String>,
}

impl Trial {
    /// Runs a graph. `given` are values that are not computed, and `reference` is an earlier trial of other lengths.
    pub(super) fn run(
        graph: &Graph,
        names: &Names<'_>,
        lengths: Lengths,
        given: &HashMap<String, Value>,
        reference: Option<&Self>,
    ) -> Self {
        let mut values: HashMap<String, Value> = HashMap::new();
        for tensor in graph.tensors() {
            values.insert(tensor.name.clone(), Value::of_tensor(tensor));
        }
        for input in graph.inputs() {
            values.insert(input.name.clone(), of_input(&input.name, names, lengths));
        }
        let mut issues = HashMap::new();
        for node in &graph.nodes {
            let inputs: Vec<Option<&Value>> =
                node.input.iter().map(|name| if name.is_empty() { None } else { values.get(name) }).collect();
            let Made { values: made, issue } = operators::run(node, &inputs);
            for (name, mut value) in node.output.iter().zip(made) {
                // Such as the number of heads, out of a shape with the number of tokens.
                let before = reference.and_then(|reference| reference.value(name));
                value.of_count &= !before.is_some_and(|before| {
                    before.numbers.is_some() && before.numbers == value.numbers && before.dims == value.dims
                });
                values.insert(name.clone(), given.get(name).cloned().unwrap_or(value));
            }
            let output = node.output.iter().find(|name| !name.is_empty());
            if let Some((output, issue)) = output.zip(issue) {
                issues.insert(output.clone(), issue);
            }
        }
        Self { lengths, values, issues }
    }

    pub(super) fn value(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    pub(super) fn dims(&self, name: &str) -> Option<&[usize]> {
        self.value(name)?.dims.as_deref()
    }

    /// All tokens of the sequence, after the call.
    pub(super) fn total(&self) -> usize {
        self.lengths.past + self.lengths.new
    }

    /// Whether a value has the positions of the new tokens.
    pub(super) fn are_positions(&self, name: &str) -> bool {
        let Some(numbers) = self.value(name).and_then(|value| value.numbers.as_ref()) else { return false };
        let is_position = |(at, &number): (usize, &f64)| number == (self.lengths.past + at) as f64;
        numbers.len() == self.lengths.new && numbers.iter().enumerate().all(is_position)
    }
}

fn of_input(name: &str, names: &Names<'_>, lengths: Lengths) -> Value {
    let Lengths { new, past } = lengths;
    let has = |pair: &[String]| pair.iter().any(|known| known == name);
    match name {
        _ if name == names.input_ids => Value::shaped(&[1, new], Some(1)),
        _ if Some(name) == names.position_ids => {
            let positions = (past..past + new).map(|at| at as f64).collect();
            Value { tokens: Some(1), ..Value::known(&[1, new], positions, true) }
        }
        _ if name == names.attention_mask => {
            Value { of_past: true, ..Value::known(&[1, past + new], vec![1.0; past + new], true) }
        }
        _ if has(names.past_keys) || has(names.past_values) => {
            Value { of_past: true, ..Value::shaped(&[1, names.kv_heads, past, names.head_size], None) }
        }
        _ if Some(name) == names.use_cache_branch => Value { of_past: true, ..Value::known(&[1], vec![1.0], true) },
        _ => Value { of_past: true, ..Value::default() },
    }
}
