//! A graph that is being rewritten: its nodes, and which of them makes and reads what.

use std::collections::{HashMap, HashSet};

use prost::Message;
use prost::bytes::Bytes;

use super::proto::{GraphProto, ModelProto, NodeProto, OpsetProto, TensorProto, ValueInfoProto};

pub(super) struct Graph {
    /// The model around the graph, without it.
    model: ModelProto,
    /// The graph, without its nodes.
    rest: GraphProto,
    /// In an order in which each node reads what those before it have made.
    pub(super) nodes: Vec<NodeProto>,
    made_by: HashMap<String, usize>,
    read_by: HashMap<String, Vec<usize>>,
    tensors: HashMap<String, usize>,
}

impl Graph {
    /// Reads a model. If a flag chooses between a graph with and one without a past, the graph is that with a past.
    pub(super) fn read(bytes: Bytes, flag: Option<&str>) -> Result<Self, String> {
        let mut model = ModelProto::decode(bytes).map_err(|error| format!("not an ONNX model: {error}"))?;
        if !model.functions.is_empty() {
            let count = model.functions.len();
            return Err(format!("the model has {count} functions of its own, which are not looked into: inline them"));
        }
        let mut rest = model.graph.take().ok_or("the model has no graph")?;
        if !rest.sparse_initializer.is_empty() {
            return Err("the model has sparse weights, which are not known here".into());
        }
        // They name dimensions that are others now; ONNX Runtime infers shapes itself.
        rest.value_info.clear();
        let mut nodes = std::mem::take(&mut rest.node);
        if let Some(flag) = flag {
            nodes = with_past(nodes, flag, &mut rest.initializer)?;
        }
        let (made_by, read_by, tensors) = Default::default();
        let mut graph = Self { model, rest, nodes, made_by, read_by, tensors };
        graph.index();
        Ok(graph)
    }

    /// Finds anew what is made and read where.
    fn index(&mut self) {
        (self.made_by, self.read_by) = Default::default();
        for (at, node) in self.nodes.iter().enumerate() {
            for name in node.output.iter().filter(|name| !name.is_empty()) {
                self.made_by.insert(name.clone(), at);
            }
            for name in node.input.iter().filter(|name| !name.is_empty()) {
                self.read_by.entry(name.clone()).or_default().push(at);
            }
        }
        self.tensors = self.rest.initializer.iter().map(|tensor| tensor.name.clone()).zip(0..).collect();
    }

    /// The node that makes a value.
    pub(super) fn maker(&self, name: &str) -> Option<&NodeProto> {
        self.made_by.get(name).map(|&at| &self.nodes[at])
    }

    /// The nodes that read a value.
    pub(super) fn readers(&self, name: &str) -> impl Iterator<Item = &NodeProto> {
        self.read_by.get(name).into_iter().flatten().map(|&at| &self.nodes[at])
    }

    /// A weight.
    pub(super) fn tensor(&self, name: &str) -> Option<&TensorProto> {
        self.tensors.get(name).map(|&at| &self.rest.initializer[at])
    }

    pub(super) fn tensors(&self) -> &[TensorProto] {
        &self.rest.initializer
    }

    /// Its inputs, without weights, which may be among them.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &ValueInfoProto> {
        self.rest.input.iter().filter(|input| self.tensor(&input.name).is_none())
    }

    pub(super) fn input(&self, name: &str) -> Option<&ValueInfoProto> {
        self.inputs().find(|input| input.name == name)
    }

    pub(super) fn output(&self, name: &str) -> Option<&ValueInfoProto> {
        self.rest.output.iter().find(|output| output.name == name)
    }

    /// The value that another one is, under another name.
    pub(super) fn origin<'a>(&'a self, mut name: &'a str) -> &'a str {
        while let Some(node) = self.maker(name).filter(|node| node.is("Identity")) {
            let Some(from) = node.given(0) else { break };
            name = from;
        }
        name
    }

    /// The version of ONNX's own operators.
    pub(super) fn opset(&self) -> i64 {
        let own = |opset: &&OpsetProto| matches!(opset.domain.as_str(), "" | "ai.onnx");
        self.model.opset_import.iter().find(own).map_or(1, |opset| opset.version)
    }

    /// Has ONNX's own operators of a later version.
    pub(super) fn raise_opset(&mut self, version: i64) {
        /// The least that has such operators.
        const IR_VERSION: i64 = 11;
        let own = |opset: &&mut OpsetProto| matches!(opset.domain.as_str(), "" | "ai.onnx");
        if let Some(opset) = self.model.opset_import.iter_mut().find(own) {
            opset.version = opset.version.max(version);
        }
        self.model.ir_version = self.model.ir_version.max(IR_VERSION);
    }

    /// Has the operators of a domain.
    pub(super) fn import(&mut self, domain: &str, version: i64) {
        if self.model.opset_import.iter().all(|opset| opset.domain != domain) {
            self.model.opset_import.push(OpsetProto { domain: domain.into(), version });
        }
    }

    /// Adds a weight.
    pub(super) fn add_tensor(&mut self, tensor: TensorProto) {
        self.tensors.insert(tensor.name.clone(), self.rest.initializer.len());
        self.rest.initializer.push(tensor);
    }

    pub(super) fn set_inputs(&mut self, inputs: Vec<ValueInfoProto>) {
        self.rest.input = inputs;
    }

    pub(super) fn set_outputs(&mut self, outputs: Vec<ValueInfoProto>) {
        self.rest.output = outputs;
    }

    /// Gives values other names, in all nodes.
    pub(super) fn rename(&mut self, names: &HashMap<&str, &str>) {
        for name in self.nodes.iter_mut().flat_map(|node| node.input.iter_mut().chain(&mut node.output)) {
            if let Some(new) = names.get(name.as_str()) {
                *name = (*new).to_owned();
            }
        }
        self.index();
    }

    /// A name that nothing has yet, from one that it should have.
    pub(super) fn free_name(&self, wanted: &str) -> String {
        let taken = |name: &str| {
            let is_io = self.rest.input.iter().chain(&self.rest.output).any(|value| value.name == name);
            is_io || self.made_by.contains_key(name) || self.tensors.contains_key(name)
        };
        let mut name = wanted.to_owned();
        while taken(&name) {
            name.push('_');
        }
        name
    }

    /// Leaves the nodes that the outputs need, in an order in which they can run, and their weights.
    pub(super) fn set_nodes(&mut self, nodes: Vec<NodeProto>) -> Result<(), String> {
        self.nodes = nodes;
        self.index();
        let outputs: Vec<String> = self.rest.output.iter().map(|output| output.name.clone()).collect();
        let order = self.needed(outputs.iter().map(String::as_str), |_| false)?;
        let mut taken: Vec<Option<NodeProto>> = std::mem::take(&mut self.nodes).into_iter().map(Some).collect();
        self.nodes = order.into_iter().filter_map(|at| taken[at].take()).collect();
        let read: HashSet<&str> = self.nodes.iter().flat_map(|node| &node.input).map(String::as_str).collect();
        self.rest.initializer.retain(|tensor| read.contains(tensor.name.as_str()));
        self.index();
        Ok(())
    }

    /// The nodes that values depend on, each behind those that it depends on; not beyond values that are `given`.
    pub(super) fn needed<'a>(
        &'a self,
        values: impl Iterator<Item = &'a str>,
        given: impl Fn(&str) -> bool,
    ) -> Result<Vec<usize>, String> {
        enum Step {
            Enter(usize),
            Leave(usize),
        }
        let maker = |name: &str| if given(name) { None } else { self.made_by.get(name).copied() };
        let mut steps: Vec<Step> = values.filter_map(maker).map(Step::Enter).collect();
        steps.reverse();
        let (mut entered, mut left, mut order) = (HashSet::new(), HashSet::new(), Vec::new());
        while let Some(step) = steps.pop() {
            match step {
                Step::Enter(at) if entered.insert(at) => {
                    steps.push(Step::Leave(at));
                    let before = self.nodes[at].input.iter().rev().filter_map(|name| maker(name));
                    for from in before {
                        if entered.contains(&from) && !left.contains(&from) {
                            return Err(format!("{} reads what it makes", self.nodes[at].words()));
                        }
                        steps.push(Step::Enter(from));
                    }
                }
                Step::Enter(_) => {}
                Step::Leave(at) => {
                    left.insert(at);
                    order.push(at);
                }
            }
        }
        Ok(order)
    }

    /// The model with its graph.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.rest.node = self.nodes;
        self.model.graph = Some(self.rest);
        self.model.encode_to_vec()
    }
}

/// The nodes of the branch with a past in place of the If that has it.
fn with_past(nodes: Vec<NodeProto>, flag: &str, weights: &mut Vec<TensorProto>) -> Result<Vec<NodeProto>, String> {
    let mut inlined = Vec::new();
    for node in nodes {
        if !(node.is("If") && node.given(0) == Some(flag)) {
            inlined.push(node);
            continue;
        }
        let branch = node.attribute("then_branch").and_then(|attribute| attribute.graph());
        let Some(Ok(branch)) = branch else {
            return Err(format!("{} has no then_branch that can be read", node.words()));
        };
        weights.extend(branch.initializer);
        inlined.extend(branch.node);
        // The outputs of a branch are those of its If, by their order.
        for (inner, outer) in branch.output.iter().zip(&node.output) {
            if inner.name != *outer && !outer.is_empty() {
                inlined.push(NodeProto::new("Identity", &[&inner.name], &[outer]));
            }
        }
    }
    Ok(inlined)
}
