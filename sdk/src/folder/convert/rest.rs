//! What is left of a graph when its attention is gone: it has to work on each token alone.

use std::collections::{HashMap, HashSet};

use super::Names;
use super::attention::{Attention, Layout, Projected};
use super::graph::Graph;
use super::trial::{Lengths, Trial};
use super::value::Value;

/// A value that the graph counts from its past: the positions of the tokens.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) name: String,
    /// With one dimension of the tokens; others are 1.
    pub(super) dims: Vec<i64>,
    /// `TensorProto.DataType`.
    pub(super) element: i32,
}

/// The rest of a graph.
pub(super) struct Rest {
    /// What positions stand in for.
    pub(super) counted: Vec<Counted>,
    /// A trial in which the attention is known.
    pub(super) trial: Trial,
}

impl Rest {
    /// Checks the rest; or says which nodes can not stay.
    pub(super) fn check(graph: &Graph, names: &Names<'_>, attentions: &[Attention]) -> Result<Self, Vec<String>> {
        let run = |lengths: Lengths, reference: Option<&Trial>| {
            let given: HashMap<String, Value> = attentions
                .iter()
                .map(|attention| (attention.output.name.clone(), made(attention, names, lengths)))
                .collect();
            Trial::run(graph, names, lengths, &given, reference)
        };
        let first = run(Lengths { new: 3, past: 2 }, None);
        let trial = run(Lengths { new: 7, past: 11 }, Some(&first));
        let mut walk = Walk { graph, names, trials: [&first, &trial], counted: Vec::new(), wrong: Vec::new() };
        walk.from(attentions);
        let Walk { counted, wrong, .. } = walk;
        if wrong.is_empty() { Ok(Self { counted, trial }) } else { Err(wrong) }
    }
}

/// What is known of the result of an attention.
fn made(attention: &Attention, names: &Names<'_>, lengths: Lengths) -> Value {
    match attention.output.layout {
        Layout::Flat => Value::shaped(&[1, lengths.new, attention.heads * names.head_size], Some(1)),
        Layout::Heads => Value::shaped(&[1, attention.heads, lengths.new, names.head_size], Some(2)),
    }
}

struct Walk<'a> {
    graph: &'a Graph,
    names: &'a Names<'a>,
    trials: [&'a Trial; 2],
    counted: Vec<Counted>,
    wrong: Vec<String>,
}

impl Walk<'_> {
    /// Goes back from what has to be computed.
    fn from(&mut self, attentions: &[Attention]) {
        let made: HashSet<&str> = attentions.iter().map(|attention| attention.output.name.as_str()).collect();
        let mut open = vec![self.names.logits.to_owned()];
        for attention in attentions {
            match &attention.projected {
                Projected::Apart(rows) => open.extend(rows.iter().map(|rows| rows.name.clone())),
                Projected::Packed(name) => open.push(name.clone()),
            }
            let tables = attention.rotary.iter().flat_map(|rotary| [&rotary.cos, &rotary.sin]);
            open.extend(tables.cloned());
        }
        let mut seen: HashSet<String> = open.iter().cloned().collect();
        while let Some(name) = open.pop() {
            if made.contains(name.as_str()) || self.is_counted(&name) {
                continue;
            }
            let Some(node) = self.graph.maker(&name) else { continue };
            let (words, gone) = (node.words(), node.input.iter().find(|name| self.is_gone(name)));
            let output = node.output.iter().find(|name| !name.is_empty());
            if let Some(gone) = gone {
                self.wrong.push(format!("{words} reads {gone:?}, which a graph of pages does not have"));
                continue;
            }
            if let Some(issue) = output.and_then(|output| self.trials[1].issues.get(output)) {
                self.wrong.push(format!("{words} {issue}"));
            }
            for input in node.input.iter().filter(|name| !name.is_empty()) {
                if seen.insert(input.clone()) {
                    open.push(input.clone());
                }
            }
        }
    }

    /// Whether an input of the graph is not one of a graph of pages.
    fn is_gone(&self, name: &str) -> bool {
        let kept = name == self.names.input_ids || Some(name) == self.names.position_ids;
        !kept && self.graph.input(name).is_some()
    }

    /// Takes a value for positions, if it is what the graph makes of the length of its past.
    fn is_counted(&mut self, name: &str) -> bool {
        let value = self.trials[1].value(name).filter(|value| value.of_past);
        let Some(dims) = value.and_then(|value| value.dims.clone()) else { return false };
        if !self.trials.iter().all(|trial| trial.are_positions(name)) {
            return false;
        }
        let Some(element) = element(self.graph, name) else { return false };
        let dims = dims.iter().map(|&dim| if dim == 1 { 1 } else { -1 }).collect();
        self.counted.push(Counted { name: name.to_owned(), dims, element });
        true
    }
}

/// The type of whole numbers, or of what they were cast to.
fn element<'a>(graph: &'a Graph, mut name: &'a str) -> Option<i32> {
    const I64: i32 = 7;
    loop {
        if let Some(tensor) = graph.tensor(name) {
            return Some(tensor.data_type);
        }
        let Some(node) = graph.maker(name) else { return graph.input(name).map(|input| input.element()) };
        name = match node.op_type.as_str() {
            "Cast" => return node.int("to", 0).try_into().ok(),
            "Shape" | "Size" => return Some(I64),
            "Constant" => {
                return node
                    .attribute("value")
                    .and_then(|it| it.t.as_ref())
                    .map(|tensor| tensor.data_type)
                    .or(Some(I64));
            }
            "Where" => node.given(1)?,
            _ => node.given(0)?,
        };
    }
}
