//! Finds the attention of each layer, whatever operators it is of: what goes in, what comes out, and what is computed.

mod codes;
mod group_query;
mod mask;
mod plain;
mod standard;

use std::collections::HashMap;

use codes::Codes;
use mask::Masks;

use super::Names;
use super::graph::Graph;
use super::proto::NodeProto;
use super::trial::{Lengths, Trial};
use super::value::Value;

/// The attention of a layer.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) projected: Projected,
    /// Query heads.
    pub(super) heads: usize,
    pub(super) scale: f32,
    /// 0: none.
    pub(super) softcap: f32,
    /// Tokens that a row sees, itself included; 0: all.
    pub(super) window: usize,
    /// Where it rotates queries and keys itself.
    pub(super) rotary: Option<Rotary>,
    pub(super) sinks: Option<Sinks>,
    pub(super) output: Rows,
}

/// Queries, keys and values of the new tokens.
#[derive(Debug)]
pub(super) enum Projected {
    Apart([Rows; 3]),
    /// In one row of a token: all query heads, all key heads, all value heads.
    Packed(String),
}

/// A value with the rows of heads.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) name: String,
    pub(super) layout: Layout,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    /// `[1, tokens, heads * head_size]`.
    Flat,
    /// `[1, heads, tokens, head_size]`.
    Heads,
}

/// The tables of a rotation, `[positions, pairs]`.
#[derive(Debug)]
pub(super) struct Rotary {
    pub(super) cos: String,
    pub(super) sin: String,
    pub(super) pairs: usize,
    pub(super) interleaved: bool,
}

/// Logits that join the denominator of the softmax.
#[derive(Debug)]
pub(super) enum Sinks {
    /// One for each query head.
    Given(String),
    /// 0 for each.
    Zero,
}

/// An attention whose mask was not looked into yet.
struct Found {
    attention: Attention,
    masks: Masks,
    /// What messages call it.
    words: String,
}

const LENGTHS: [Lengths; 2] = [Lengths { new: 3, past: 2 }, Lengths { new: 7, past: 11 }];

/// The attention of each layer; or what is wrong with each that was not recognised.
pub(super) fn recognise(graph: &Graph, names: &Names<'_>) -> Result<Vec<Attention>, Vec<String>> {
    let codes = Codes { kv_heads: names.kv_heads, head_size: names.head_size, total: LENGTHS[1].past + LENGTHS[1].new };
    let (mut given, mut wrong) = (HashMap::new(), Vec::new());
    for layer in 0..names.past_keys.len() {
        for (kind, past, present) in
            [(codes::KEY, names.past_keys, names.present_keys), (codes::VALUE, names.past_values, names.present_values)]
        {
            let name = graph.origin(&present[layer]);
            match graph.maker(name).map(|node| (node, joins(node, &past[layer]))) {
                Some((_, true)) => _ = given.insert(name.to_owned(), codes.value(layer, kind)),
                Some((node, false)) if attends(node) => {}
                Some((node, false)) => wrong.push(format!(
                    "{} makes {:?}, and does not append to {:?}",
                    node.words(),
                    present[layer],
                    past[layer]
                )),
                None => wrong.push(format!("no node makes {:?}", present[layer])),
            }
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let first = Trial::run(graph, names, LENGTHS[0], &HashMap::new(), None);
    let trial = Trial::run(graph, names, LENGTHS[1], &given, Some(&first));
    let look = Look { graph, names, trial: &trial, codes: &codes };
    let found: Vec<_> = (0..names.past_keys.len()).map(|layer| look.layer(layer)).collect();
    let (found, wrong): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
    let wrong: Vec<String> = wrong.into_iter().filter_map(Result::err).collect();
    if !wrong.is_empty() {
        return Err(wrong);
    }
    mask::with_windows(graph, names, found.into_iter().flatten().collect())
}

/// Whether a node puts new tokens behind past ones.
fn joins(node: &NodeProto, past: &str) -> bool {
    node.is("Concat") && matches!(node.int("axis", 0), 2 | -2) && node.input.len() == 2 && node.given(0) == Some(past)
}

/// Whether a node attends and appends.
fn attends(node: &NodeProto) -> bool {
    node.is_microsoft("GroupQueryAttention") || node.is("Attention")
}

/// What a layer is recognised by.
struct Look<'a> {
    graph: &'a Graph,
    names: &'a Names<'a>,
    trial: &'a Trial,
    codes: &'a Codes,
}

impl<'a> Look<'a> {
    fn layer(&self, layer: usize) -> Result<Found, String> {
        let key = self.graph.origin(&self.names.present_keys[layer]);
        let maker = self.graph.maker(key).ok_or_else(|| format!("no node makes {key:?}"))?;
        let found = match maker {
            node if node.is_microsoft("GroupQueryAttention") => self.group_query(node, layer)?,
            node if node.is("Attention") => self.standard(node, layer)?,
            _ => self.by_values(layer)?,
        };
        let (heads, kv_heads) = (found.attention.heads, self.names.kv_heads);
        if heads == 0 || heads % kv_heads != 0 {
            return Err(format!("{}: {heads} query heads are no multiple of {kv_heads} heads of keys", found.words));
        }
        Ok(found)
    }

    /// The attention that reads the values of a layer.
    fn by_values(&self, layer: usize) -> Result<Found, String> {
        let reads = |node: &&NodeProto, at: usize| {
            let value = node.given(at).and_then(|name| self.trial.value(name));
            value.is_some_and(|value| self.codes.layer_of(value) == Some((layer, codes::VALUE)))
        };
        let nodes = &self.graph.nodes;
        if let Some(node) = nodes.iter().find(|node| node.is("Attention") && reads(node, 2)) {
            return self.standard(node, layer);
        }
        let name = &self.names.present_values[layer];
        let product = nodes.iter().find(|node| node.is("MatMul") && reads(node, 1));
        self.plain(
            product
                .ok_or_else(|| format!("no node was found that multiplies {name:?} by the weights of an attention"))?,
            layer,
        )
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.trial.value(name)
    }

    /// The new rows that a node appends to a past.
    fn appended(&self, present: &str) -> Result<Rows, String> {
        let concat = self.graph.maker(self.graph.origin(present)).filter(|node| node.is("Concat"));
        let name = concat.and_then(|node| node.given(1)).ok_or_else(|| format!("no node appends to {present:?}"))?;
        self.rows(name, self.names.kv_heads)
    }

    /// A value that has the rows of so many heads; if it was turned from a flat one, that one.
    fn rows(&self, name: &str, heads: usize) -> Result<Rows, String> {
        let (new, size) = (self.trial.lengths.new, self.names.head_size);
        let wrong = || {
            let found =
                self.trial.dims(name).map_or_else(|| "no known shape".to_owned(), |dims| format!("the shape {dims:?}"));
            let by = self.graph.maker(name).map_or_else(String::new, |node| format!(" by {}", node.words()));
            format!("{name:?}{by} has {found} for {new} tokens, and {heads} heads of {size} are needed")
        };
        match *self.trial.dims(name).ok_or_else(wrong)? {
            [1, tokens, width] if tokens == new && width == heads * size => {
                Ok(Rows { name: name.to_owned(), layout: Layout::Flat })
            }
            [1, found, tokens, width] if (found, tokens, width) == (heads, new, size) => {
                let flat = self.flat_before(name, heads).map(str::to_owned);
                let layout = if flat.is_some() { Layout::Flat } else { Layout::Heads };
                Ok(Rows { name: flat.unwrap_or_else(|| name.to_owned()), layout })
            }
            _ => Err(wrong()),
        }
    }

    /// The flat value that was cut into heads, which were then put before tokens.
    fn flat_before(&self, name: &str, heads: usize) -> Option<&'a str> {
        let turned = self.graph.maker(name).filter(|node| swaps(node))?;
        let cut = self.graph.maker(turned.given(0)?).filter(|node| node.is("Reshape"))?;
        let flat = cut.given(0)?;
        (self.trial.dims(flat)? == [1, self.trial.lengths.new, heads * self.names.head_size]).then_some(flat)
    }

    /// Where the result of an attention is flat: behind the nodes that put heads together, if nothing else reads it.
    fn result(&self, name: &str, heads: usize) -> Rows {
        let only = |name: &str| {
            let mut readers = self.graph.readers(name);
            readers.next().filter(|_| readers.next().is_none() && self.graph.output(name).is_none())
        };
        let flat = || {
            let turned = only(name).filter(|node| swaps(node))?.made(0)?;
            let flat = only(turned).filter(|node| node.is("Reshape"))?.made(0)?;
            (self.trial.dims(flat)? == [1, self.trial.lengths.new, heads * self.names.head_size]).then_some(flat)
        };
        match flat() {
            Some(flat) => Rows { name: flat.to_owned(), layout: Layout::Flat },
            None => Rows { name: name.to_owned(), layout: Layout::Heads },
        }
    }

    /// A number that a value is, everywhere.
    fn uniform(&self, name: &str) -> Option<f64> {
        self.value(name)?.uniform()
    }
}

/// Whether a node exchanges heads and tokens.
fn swaps(node: &NodeProto) -> bool {
    node.is("Transpose") && node.ints("perm") == Some(&[0, 2, 1, 3])
}
