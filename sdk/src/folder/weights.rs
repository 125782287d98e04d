//! Checks that every weight of a graph is a finite number. One that is not would spoil every score that it reaches, and
//! what is cached too.

use std::cell::RefCell;
use std::path::Path;

use prost::Message;
use prost::bytes::Bytes;

use super::contents::FolderContents;
use super::external::{External, Region};
use super::numbers::{self, Found};
use super::onnx::{AttributeProto, DEFAULT, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};
use crate::error::{Error, Result, Status};

/// A tensor in another file, which is still to be scanned.
pub(super) struct Outside<'a> {
    pub(super) region: Region<'a>,
    /// The file of the graph that it belongs to.
    pub(super) graph: &'a str,
    tensor: String,
    may_be_infinite: bool,
}

impl Outside<'_> {
    /// Refuses a number that is not finite; called when the file was read.
    pub(super) fn check(&self) -> Result<()> {
        check(&self.tensor, self.region.found(), self.may_be_infinite)
    }
}

/// What a single number among the weights of a graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScalarWeights {
    /// A weight as any other.
    AreWeights,
    /// Perhaps the constant of a node, which may be infinite.
    MayBeConstants,
}

/// Checks the numbers in the file `name` of a graph, which is `model`, and returns the tensors that are in others. Error
/// messages continue the name.
pub(super) fn check_graph<'a>(
    folder: &'a FolderContents,
    name: &'a str,
    model: Bytes,
    scalars: ScalarWeights,
) -> Result<Vec<Outside<'a>>> {
    // ONNX Runtime goes by the name too, and weights in its own format would not be checked.
    if Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("ort")) {
        return Err(refused("ONNX Runtime's own format can not be checked: save the model as .onnx"));
    }
    let weights = Weights { external: External::new(folder, name), scalars, outside: RefCell::default() };
    weights.model(model)?;
    Ok(weights.outside.into_inner())
}

/// Walks through a graph.
struct Weights<'a> {
    external: External<'a>,
    scalars: ScalarWeights,
    outside: RefCell<Vec<Outside<'a>>>,
}

impl Weights<'_> {
    fn model(&self, file: Bytes) -> Result<()> {
        let model = ModelProto::decode(file)
            .map_err(|error| refused(format!("this is no ONNX model: {error}. Export the model again")))?;
        model.graph.iter().try_for_each(|graph| self.graph(graph))?;
        for training in &model.training_info {
            [&training.initialization, &training.algorithm].into_iter().flatten().try_for_each(|g| self.graph(g))?;
        }
        for function in &model.functions {
            let owner = Owner::Function(&function.name);
            function.attribute_proto.iter().try_for_each(|attribute| self.attribute(attribute, owner))?;
            function.node.iter().try_for_each(|node| self.node(node))?;
        }
        Ok(())
    }

    fn graph(&self, graph: &GraphProto) -> Result<()> {
        let owner = Owner::Graph(self.scalars);
        graph.initializer.iter().try_for_each(|tensor| self.tensor(tensor, owner))?;
        graph.sparse_initializer.iter().try_for_each(|tensor| self.sparse(tensor, owner))?;
        graph.node.iter().try_for_each(|node| self.node(node))
    }

    fn node(&self, node: &NodeProto) -> Result<()> {
        node.attribute.iter().try_for_each(|attribute| self.attribute(attribute, Owner::Node(node, &attribute.name)))
    }

    fn attribute(&self, attribute: &AttributeProto, owner: Owner<'_>) -> Result<()> {
        owner.check("", find(&[attribute.f]), true)?;
        owner.check("", find(&attribute.floats), attribute.floats.len() == 1)?;
        attribute.t.as_deref().into_iter().chain(&attribute.tensors).try_for_each(|t| self.tensor(t, owner))?;
        attribute.g.as_deref().into_iter().chain(&attribute.graphs).try_for_each(|graph| self.graph(graph))?;
        let mut sparse = attribute.sparse_tensor.as_deref().into_iter().chain(&attribute.sparse_tensors);
        sparse.try_for_each(|tensor| self.sparse(tensor, owner))
    }

    fn sparse(&self, tensor: &SparseTensorProto, owner: Owner<'_>) -> Result<()> {
        // It has other numbers beside its values, zeros: one value is not a single number.
        [&tensor.values, &tensor.indices].into_iter().flatten().try_for_each(|part| self.numbers(part, owner, false))
    }

    fn tensor(&self, tensor: &TensorProto, owner: Owner<'_>) -> Result<()> {
        self.numbers(tensor, owner, tensor.dims.iter().all(|&dim| dim == 1))
    }

    fn numbers(&self, tensor: &TensorProto, owner: Owner<'_>, single: bool) -> Result<()> {
        owner.check(&tensor.name, numbers::in_model(tensor), single)?;
        if tensor.data_location == DEFAULT {
            return Ok(());
        }
        let named =
            |error: Error| Error::new(error.status(), format!("{} {}", owner.words(&tensor.name), error.message()));
        if let Some(region) = self.external.region(tensor).map_err(named)? {
            let (tensor, may_be_infinite) = (owner.words(&tensor.name), owner.may_be_infinite(single));
            self.outside.borrow_mut().push(Outside { region, graph: self.external.model, tensor, may_be_infinite });
        }
        Ok(())
    }
}

/// What a tensor is part of.
#[derive(Clone, Copy)]
enum Owner<'a> {
    Graph(ScalarWeights),
    /// And the name of the attribute.
    Node(&'a NodeProto, &'a str),
    Function(&'a str),
}

impl Owner<'_> {
    /// Refuses a number that is not finite.
    fn check(self, tensor: &str, found: Option<Found>, single: bool) -> Result<()> {
        match found {
            Some(_) => check(&self.words(tensor), found, self.may_be_infinite(single)),
            None => Ok(()),
        }
    }

    /// A single number of a node may be infinite: the end of a range, or what a mask adds.
    fn may_be_infinite(self, single: bool) -> bool {
        single && !matches!(self, Self::Graph(ScalarWeights::AreWeights))
    }

    /// What error messages call a tensor: its name, or else where it is.
    fn words(self, tensor: &str) -> String {
        match self {
            _ if !tensor.is_empty() => format!("the tensor {tensor:?}"),
            Self::Graph(_) => "a tensor without a name".to_owned(),
            Self::Function(name) => format!("an attribute of the function {name:?}"),
            Self::Node(node, attribute) => {
                let (operator, outputs) = (&node.op_type, node.output.join(", "));
                let which =
                    if node.name.is_empty() { format!("that makes {outputs:?}") } else { format!("{:?}", node.name) };
                format!("the attribute {attribute:?} of the {operator} node {which}")
            }
        }
    }
}

fn check(tensor: &str, found: Option<Found>, may_be_infinite: bool) -> Result<()> {
    match found {
        Some((index, number)) if !(may_be_infinite && number.is_infinite()) => {
            Err(refused(format!("{tensor} has {number} at index {index}: train or export it again")))
        }
        _ => Ok(()),
    }
}

fn find(numbers: &[f32]) -> Option<Found> {
    let bad = numbers.iter().position(|number| !number.is_finite())?;
    Some((bad as u64, numbers[bad].into()))
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(Status::Model, message)
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::{Graph, Random};

    use super::super::external::tests::{elsewhere, none_listed};
    use super::super::onnx::{FunctionProto, TrainingInfoProto};
    use super::*;

    fn check(model: impl Into<Bytes>) -> Result<(), String> {
        let weights =
            Weights { external: none_listed(), scalars: ScalarWeights::AreWeights, outside: RefCell::default() };
        weights.model(model.into()).map_err(|error| {
            assert_eq!(error.status(), Status::Model, "{error}");
            error.message().to_owned()
        })
    }

    fn floats(name: &str, numbers: &[f32]) -> TensorProto {
        let raw_data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let dims = vec![numbers.len() as i64];
        TensorProto { name: name.into(), data_type: 1, dims, raw_data: raw_data.into(), ..TensorProto::default() }
    }

    fn constant(attribute: AttributeProto) -> NodeProto {
        NodeProto { op_type: "Constant".into(), name: "c".into(), attribute: vec![attribute], ..NodeProto::default() }
    }

    fn value(t: TensorProto) -> AttributeProto {
        AttributeProto { name: "value".into(), t: Some(Box::new(t)), ..AttributeProto::default() }
    }

    fn nodes(node: Vec<NodeProto>) -> GraphProto {
        GraphProto { node, ..GraphProto::default() }
    }

    fn model(graph: GraphProto) -> Vec<u8> {
        ModelProto { graph: Some(graph), ..ModelProto::default() }.encode_to_vec()
    }

    /// A model for each place that a tensor can be in.
    fn places(tensor: impl Fn() -> TensorProto) -> Vec<(&'static str, Vec<u8>)> {
        let of_node = |attribute| model(nodes(vec![constant(attribute)]));
        let inner = || nodes(vec![constant(value(tensor()))]);
        let sparse = |values, indices| SparseTensorProto { values, indices };
        let of_model = |made: ModelProto| made.encode_to_vec();
        vec![
            ("initializer", model(GraphProto { initializer: vec![tensor()], ..GraphProto::default() })),
            (
                "sparse_initializer",
                model(GraphProto { sparse_initializer: vec![sparse(Some(tensor()), None)], ..GraphProto::default() }),
            ),
            (
                "indices",
                model(GraphProto { sparse_initializer: vec![sparse(None, Some(tensor()))], ..GraphProto::default() }),
            ),
            ("value", of_node(value(tensor()))),
            ("tensors", of_node(AttributeProto { tensors: vec![tensor()], ..AttributeProto::default() })),
            (
                "sparse_value",
                of_node(AttributeProto {
                    sparse_tensor: Some(Box::new(sparse(Some(tensor()), None))),
                    ..AttributeProto::default()
                }),
            ),
            (
                "sparse_tensors",
                of_node(AttributeProto {
                    sparse_tensors: vec![sparse(Some(tensor()), None)],
                    ..AttributeProto::default()
                }),
            ),
            ("subgraph", of_node(AttributeProto { g: Some(Box::new(inner())), ..AttributeProto::default() })),
            (
                "initializer of a subgraph",
                of_node(AttributeProto {
                    graphs: vec![GraphProto { initializer: vec![tensor()], ..GraphProto::default() }],
                    ..AttributeProto::default()
                }),
            ),
            (
                "function",
                of_model(ModelProto {
                    functions: vec![FunctionProto {
                        node: vec![constant(value(tensor()))],
                        ..FunctionProto::default()
                    }],
                    ..ModelProto::default()
                }),
            ),
            (
                "default of a function",
                of_model(ModelProto {
                    functions: vec![FunctionProto {
                        attribute_proto: vec![value(tensor())],
                        ..FunctionProto::default()
                    }],
                    ..ModelProto::default()
                }),
            ),
            (
                "training",
                of_model(ModelProto {
                    training_info: vec![TrainingInfoProto { algorithm: Some(inner()), ..TrainingInfoProto::default() }],
                    ..ModelProto::default()
                }),
            ),
        ]
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        let graph = |bad: f32| Graph::new().weight("good", &[2], &[1.0, 2.0]).weight("w", &[3], &[0.0, bad, 0.0]);
        assert_eq!(check(graph(5.0).to_bytes()), Ok(()));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = check(graph(bad).to_bytes()).unwrap_err();
            assert!(error.contains("\"w\"") && error.contains("index 1"), "{error}");
        }
    }

    #[test]
    fn numbers_are_looked_at_wherever_they_are() {
        for (place, model) in places(|| floats("w", &[0.0, 1.0])) {
            assert_eq!(check(model), Ok(()), "{place}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            for (place, model) in places(|| floats("w", &[0.0, bad])) {
                let error = check(model).expect_err(place);
                assert_eq!(
                    error,
                    format!("the tensor \"w\" has {bad} at index 1: train or export it again"),
                    "{place}"
                );
            }
        }
        for of_doubles in [false, true] {
            let (mut with, nan) = (floats("w", &[]), f32::NAN.to_le_bytes().to_vec());
            match of_doubles {
                true => with.double_data = vec![f64::NAN.to_le_bytes().to_vec().into()],
                false => with.float_data = vec![vec![0; 8].into(), nan.into()],
            }
            let error = check(model(nodes(vec![constant(value(with))]))).unwrap_err();
            assert!(error.contains(if of_doubles { "index 0" } else { "index 2" }), "{error}");
        }
    }

    #[test]
    fn attributes_are_named_by_their_node() {
        let refused = |node: NodeProto| check(model(nodes(vec![node]))).unwrap_err();
        let float = |f| AttributeProto { name: "value_float".into(), f, ..AttributeProto::default() };
        let list = |floats| AttributeProto { name: "value_floats".into(), floats, ..AttributeProto::default() };
        let error = refused(constant(float(f32::NAN)));
        assert_eq!(
            error,
            "the attribute \"value_float\" of the Constant node \"c\" has NaN at index 0: train or export it again"
        );
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let error = refused(constant(list(vec![1.0, bad])));
            assert!(error.contains("\"value_floats\" of the Constant node \"c\" has") && error.contains("index 1"));
        }
        let mut nameless = constant(value(floats("", &[f32::NAN])));
        (nameless.name, nameless.output) = (String::new(), vec!["out".into()]);
        let error = refused(nameless);
        assert!(
            error.starts_with("the attribute \"value\" of the Constant node that makes \"out\" has NaN"),
            "{error}"
        );
        let initializer = vec![floats("", &[f32::NAN])];
        let error = check(model(GraphProto { initializer, ..GraphProto::default() })).unwrap_err();
        assert!(error.starts_with("a tensor without a name has NaN"), "{error}");
        // A list may be packed, too.
        let packed = [0x3A, 10, 0x0A, 8, 0x2A, 6, 0x3A, 4, 0, 0, 0xC0, 0x7F];
        assert!(check(packed.to_vec()).unwrap_err().contains("has NaN"));
    }

    #[test]
    fn a_single_constant_of_a_node_may_be_infinite() {
        for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
            let scalar = || TensorProto { dims: Vec::new(), ..floats("", &[infinity]) };
            for attribute in [
                AttributeProto { f: infinity, ..AttributeProto::default() },
                AttributeProto { floats: vec![infinity], ..AttributeProto::default() },
                value(scalar()),
                value(floats("", &[infinity])),
                value(TensorProto { dims: vec![1, 1], ..scalar() }),
            ] {
                assert_eq!(check(model(nodes(vec![constant(attribute)]))), Ok(()));
            }
            let sparse = SparseTensorProto { values: Some(floats("", &[infinity])), indices: None };
            let sparse = AttributeProto { sparse_tensor: Some(Box::new(sparse)), ..AttributeProto::default() };
            assert!(check(model(nodes(vec![constant(sparse)]))).is_err());
            let initializer = vec![scalar()];
            assert!(check(model(GraphProto { initializer, ..GraphProto::default() })).is_err());
        }
    }

    #[test]
    fn a_weight_in_another_file_is_refused() {
        // TensorProto: name "w", data_location `place`; around it GraphProto.initializer and ModelProto.graph.
        let model = |place: u8| vec![0x3A, 7, 0x2A, 5, 0x42, 1, b'w', 0x70, place];
        assert_eq!(check(model(0)), Ok(()));
        let error = check(model(1)).unwrap_err();
        assert!(error.contains("\"w\" lies in another file"), "{error}");
        for (place, model) in places(|| elsewhere("w", 2, &[("location", "w.bin")])) {
            let error = check(model).expect_err(place);
            assert!(error.starts_with("the tensor \"w\" lies in another file, \"w.bin\", which `files`"), "{error}");
        }
    }

    #[test]
    fn groups_hide_nothing() {
        let nan = || model(GraphProto { initializer: vec![floats("w", &[f32::NAN])], ..GraphProto::default() });
        // Fields 100, which no message has: an empty group, and one with a group and a number in it.
        for group in [&[0xA3, 6, 0xA4, 6][..], &[0xA3, 6, 0x0B, 0x10, 1, 0x0C, 0xA4, 6]] {
            let error = check([group, &nan()].concat()).unwrap_err();
            assert!(error.contains("\"w\" has NaN"), "{error}");
        }
        // One that does not end.
        assert!(check([&[0xA3, 6][..], &nan()].concat()).unwrap_err().contains("no ONNX model"));
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let error = check(vec![0xFF; 30]).unwrap_err();
        assert!(error.starts_with("this is no ONNX model: ") && error.ends_with(". Export the model again"), "{error}");
    }

    #[test]
    fn damage_never_panics() {
        let models = places(|| floats("w", &[0.0, 1.0, f32::NAN])).into_iter().map(|(_, model)| model);
        let models = models.chain(places(|| elsewhere("w", 2, &[("offset", "1")])).into_iter().map(|(_, model)| model));
        let mut random = Random(7);
        for whole in models {
            for end in 0..whole.len() {
                let _ = check(whole[..end].to_vec());
            }
            for _ in 0..2000 {
                let mut flipped = whole.clone();
                for _ in 0..=random.below(3) {
                    flipped[random.below(whole.len())] ^= 1 << random.below(8);
                }
                let _ = check(flipped);
            }
        }
    }
}
