//! A model whose pages are used in another way than it was exported for. Its graph is rewritten in memory: the weights, which
//! lie outside the graph, stay where they are.

use std::collections::HashMap;

use pagoda_kernels::{KV_NORMS, KvFormat};
use prost::Message;
use prost::bytes::Bytes;

use super::super::fuse::{self, Target};
use super::super::graph::{
    Dimension, GraphProto, ModelProto, NodeProto, PoolType, TypeProto, ValueInfoProto, put, replace, scales_names,
};
use super::{GenerateFolder, Inputs, KvLayout, Outputs};
use crate::error::{Error, Result, Status};
use crate::tensor::ElementType;

/// How pages are used, where a graph can be exported with another use of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PagesForm {
    /// How they hold keys and values.
    pub(crate) format: KvFormat,
    /// Whether the heads of a layer have slots of their own: the graph has inputs for them.
    pub(crate) slots: bool,
    /// Whether the graph returns the weights that slots got.
    pub(crate) weights: bool,
    /// Whether the graph returns the lengths of new values, and the errors of their format.
    pub(crate) norms: bool,
}

/// The inputs and the output of a graph for the slots of one layer.
#[derive(Clone, Debug)]
pub(crate) struct SlotNames {
    /// i32 `[rows, heads]`.
    pub(crate) write_slots: String,
    /// i32 `[sequences, heads, slots]`.
    pub(crate) token_pos: String,
    /// f32 `[sequences, heads, slots]`.
    pub(crate) key_weights: Option<String>,
    /// f32 `[rows, heads, 3]`.
    pub(crate) kv_norms: Option<String>,
}

impl GenerateFolder {
    /// This folder with pages of another form, and its graphs, or `graphs` in their place, rewritten for them. `None` where the
    /// graph has that form.
    ///
    /// # Errors
    /// MODEL if the graph can not be read, or its PagedAttention nodes do not use the pools that the pagoda.json names.
    /// INVALID_ARGUMENT for int4 and heads of an odd size. UNSUPPORTED for slots in a graph without positions.
    pub(crate) fn with_pages(
        &self,
        graphs: Option<&RewrittenGraphs>,
        form: PagesForm,
    ) -> Result<Option<(Self, RewrittenGraphs)>> {
        let format = form.format;
        if format == self.kv.format && !form.slots {
            return Ok(None);
        }
        if format == KvFormat::Int4 && !self.kv.head_size.is_multiple_of(2) {
            let message = format!("int4 needs heads of an even size, and the model's have {}", self.kv.head_size);
            return Err(Error::invalid("options.kv_format", message));
        }
        if form.slots && self.inputs.positions.is_none() {
            let message =
                "the model's graph has no input for positions, which a policy needs: it is one without rotation";
            return Err(Error::new(Status::Unsupported, message).about("options.kv_policy"));
        }
        let mut folder = self.clone();
        folder.kv.format = format;
        folder.kv.bytes_per_token = folder.kv.token_shape().bytes(format) as u64;
        folder.inputs.kv_scales = scales_names(format, &folder.inputs.kv_pools);
        folder.outputs.kv_scales = scales_names(format, &folder.outputs.kv_pools);
        let names = |pool: &String| SlotNames {
            write_slots: format!("{pool}.write_slots"),
            token_pos: format!("{pool}.token_pos"),
            key_weights: form.weights.then(|| format!("{pool}.key_weights")),
            kv_norms: form.norms.then(|| format!("{pool}.kv_norms")),
        };
        let slots: Vec<_> = if form.slots { folder.inputs.kv_pools.iter().map(names).collect() } else { Vec::new() };
        let rewritten = |name: &String| {
            let bytes = match graphs {
                Some(graphs) => graphs.graph.clone(),
                None => self.bytes_of(name)?.into(),
            };
            let graph = rewrite(&bytes, self, &folder, &slots).map_err(|message| self.no_graph(name, &message))?;
            Ok::<_, Error>(Bytes::from(graph))
        };
        let graph = rewritten(&self.model)?;
        let on_cpu = self.cpu_model.as_ref().map(rewritten).transpose()?;
        Ok(Some((folder, RewrittenGraphs { graph, on_cpu, slots })))
    }

    /// The folder's graph, or that of `graphs`, for a Hopper GPU alone: with its dense nodes fused. Products, norms, gates, residuals
    /// and splits become `ai.pagoda.Linear`, or with weights of 4 or 8 bits `ai.pagoda.BlockLinear`. `None` where there is nothing to
    /// fuse.
    ///
    /// # Errors
    /// IO if the graph can not be read, MODEL if it is none.
    pub(crate) fn with_fused(&self, graphs: Option<&RewrittenGraphs>) -> Result<Option<RewrittenGraphs>> {
        let (graph, slots) = self.graph_and_slots(graphs)?;
        let fused = self.fused_for(Target::Hopper, &graph)?;
        Ok(fused.map(|graph| RewrittenGraphs { graph, on_cpu: None, slots }))
    }

    /// The same graph, and another one for the CPU, where products with weights in blocks are `ai.pagoda.BlockLinear`. `None` where
    /// there are none, or the folder has a graph of its own for the CPU.
    ///
    /// # Errors
    /// As of [`with_fused`](Self::with_fused).
    pub(crate) fn with_blocks_on_cpu(&self, graphs: Option<&RewrittenGraphs>) -> Result<Option<RewrittenGraphs>> {
        if self.cpu_model.is_some() {
            return Ok(None);
        }
        let (graph, slots) = self.graph_and_slots(graphs)?;
        let on_cpu = self.fused_for(Target::Cpu, &graph)?;
        Ok(on_cpu.map(|on_cpu| RewrittenGraphs { graph, on_cpu: Some(on_cpu), slots }))
    }

    fn graph_and_slots(&self, graphs: Option<&RewrittenGraphs>) -> Result<(Bytes, Vec<SlotNames>)> {
        Ok(match graphs {
            Some(RewrittenGraphs { graph, slots, .. }) => (graph.clone(), slots.clone()),
            None => (self.bytes_of(&self.model)?.into(), Vec::new()),
        })
    }

    fn fused_for(&self, target: Target, graph: &Bytes) -> Result<Option<Bytes>> {
        let fused = fuse::fused(graph, target, self.compute);
        Ok(fused.map_err(|message| self.no_graph(&self.model, &message))?.map(Bytes::from))
    }

    /// The graph as a generator opens it on a Hopper GPU, for tests.
    #[doc(hidden)]
    pub fn fused_graph(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.with_fused(None)?.map(|fused| fused.graph.into()))
    }

    fn bytes_of(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.file(name);
        std::fs::read(&path)
            .map_err(|error| Error::new(Status::Io, format!("{}: {error}", path.display())).about("path"))
    }

    fn no_graph(&self, name: &str, message: &str) -> Error {
        Error::new(Status::Model, format!("{}: {message}", self.file(name).display()))
    }
}

/// The bytes of a folder's graphs, rewritten.
pub(crate) struct RewrittenGraphs {
    graph: Bytes,
    on_cpu: Option<Bytes>,
    /// Of each layer; empty without slots.
    pub(crate) slots: Vec<SlotNames>,
}

impl RewrittenGraphs {
    /// One graph, without slots.
    pub(crate) fn one(graph: Vec<u8>) -> Self {
        Self { graph: graph.into(), on_cpu: None, slots: Vec::new() }
    }

    /// The graph, and the one that the CPU provider takes instead; mostly it is the same.
    pub(crate) fn bytes(&self) -> (&[u8], &[u8]) {
        (&self.graph, self.on_cpu.as_ref().unwrap_or(&self.graph))
    }
}

/// The graph of `from` with the pools of `to`.
fn rewrite(bytes: &[u8], from: &GenerateFolder, to: &GenerateFolder, slots: &[SlotNames]) -> Result<Vec<u8>, String> {
    let mut model = ModelProto::decode(bytes).map_err(|error| format!("not an ONNX model: {error}"))?;
    let mut graph = GraphProto::decode(model.graph.clone()).map_err(|error| format!("its graph: {error}"))?;
    let layers: HashMap<&str, usize> = from.inputs.kv_pools.iter().map(String::as_str).zip(0..).collect();
    let mut rewritten = 0;
    for node in &mut graph.node {
        let mut read = NodeProto::decode(node.clone()).map_err(|error| format!("a node: {error}"))?;
        if (read.domain.as_str(), read.op_type.as_str()) != ("ai.pagoda", "PagedAttention") {
            continue;
        }
        let pool = read.input.get(POOL).and_then(|name| layers.get(name.as_str()));
        let &layer = pool.ok_or_else(|| format!("the pool of node `{}` is none of inputs.kv_pools", read.name))?;
        read.set_pages(layer, to)?;
        if let Some(names) = slots.get(layer) {
            read.set_slots(names, to.inputs.positions.as_ref());
        }
        *node = read.encode_to_vec().into();
        rewritten += 1;
    }
    if rewritten != layers.len() {
        return Err(format!("{rewritten} PagedAttention nodes for {} pools", layers.len()));
    }
    let pool = to.kv.pool_type();
    let Inputs { kv_pools, kv_scales, .. } = &to.inputs;
    replace(&mut graph.input, (kv_pools, kv_scales), &from.inputs.kv_scales, &pool)?;
    let Outputs { kv_pools, kv_scales, .. } = &to.outputs;
    replace(&mut graph.output, (kv_pools, kv_scales), &from.outputs.kv_scales, &pool)?;
    let heads = i64::from(to.kv.heads);
    for (layer, names) in slots.iter().enumerate() {
        // Layers may have different numbers of them.
        let count = format!("slots_{layer}");
        let of_slots = [Dimension::Named("sequences"), Dimension::Number(heads), Dimension::Named(&count)];
        let of_rows = [Dimension::Named("rows"), Dimension::Number(heads)];
        graph.input.push(ValueInfoProto::new(&names.write_slots, ElementType::I32, &of_rows));
        graph.input.push(ValueInfoProto::new(&names.token_pos, ElementType::I32, &of_slots));
        let weights = names.key_weights.as_ref();
        graph.output.extend(weights.map(|name| ValueInfoProto::new(name, ElementType::F32, &of_slots)));
        let of_norms = [Dimension::Named("rows"), Dimension::Number(heads), Dimension::Number(KV_NORMS as i64)];
        let norms = names.kv_norms.as_ref();
        graph.output.extend(norms.map(|name| ValueInfoProto::new(name, ElementType::F32, &of_norms)));
    }
    model.graph = graph.encode_to_vec().into();
    Ok(model.encode_to_vec())
}

/// The places of PagedAttention's pool and scales among its inputs, and among its outputs.
const POOL: usize = 7;
const SCALES: usize = 8;
const POOL_OUT: usize = 1;
const SCALES_OUT: usize = 2;
/// Those of its positions, slots and weights.
const POSITIONS: usize = 9;
const WRITE_SLOTS: usize = 13;
const TOKEN_POS: usize = 14;
const KEY_WEIGHTS: usize = 3;
const NORMS: usize = 4;

impl KvLayout {
    fn pool_type(&self) -> PoolType {
        let &Self { page_size, heads, head_size, element, format, .. } = self;
        PoolType { page_size, heads, head_size, element, format }
    }
}

impl NodeProto {
    /// Makes this PagedAttention use the pages of a layer.
    fn set_pages(&mut self, layer: usize, to: &GenerateFolder) -> Result<(), String> {
        if self.output.get(POOL_OUT) != Some(&to.outputs.kv_pools[layer]) {
            return Err(format!("the pool of node `{}` is none of outputs.kv_pools", self.name));
        }
        put(&mut self.input, SCALES, to.inputs.kv_scales.get(layer));
        put(&mut self.output, SCALES_OUT, to.outputs.kv_scales.get(layer));
        self.set_format(to.kv.format);
        Ok(())
    }
}

impl NodeProto {
    /// Makes this PagedAttention use slots of each head.
    fn set_slots(&mut self, names: &SlotNames, positions: Option<&String>) {
        put(&mut self.input, POSITIONS, positions);
        put(&mut self.input, WRITE_SLOTS, Some(&names.write_slots));
        put(&mut self.input, TOKEN_POS, Some(&names.token_pos));
        put(&mut self.output, KEY_WEIGHTS, names.key_weights.as_ref());
        put(&mut self.output, NORMS, names.kv_norms.as_ref());
    }
}

impl ValueInfoProto {
    fn new(name: &str, element: ElementType, dims: &[Dimension<'_>]) -> Self {
        Self { name: name.into(), r#type: Some(TypeProto::tensor(element, dims)), ..Self::default() }
    }
}
