//! Where the rows are chosen whose logits are asked for: in front of the last product.

use super::Names;
use super::graph::Graph;
use super::proto::NodeProto;
use super::trial::Trial;

/// The place at which rows are chosen.
#[derive(Debug, PartialEq)]
pub(super) struct Head {
    /// The value that has all rows.
    pub(super) rows: String,
    /// Its dimension that has the tokens.
    pub(super) axis: usize,
    /// The result of the product that reads it; `None`: the rows are those of the logits.
    pub(super) product: Option<String>,
}

/// Finds it. What is between product and logits works on each number alone.
pub(super) fn find(graph: &Graph, names: &Names<'_>, trial: &Trial) -> Result<Head, String> {
    let tokens = |name: &str| trial.value(name).and_then(|value| value.tokens);
    let mut name = names.logits;
    while let Some(node) = graph.maker(name) {
        if is_product(node) {
            let head = node.given(0).zip(node.given(0).and_then(tokens)).map(|(rows, axis)| Head {
                rows: rows.to_owned(),
                axis,
                product: Some(name.to_owned()),
            });
            if let Some(head) = head {
                return Ok(head);
            }
            break;
        }
        let mut inputs = node.input.iter().filter(|name| tokens(name).is_some());
        match (inputs.next(), inputs.next()) {
            (Some(inner), None) if is_by_number(node) => name = inner,
            _ => break,
        }
    }
    let axis = tokens(names.logits).ok_or_else(|| format!("the rows of {:?} are not those of tokens", names.logits))?;
    Ok(Head { rows: names.logits.to_owned(), axis, product: None })
}

fn is_product(node: &NodeProto) -> bool {
    let microsoft = ["MatMulNBits", "MatMulBnb4"].iter().any(|op| node.is_microsoft(op));
    microsoft || node.is("MatMul") || node.is("Gemm")
}

fn is_by_number(node: &NodeProto) -> bool {
    ["Identity", "Cast", "Mul", "Div", "Add", "Sub", "Tanh"].iter().any(|op| node.is(op))
}
