//! Nodes that are put into a graph.

use super::attention::{Layout, Projected, Rows};
use super::graph::Graph;
use super::proto::{AttributeProto, NodeProto, TensorProto};
use crate::tensor::ElementType;

/// A graph, and new nodes for it, in any order.
pub(super) struct Emit<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) nodes: Vec<NodeProto>,
}

impl<'a> Emit<'a> {
    pub(super) fn new(graph: &'a mut Graph) -> Self {
        Self { graph, nodes: Vec::new() }
    }

    /// Adds a node, unless its output is there already.
    pub(super) fn node(&mut self, node: NodeProto) {
        if self.nodes.iter().all(|known| known.output != node.output) {
            self.nodes.push(node);
        }
    }

    /// The graph has the new nodes and those of its own that are still needed.
    pub(super) fn finish(self) -> Result<(), String> {
        let nodes = [self.nodes, std::mem::take(&mut self.graph.nodes)].concat();
        self.graph.set_nodes(nodes)
    }

    /// A list of numbers that nodes read.
    pub(super) fn ints(&mut self, numbers: &[i64]) -> String {
        let name = format!("pagoda.{}", numbers.iter().map(i64::to_string).collect::<Vec<_>>().join("x"));
        if self.graph.tensor(&name).is_none() {
            self.graph.add_tensor(TensorProto::of_ints(&name, numbers));
        }
        name
    }

    pub(super) fn reshape(&mut self, from: &str, dims: &[i64], to: &str) {
        let shape = self.ints(dims);
        self.node(NodeProto::new("Reshape", &[from, &shape], &[to]));
    }

    /// Numbers of another type.
    pub(super) fn cast(&mut self, from: &str, element: i32, to: &str) {
        self.node(NodeProto::new("Cast", &[from], &[to]).with(AttributeProto::int("to", element.into())));
    }

    /// Exchanges heads and tokens.
    pub(super) fn swap(&mut self, from: &str, to: &str) {
        let order = AttributeProto::ints("perm", &[0, 2, 1, 3]);
        self.node(NodeProto::new("Transpose", &[from], &[to]).with(order));
    }

    /// Leaves a value to a new node: its own makes one that nothing reads.
    pub(super) fn replace(&mut self, name: &str) {
        for output in self.graph.nodes.iter_mut().flat_map(|node| &mut node.output).filter(|output| *output == name) {
            output.push_str(".replaced");
        }
    }

    /// Queries, keys and values, apart. `widths` are those of their rows.
    pub(super) fn apart(&mut self, projected: &Projected, widths: [usize; 3], to: &str) -> Result<[Rows; 3], String> {
        let packed = match projected {
            Projected::Apart(rows) => return Ok(rows.clone()),
            Projected::Packed(name) => name,
        };
        if self.graph.opset() < 13 {
            return Err(format!(
                "the graph has opset {}, and 13 or more is needed: export it again",
                self.graph.opset()
            ));
        }
        let lengths = self.ints(&widths.map(|width| width as i64));
        let parts = ["query", "key", "value"].map(|part| format!("{to}.packed_{part}"));
        let outputs: Vec<&str> = parts.iter().map(String::as_str).collect();
        self.node(NodeProto::new("Split", &[packed, &lengths], &outputs).with(AttributeProto::int("axis", -1)));
        Ok(parts.map(|name| Rows { name, layout: Layout::Flat }))
    }

    /// A table of a rotation in f32.
    pub(super) fn in_f32(&mut self, table: &str) -> String {
        let is_f32 = |tensor: &TensorProto| tensor.data_type == ElementType::F32 as i32;
        if self.graph.tensor(table).is_some_and(is_f32) {
            return table.to_owned();
        }
        let name = format!("{table}.f32");
        self.cast(table, ElementType::F32 as i32, &name);
        name
    }
}
