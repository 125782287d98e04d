//! A model whose pages have another format than it was exported for. Its graph is rewritten in memory: weights that lie outside
//! the graph stay where they are.

use std::collections::HashMap;

use pagoda_kernels::KvFormat;
use prost::Message;

use super::super::graph::{GraphProto, ModelProto, NodeProto, PoolType, put, replace, scales_names};
use super::ModelFolder;
use crate::error::{Error, Result, Status};

impl ModelFolder {
    /// This folder with pages of another format, and its graph rewritten for them. `None` where the graph has that format.
    ///
    /// # Errors
    /// MODEL if the graph can not be read, or its HstuAttention nodes do not use the pools that the pagoda.json names.
    /// UNSUPPORTED for a model that keeps no keys and values, INVALID_ARGUMENT for int4 and heads of an odd size.
    pub(crate) fn with_format(&self, format: KvFormat) -> Result<Option<(Self, Vec<u8>)>> {
        if format == self.kv.format {
            return Ok(None);
        }
        let mut folder = self.clone();
        folder.kv.format = format;
        let named = folder.kv.format_name();
        if !self.kv.cache {
            let reason = self.kv.reason.as_deref().unwrap_or("it was exported without a cache");
            let message = format!("{named}, and this model keeps no keys and values ({reason}): leave it out");
            return Err(Error::new(Status::Unsupported, message).about("options.kv_format"));
        }
        folder.kv.bytes_per_token = self.kv.bytes_per_token_in(format).ok_or_else(|| {
            let message = format!("{named} needs heads of an even size, and the model's have {}", self.kv.head_size);
            Error::invalid("options.kv_format", message)
        })?;
        folder.inputs.kv_scales = scales_names(format, &folder.inputs.kv_pools);
        folder.outputs.kv_scales = scales_names(format, &folder.outputs.kv_pools);
        let path = self.file(&self.model);
        let bytes = std::fs::read(&path)
            .map_err(|error| Error::new(Status::Io, format!("{}: {error}", path.display())).about("path"))?;
        let graph = rewrite(&bytes, &folder)
            .map_err(|message| Error::new(Status::Model, format!("{}: {message}", path.display())))?;
        Ok(Some((folder, graph)))
    }
}

/// The graph with the pools of `to`.
fn rewrite(bytes: &[u8], to: &ModelFolder) -> Result<Vec<u8>, String> {
    let mut model = ModelProto::decode(bytes).map_err(|error| format!("not an ONNX model: {error}"))?;
    let mut graph = GraphProto::decode(model.graph.clone()).map_err(|error| format!("its graph: {error}"))?;
    let number = |pools: &[String]| -> HashMap<String, usize> { pools.iter().cloned().zip(0..).collect() };
    let layers = Layers { inputs: number(&to.inputs.kv_pools), outputs: number(&to.outputs.kv_pools), to };
    // Those of graphs whose attention does not append: a quantised pool takes one that does.
    let mut appends: HashMap<usize, NodeProto> = HashMap::new();
    let mut rewritten = 0;
    let mut nodes = Vec::with_capacity(graph.node.len());
    for node in std::mem::take(&mut graph.node) {
        let mut read = NodeProto::decode(node.clone()).map_err(|error| format!("a node: {error}"))?;
        match (read.domain.as_str(), read.op_type.as_str()) {
            ("ai.pagoda", "PagedKvAppend") => drop(appends.insert(layers.of_append(&read)?, read)),
            ("ai.pagoda", "HstuAttention") => {
                layers.rewrite(&mut read, &appends)?;
                nodes.push(read.encode_to_vec().into());
                rewritten += 1;
            }
            _ => nodes.push(node),
        }
    }
    if rewritten != to.inputs.kv_pools.len() {
        return Err(format!("{rewritten} HstuAttention nodes for {} pools", to.inputs.kv_pools.len()));
    }
    graph.node = nodes;
    let kv = &to.kv;
    let (page_size, heads, head_size) = (kv.page_size, kv.heads, kv.head_size);
    let pool = PoolType { page_size, heads, head_size, element: kv.element, format: kv.format };
    replace(&mut graph.input, (&to.inputs.kv_pools, &to.inputs.kv_scales), &[], &pool)?;
    replace(&mut graph.output, (&to.outputs.kv_pools, &to.outputs.kv_scales), &[], &pool)?;
    model.graph = graph.encode_to_vec().into();
    Ok(model.encode_to_vec())
}

/// The places of HstuAttention's pool and scales among its inputs, and among its outputs.
const POOL: usize = 8;
const SCALES: usize = 10;
const POOL_OUT: usize = 1;
const SCALES_OUT: usize = 2;
/// Those of the inputs that an append has too: key, value, and what says where rows and pages are.
const SHARED: std::ops::Range<usize> = 1..8;

/// The layers of pools by their names in the graph.
struct Layers<'a> {
    inputs: HashMap<String, usize>,
    outputs: HashMap<String, usize>,
    to: &'a ModelFolder,
}

impl Layers<'_> {
    /// The layer that an append writes.
    fn of_append(&self, node: &NodeProto) -> Result<usize, String> {
        let [from, to] = [node.input.first(), node.output.first()];
        let layers = (from.and_then(|name| self.inputs.get(name)), to.and_then(|name| self.outputs.get(name)));
        match layers {
            (Some(from), Some(to)) if from == to => Ok(*from),
            _ => Err(format!("the pool of node `{}` is none of inputs.kv_pools and outputs.kv_pools", node.name)),
        }
    }

    /// Makes an attention use the pages of its layer, and append to them.
    fn rewrite(&self, node: &mut NodeProto, appends: &HashMap<usize, NodeProto>) -> Result<(), String> {
        let pool = node.input.get(POOL).cloned().unwrap_or_default();
        let layer = match (self.inputs.get(&pool), self.outputs.get(&pool)) {
            (Some(&layer), _) if node.output.get(POOL_OUT) == self.to.outputs.kv_pools.get(layer) => layer,
            (_, Some(&layer)) => {
                let append = appends.get(&layer).filter(|append| append.input.get(SHARED) == node.input.get(SHARED));
                append.ok_or_else(|| format!("the pool of node `{}` has other rows than the node", node.name))?;
                layer
            }
            _ => return Err(format!("the pool of node `{}` is none of inputs.kv_pools", node.name)),
        };
        put(&mut node.input, POOL, self.to.inputs.kv_pools.get(layer));
        put(&mut node.input, SCALES, self.to.inputs.kv_scales.get(layer));
        put(&mut node.output, POOL_OUT, self.to.outputs.kv_pools.get(layer));
        put(&mut node.output, SCALES_OUT, self.to.outputs.kv_scales.get(layer));
        node.set_format(self.to.kv.format);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> ModelFolder {
        ModelFolder::open(format!("{}/tests/data/engine/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    fn nodes(bytes: &[u8]) -> Vec<NodeProto> {
        let graph = GraphProto::decode(ModelProto::decode(bytes).unwrap().graph).unwrap();
        graph.node.into_iter().map(|node| NodeProto::decode(node).unwrap()).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn every_attention_appends_and_nothing_else_does() {
        for name in ["gather", "fused", "half"] {
            let folder = folder(name);
            let before = nodes(&std::fs::read(folder.file(&folder.model)).unwrap());
            let (quantised, graph) = folder.with_format(KvFormat::Int8).unwrap().unwrap();
            let after = nodes(&graph);
            let of = |nodes: &[NodeProto], kind| nodes.iter().filter(|node| node.op_type == kind).count();
            assert_eq!((of(&after, "PagedKvAppend"), of(&after, "HstuAttention")), (0, 2), "{name}");
            assert_eq!(after.len(), before.len() - of(&before, "PagedKvAppend"), "{name}");
            for (layer, node) in after.iter().filter(|node| node.op_type == "HstuAttention").enumerate() {
                let places = [&node.input[POOL], &node.input[SCALES], &node.output[POOL_OUT], &node.output[SCALES_OUT]];
                let (inputs, outputs) = (&quantised.inputs, &quantised.outputs);
                let expected = [&inputs.kv_pools, &inputs.kv_scales, &outputs.kv_pools, &outputs.kv_scales];
                assert_eq!(places, expected.map(|names| &names[layer]), "{name}");
            }
            assert!(folder.with_format(KvFormat::Native).unwrap().is_none());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn a_graph_with_other_pools_is_refused() {
        let refused = |name: &str, change: &dyn Fn(&mut ModelFolder)| {
            let mut folder = folder(name);
            change(&mut folder);
            let error = folder.with_format(KvFormat::Int8).expect_err("it is refused");
            assert_eq!(error.status(), Status::Model, "{error}");
            error.message().to_owned()
        };
        let other = |names: &mut Vec<String>| names[1] = "another".into();
        let message = refused("fused", &|folder| other(&mut folder.inputs.kv_pools));
        assert!(message.contains("is none of inputs.kv_pools"), "{message}");
        let message = refused("gather", &|folder| other(&mut folder.outputs.kv_pools));
        assert!(message.contains("is none of inputs.kv_pools and outputs.kv_pools"), "{message}");
        let message = refused("fused", &|folder| folder.inputs.kv_pools.push("a third".into()));
        assert!(message.contains("2 HstuAttention nodes for 3 pools"), "{message}");
        let message = refused("fused", &|folder| folder.contents.model = "pagoda.json".into());
        assert!(message.contains("pagoda.json: not an ONNX model"), "{message}");
    }
}
