//! The dense nodes of a decoder, fused: products become `ai.pagoda.Linear` together with the norms in front of them, and with
//! the gates, the residuals and the splits behind them. On a Hopper GPU such a node is one kernel for up to 64 rows, and one more
//! where it begins with a norm. Products with weights of 4 or 8 bits become `ai.pagoda.BlockLinear` in the same way. On the CPU these
//! alone are replaced, by themselves.
//!
//! The graph is rewritten in memory when a model is opened, node by node and in their order. What does not match stays as it
//! is, and what a graph computes changes by rounding alone.

use std::collections::{HashMap, HashSet};

use prost::Message;
use prost::bytes::Bytes;

use super::graph::{AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, put};
use super::onnx::TensorProto;
use crate::tensor::ElementType;

const PAGODA: &str = "ai.pagoda";
const MICROSOFT: &str = "com.microsoft";

/// The numbers of a block.
const BLOCK: i64 = 32;

/// How a sum is called that had no name: no exporter calls a value so.
const SUM_OF: &str = "ai.pagoda.Linear.sum_of.";

/// The first version of ONNX's operators that has RMSNormalization.
const RMS_NORMALIZATION: i64 = 23;

/// `AttributeProto.type`: a real number, an integer, a graph, and several graphs.
const FLOAT: i32 = 1;
const INT: i32 = 2;
const GRAPH: i32 = 5;
const GRAPHS: i32 = 10;

impl AttributeProto {
    fn float(name: &str, value: f32) -> Self {
        Self { name: name.into(), f: Some(value), r#type: FLOAT, ..Self::default() }
    }

    fn int(name: &str, value: i64) -> Self {
        Self { name: name.into(), i: Some(value), r#type: INT, ..Self::default() }
    }
}

/// Where a graph is to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Target {
    Cpu,
    Hopper,
}

/// The graph with the dense nodes of an element type fused, as far as kernels of the target do better by that; `None` if nothing
/// matches.
pub(super) fn fused(bytes: &Bytes, target: Target, element: ElementType) -> Result<Option<Vec<u8>>, String> {
    let mut model = ModelProto::decode(bytes.clone()).map_err(|error| format!("not an ONNX model: {error}"))?;
    let mut graph = GraphProto::decode(model.graph.clone()).map_err(|error| format!("its graph: {error}"))?;
    let nodes = graph.node.iter().map(|node| Node::read(node.clone())).collect::<Result<Vec<_>, _>>()?;
    // What graphs inside of a node read is not in the list of its inputs.
    if nodes.iter().any(|node| node.attributes.iter().any(|it| [GRAPH, GRAPHS].contains(&it.r#type))) {
        return Ok(None);
    }
    let opsets: Vec<_> = model.opset_import.iter().filter_map(|opset| OpsetProto::decode(opset.clone()).ok()).collect();
    let version = |domain: &str| opsets.iter().find(|opset| opset.domain == domain).map(|opset| opset.version);
    let mut fusion = Fusion::new(&graph, &nodes, (target, element), version("").unwrap_or_default());
    for node in &nodes {
        fusion.add(node);
    }
    if !fusion.has_fused {
        return Ok(None);
    }
    let made: Vec<NodeProto> = fusion.made.into_iter().flatten().collect();
    // An initializer that nothing reads any more would be a warning of ONNX Runtime.
    let read = |nodes: &mut dyn Iterator<Item = &NodeProto>| -> HashSet<String> {
        nodes.flat_map(|node| node.input.iter().cloned()).collect()
    };
    let (before, after) = (read(&mut nodes.iter().map(|node| &node.proto)), read(&mut made.iter()));
    let kept: HashSet<&String> = graph.output.iter().map(|output| &output.name).collect();
    graph.initializer.retain(|tensor| {
        let name = TensorProto::decode(tensor.clone()).map(|tensor| tensor.name).unwrap_or_default();
        kept.contains(&name) || after.contains(&name) || !before.contains(&name)
    });
    graph.node = made.iter().map(|node| node.encode_to_vec().into()).collect();
    if version(PAGODA).is_none() {
        model.opset_import.push(OpsetProto { domain: PAGODA.into(), version: 1 }.encode_to_vec().into());
    }
    model.graph = graph.encode_to_vec().into();
    Ok(Some(model.encode_to_vec()))
}

#[derive(Message)]
struct OpsetProto {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

/// A node with its attributes read.
struct Node {
    proto: NodeProto,
    attributes: Vec<AttributeProto>,
}

impl Node {
    fn read(bytes: Bytes) -> Result<Self, String> {
        let proto = NodeProto::decode(bytes).map_err(|error| format!("a node: {error}"))?;
        let attributes = proto.attribute.iter().map(|attribute| AttributeProto::decode(attribute.clone()));
        let attributes = attributes.collect::<Result<_, _>>().map_err(|error| format!("an attribute: {error}"))?;
        Ok(Self { proto, attributes })
    }

    fn is(&self, domain: &str, operator: &str) -> bool {
        // ONNX has two names for its own domain.
        let own = if self.proto.domain == "ai.onnx" { "" } else { &self.proto.domain };
        (own, self.proto.op_type.as_str()) == (domain, operator)
    }

    /// The name of an input; `None` where it is left out.
    fn input(&self, at: usize) -> Option<&String> {
        self.proto.input.get(at).filter(|name| !name.is_empty())
    }

    fn output(&self, at: usize) -> Option<&String> {
        self.proto.output.get(at).filter(|name| !name.is_empty())
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attributes.iter().find(|attribute| attribute.name == name)
    }

    fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |attribute| attribute.i.unwrap_or_default())
    }

    fn float(&self, name: &str, default: f32) -> f32 {
        self.attribute(name).map_or(default, |attribute| attribute.f.unwrap_or_default())
    }
}

/// An initializer that no caller can replace.
struct Constant {
    dims: Vec<i64>,
    element: i32,
    /// The numbers, where they are in the graph and as bytes.
    raw: Bytes,
}

/// A value, as far as this module has to know it.
#[derive(Clone, Copy)]
struct Known {
    rank: usize,
    element: i32,
}

/// A Linear or a BlockLinear that has nothing behind its product yet.
struct Plain {
    /// Its place among the nodes that were made.
    at: usize,
    columns: i64,
    kind: Kind,
}

/// What the weight of a product consists of.
#[derive(Clone, Copy)]
enum Kind {
    Numbers,
    Blocks,
}

impl Kind {
    fn operator(self) -> &'static str {
        match self {
            Self::Numbers => "Linear",
            Self::Blocks => "BlockLinear",
        }
    }

    /// The place of the input `bias`. `residual` and `norm` follow it.
    fn bias(self) -> usize {
        match self {
            Self::Numbers => 2,
            Self::Blocks => 4,
        }
    }

    fn residual(self) -> usize {
        self.bias() + 1
    }

    fn norm(self) -> usize {
        self.bias() + 2
    }
}

/// An RMS norm of rows.
struct Norm {
    /// Its place among the nodes that were made.
    at: usize,
    x: String,
    weight: String,
    epsilon: f32,
}

/// A graph in the making.
struct Fusion<'a> {
    constants: HashMap<String, Constant>,
    /// The nodes that read a value.
    readers: HashMap<&'a str, Vec<&'a Node>>,
    outputs: HashSet<&'a str>,
    target: Target,
    /// Of products that are fused.
    element: i32,
    opset: i64,
    known: HashMap<String, Known>,
    /// The nodes of the new graph; those that became part of a later one are gone.
    made: Vec<Option<NodeProto>>,
    /// By their outputs.
    plain: HashMap<String, Plain>,
    norms: HashMap<String, Norm>,
    has_fused: bool,
}

impl<'a> Fusion<'a> {
    fn new(graph: &'a GraphProto, nodes: &'a [Node], (target, element): (Target, ElementType), opset: i64) -> Self {
        let inputs: HashSet<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
        let tensors = graph.initializer.iter().filter_map(|tensor| TensorProto::decode(tensor.clone()).ok());
        let constants: HashMap<String, Constant> = tensors
            .filter(|tensor| !inputs.contains(tensor.name.as_str()))
            .map(|TensorProto { name, dims, data_type, raw_data, .. }| {
                (name, Constant { dims, element: data_type, raw: raw_data })
            })
            .collect();
        let of_constants = constants.iter().map(|(name, Constant { dims, element, .. })| {
            (name.clone(), Known { rank: dims.len(), element: *element })
        });
        let of_inputs = graph.input.iter().filter_map(|input| Some((input.name.clone(), known(input)?)));
        let mut readers: HashMap<&str, Vec<&Node>> = HashMap::new();
        for node in nodes {
            for name in &node.proto.input {
                readers.entry(name).or_default().push(node);
            }
        }
        Self {
            known: of_constants.chain(of_inputs).collect(),
            constants,
            readers,
            outputs: graph.output.iter().map(|output| output.name.as_str()).collect(),
            target,
            element: element as i32,
            opset,
            made: Vec::with_capacity(nodes.len()),
            plain: HashMap::new(),
            norms: HashMap::new(),
            has_fused: false,
        }
    }

    /// Adds the next node of the old graph: as it is, as a Linear, or as part of one.
    fn add(&mut self, node: &Node) {
        self.know(node);
        let is_product = node.is("", "Gemm") || node.is(MICROSOFT, "MatMulNBits");
        let is_fused = if is_product {
            self.product(node)
        } else if self.target == Target::Cpu {
            None
        } else if node.is(PAGODA, "Glu") {
            self.gate(node)
        } else if node.is(MICROSOFT, "SkipSimplifiedLayerNormalization") {
            self.residual(node)
        } else if node.is("", "Split") {
            self.split(node)
        } else {
            None
        };
        if is_fused.is_none() {
            self.made.push(Some(node.proto.clone()));
            if node.is("", "RMSNormalization") {
                self.norm(node);
            }
        }
    }

    /// A product with a weight: a Linear or a BlockLinear, with the norm in front of it.
    fn product(&mut self, node: &Node) -> Option<()> {
        let Product { x, weight, bias, columns, kind, .. } = self.read_product(node)?;
        let mut proto = NodeProto {
            input: [x].into_iter().chain(weight).cloned().collect(),
            output: node.proto.output.clone(),
            name: node.proto.name.clone(),
            op_type: kind.operator().into(),
            domain: PAGODA.into(),
            ..NodeProto::default()
        };
        put(&mut proto.input, kind.bias(), bias);
        if self.target == Target::Hopper {
            if let Some(norm) = self.norms.get(x).filter(|norm| self.is_for(node, x, &norm.weight)) {
                self.made[norm.at] = None;
                proto.input[0].clone_from(&norm.x);
                put(&mut proto.input, kind.norm(), Some(&norm.weight));
                proto.set(&AttributeProto::float("epsilon", norm.epsilon));
            }
            self.plain.insert(node.output(0)?.clone(), Plain { at: self.made.len(), columns, kind });
        }
        self.made.push(Some(proto));
        self.has_fused = true;
        Some(())
    }

    /// A product that there is a kernel for.
    fn read_product<'n>(&self, node: &'n Node) -> Option<Product<'n>> {
        match (self.target, node.proto.op_type.as_str()) {
            (_, "MatMulNBits") => self.read_blocks(node),
            (Target::Cpu, _) => None,
            (Target::Hopper, _) => self.read_gemm(node),
        }
    }

    /// A Gemm as Linear computes it.
    fn read_gemm<'n>(&self, node: &'n Node) -> Option<Product<'n>> {
        let as_it_is = node.float("alpha", 1.0) == 1.0 && node.float("beta", 1.0) == 1.0;
        if !node.is("", "Gemm") || !as_it_is || node.int("transA", 0) != 0 || node.int("transB", 0) == 0 {
            return None;
        }
        let (x, weight, bias) = (node.input(0)?, node.input(1)?, node.input(2));
        let constant = self.constants.get(weight)?;
        let &[columns, inner] = &constant.dims[..] else { return None };
        let fits = |bias: &Constant| bias.dims == [columns] && bias.element == constant.element;
        let has_bias = bias.is_none_or(|bias| self.constants.get(bias).is_some_and(fits));
        let product = Product { x, weight: vec![weight], bias, columns, inner, kind: Kind::Numbers };
        (has_bias && constant.element == self.element).then_some(product)
    }

    /// A MatMulNBits as BlockLinear computes it: a weight of 4 or 8 bits, in blocks of 32 around the middle of their codes.
    fn read_blocks<'n>(&self, node: &'n Node) -> Option<Product<'n>> {
        let (x, codes, scales, bias) = (node.input(0)?, node.input(1)?, node.input(2)?, node.input(5));
        let (bits, f32) = (node.int("bits", 4), ElementType::F32 as i32);
        // What there are kernels for.
        let has_kernel = node.is(MICROSOFT, "MatMulNBits")
            && [4, 8].contains(&bits)
            && (self.target == Target::Cpu) == (self.element == f32);
        // Zero points, and an order of the columns.
        if !has_kernel || node.int("block_size", 0) != BLOCK || node.input(3).is_some() || node.input(4).is_some() {
            return None;
        }
        let (of_codes, of_scales) = (self.constants.get(codes)?, self.constants.get(scales)?);
        let &[width, blocks, bytes] = &of_codes.dims[..] else { return None };
        let count = width.checked_mul(blocks)?;
        let is_known = of_codes.element == ElementType::U8 as i32
            && bytes == BLOCK * bits / 8
            && of_scales.element == self.element;
        let is_whole =
            node.int("K", 0) == blocks * BLOCK && (of_scales.dims == [count] || of_scales.dims == [width, blocks]);
        let fits = |bias: &Constant| bias.dims == [width] && bias.element == self.element;
        if !is_known || !is_whole || !bias.is_none_or(|bias| self.constants.get(bias).is_some_and(fits)) {
            return None;
        }
        let (weight, inner) = (vec![codes, scales], blocks * BLOCK);
        Some(Product { x, weight, bias, columns: width, inner, kind: Kind::Blocks })
    }

    /// Whether rows are normed by this weight for the product of one node alone.
    fn is_for(&self, product: &Node, rows: &str, weight: &str) -> bool {
        let Some(Product { inner, .. }) = self.read_product(product) else { return false };
        let fits = |norm: &Constant| norm.dims == [inner] && norm.element == self.element;
        self.is_read_once(rows) && self.constants.get(weight).is_some_and(fits)
    }

    /// An activation of gates times ups: part of the Linear that both come from.
    fn gate(&mut self, node: &Node) -> Option<()> {
        let x = node.input(0)?;
        let activation = String::from_utf8(node.attribute("activation")?.s.to_vec()).ok()?;
        let output = node.output(0)?.clone();
        let linear = self.followed(x, |plain| plain.columns % 2 == 0)?;
        linear.output = vec![output];
        linear.set(&AttributeProto::text("activation", &activation));
        Some(())
    }

    /// A cut into three: the outputs of the Linear in front.
    fn split(&mut self, node: &Node) -> Option<()> {
        let (x, lengths) = (node.input(0)?, self.constants.get(node.input(1)?)?);
        let is_list = lengths.dims == [3] && lengths.element == ElementType::I64 as i32 && lengths.raw.len() == 24;
        if !is_list || ![1, -1].contains(&node.int("axis", 0)) {
            return None;
        }
        let (numbers, _) = lengths.raw.as_chunks::<8>();
        let lengths: Vec<i64> = numbers.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        let outputs: Vec<String> = (0..3).map(|at| node.output(at).cloned()).collect::<Option<_>>()?;
        let is_cut = |plain: &Plain| {
            let sum = lengths.iter().try_fold(0_i64, |sum, length| sum.checked_add(*length));
            lengths.iter().all(|length| *length > 0) && sum == Some(plain.columns)
        };
        let linear = self.followed(x, is_cut)?;
        linear.output = outputs;
        linear.set(&AttributeProto::int("width2", lengths[1]));
        linear.set(&AttributeProto::int("width3", lengths[2]));
        Some(())
    }

    /// A sum and the norm of it: the sum is part of the Linear that one of the two comes from, and the norm is a node of its own,
    /// for the next product.
    fn residual(&mut self, node: &Node) -> Option<()> {
        let (normed, sum, weight) = (node.output(0)?, node.output(3), node.input(2)?);
        // A bias, and statistics.
        if node.input(3).is_some() || node.output(1).is_some() || node.output(2).is_some() {
            return None;
        }
        let (hidden, added) = [(0, 1), (1, 0)].into_iter().find_map(|(hidden_at, added)| {
            let (hidden, added) = (node.input(hidden_at)?, node.input(added)?);
            // Rows of rank 3 may be as many sequences, to each of which all are added.
            let is_rows = |name| self.known.get(name).is_some_and(|value| value.rank == 2);
            // Those of a Gemm have rank 2, and nothing is added to the first input that has more dimensions.
            let has_rows = |plain: &Plain| matches!(plain.kind, Kind::Numbers) || hidden_at == 0 || is_rows(added);
            let fits = is_rows(hidden) && self.is_plain(added) && self.plain.get(added).is_some_and(has_rows);
            fits.then_some((hidden, added))
        })?;
        let next = self.readers.get(normed.as_str()).map_or(&[][..], Vec::as_slice);
        let disappears = matches!(next, [one] if self.is_for(one, normed, weight));
        if !disappears && self.opset < RMS_NORMALIZATION {
            return None;
        }
        let sum = sum.cloned().unwrap_or_else(|| format!("{SUM_OF}{normed}"));
        let Plain { at, kind, .. } = self.plain.remove(added)?;
        let mut linear = self.made[at].take()?;
        put(&mut linear.input, kind.residual(), Some(hidden));
        linear.output = vec![sum.clone()];
        // Here, where the residual is known.
        self.made.push(Some(linear));
        // com.microsoft's own default.
        let epsilon = node.float("epsilon", 1e-12);
        let mut norm = NodeProto {
            input: vec![sum.clone(), weight.clone()],
            output: vec![normed.clone()],
            name: node.proto.name.clone(),
            op_type: "RMSNormalization".into(),
            ..NodeProto::default()
        };
        norm.set(&AttributeProto::int("axis", -1));
        norm.set(&AttributeProto::float("epsilon", epsilon));
        let norm_at = self.made.len();
        self.norms.insert(normed.clone(), Norm { at: norm_at, x: sum, weight: weight.clone(), epsilon });
        self.made.push(Some(norm));
        Some(())
    }

    /// Keeps in mind the norm that was just made.
    fn norm(&mut self, node: &Node) {
        let (Some(x), Some(weight), Some(output)) = (node.input(0), node.input(1), node.output(0)) else { return };
        // The operator of ONNX may have rows of another type than its weight, whose type its output has.
        let has_type = self.known.get(x).is_some_and(|x| x.element == self.element);
        // Of the rows of a product, which have rank 2, and computed in f32.
        if has_type && [1, -1].contains(&node.int("axis", -1)) && node.int("stash_type", 1) == ElementType::F32 as i64 {
            let epsilon = node.float("epsilon", 1e-5);
            let norm = Norm { at: self.made.len() - 1, x: x.clone(), weight: weight.clone(), epsilon };
            self.norms.insert(output.clone(), norm);
        }
    }

    /// The plain Linear that a value comes from, which the next node becomes part of.
    fn followed(&mut self, name: &str, fits: impl Fn(&Plain) -> bool) -> Option<&mut NodeProto> {
        if !self.is_plain(name) || !self.plain.get(name).is_some_and(fits) {
            return None;
        }
        let Plain { at, .. } = self.plain.remove(name)?;
        self.made[at].as_mut()
    }

    /// Whether a value comes from a plain Linear and goes to one node alone.
    fn is_plain(&self, name: &str) -> bool {
        self.plain.contains_key(name) && self.is_read_once(name)
    }

    fn is_read_once(&self, name: &str) -> bool {
        !self.outputs.contains(name) && self.readers.get(name).is_some_and(|readers| readers.len() == 1)
    }

    /// Keeps in mind rank and type of what a node makes, where a residual or the rows of a norm can come from it.
    fn know(&mut self, node: &Node) {
        let of = |at: usize| self.known.get(node.input(at)?).copied();
        let both = || of(0).zip(of(1));
        let (made, at) = match (node.proto.domain.as_str(), node.proto.op_type.as_str()) {
            ("", "Gemm") => (of(1).map(|weight| Known { rank: 2, ..weight }), 0),
            (MICROSOFT, "MatMulNBits") => (both().map(|(x, _)| x), 0),
            // Rows of a table in blocks, as numbers of the type of their scales.
            (MICROSOFT, "GatherBlockQuantized") if node.int("gather_axis", 0) == 0 => {
                let element = of(2).map(|scales| scales.element);
                let rank = both().map(|(of, by)| (of.rank + by.rank).saturating_sub(1));
                (rank.zip(element).map(|(rank, element)| Known { rank, element }), 0)
            }
            ("", "Gather") if node.int("axis", 0) == 0 => {
                (both().map(|(of, by)| Known { rank: (of.rank + by.rank).saturating_sub(1), ..of }), 0)
            }
            ("", "Cast") => (of(0).map(|x| Known { element: node.int("to", 0) as i32, ..x }), 0),
            ("", "RMSNormalization") => (both().map(|(x, weight)| Known { element: weight.element, ..x }), 0),
            ("", "Mul" | "Add") => (both().map(|(a, b)| Known { rank: a.rank.max(b.rank), ..a }), 0),
            // Of the sum, which has the shape of the first.
            (MICROSOFT, "SkipSimplifiedLayerNormalization") => {
                (of(0).map(|a| Known { rank: a.rank.max(of(1).map_or(0, |b| b.rank)), ..a }), 3)
            }
            _ => (None, 0),
        };
        if let Some((name, made)) = node.output(at).zip(made) {
            self.known.insert(name.clone(), made);
        }
    }
}

/// A product with a weight.
struct Product<'a> {
    x: &'a String,
    /// The inputs that are the weight.
    weight: Vec<&'a String>,
    bias: Option<&'a String>,
    /// N.
    columns: i64,
    /// K.
    inner: i64,
    kind: Kind,
}

fn known(value: &ValueInfoProto) -> Option<Known> {
    let tensor = value.r#type.as_ref()?.tensor_type.as_ref()?;
    Some(Known { rank: tensor.shape.as_ref()?.dim.len(), element: tensor.elem_type })
}

#[cfg(test)]
mod tests;
