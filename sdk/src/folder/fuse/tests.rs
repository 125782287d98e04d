use pagoda_test_support::{Attribute, Dim, F32, Graph, I32};

use super::*;

/// The nodes of a graph in order: `Operator(inputs) -> outputs attributes`.
fn nodes(bytes: &[u8]) -> Vec<String> {
    let model = ModelProto::decode(bytes).unwrap();
    let graph = GraphProto::decode(model.graph).unwrap();
    let line = |bytes: &Bytes| {
        let Node { proto, attributes } = Node::read(bytes.clone()).unwrap();
        let mut line = format!("{}({}) -> {}", proto.op_type, proto.input.join(", "), proto.output.join(", "));
        for AttributeProto { name, f, i, s, .. } in attributes {
            let text = String::from_utf8(s.to_vec()).unwrap();
            let value = f.map(|f| f.to_string()).or_else(|| i.map(|i| i.to_string())).unwrap_or(text);
            line += &format!(" {name}={value}");
        }
        line
    };
    graph.node.iter().map(line).collect()
}

/// `None` if nothing is fused.
fn fused_f32(bytes: Vec<u8>) -> Option<Vec<u8>> {
    fused(&bytes.into(), Target::Hopper, ElementType::F32).unwrap()
}

fn fused_nodes(graph: &Graph) -> Vec<String> {
    nodes(&fused_f32(graph.to_bytes()).unwrap())
}

const ROWS: [Dim; 2] = [Dim::Any("T"), Dim::Is(4)];
const TRANSPOSED: [Attribute; 1] = [Attribute::Int("transB", 1)];

/// Rows x, and weights for products of 4 columns with 4, 6 and 8.
fn rows() -> Graph {
    Graph::new()
        .input("x", F32, &ROWS)
        .input("ids", I32, &[Dim::Any("S")])
        .weight("w4", &[4, 4], &[1.0; 16])
        .weight("w6", &[6, 4], &[1.0; 24])
        .weight("w8", &[8, 4], &[1.0; 32])
        .weight("b4", &[4], &[1.0; 4])
        .weight("b6", &[6], &[1.0; 6])
        .weight("g", &[4], &[1.0; 4])
        .integers("lengths", &[3, 2, 1])
}

fn gemm(graph: Graph, inputs: &[&str], output: &str) -> Graph {
    graph.node("Gemm", inputs, &[output], &TRANSPOSED)
}

fn skip(graph: Graph, inputs: &[&str], outputs: &[&str]) -> Graph {
    let epsilon = [Attribute::Float("epsilon", 0.25)];
    graph.node("com.microsoft.SkipSimplifiedLayerNormalization", inputs, outputs, &epsilon)
}

fn norm(graph: Graph, from: &str, to: &str) -> Graph {
    let attributes = [Attribute::Int("axis", -1), Attribute::Float("epsilon", 0.5)];
    graph.node("RMSNormalization", &[from, "g"], &[to], &attributes)
}

fn glu(graph: Graph, from: &str, to: &str) -> Graph {
    graph.node("ai.pagoda.Glu", &[from], &[to], &[Attribute::Text("activation", "silu")])
}

fn split(graph: Graph, from: &str, lengths: &str) -> Graph {
    graph.node("Split", &[from, lengths], &["q", "k", "v"], &[Attribute::Int("axis", 1)])
}

#[test]
fn a_layer_becomes_its_products() {
    let mut graph = norm(rows(), "x", "n0");
    graph = split(gemm(graph, &["n0", "w6", "b6"], "packed"), "packed", "lengths");
    graph = graph.node("Attention", &["q", "k", "v"], &["attended"], &[]);
    // The last layer's rows.
    graph = graph.node("Gather", &["attended", "ids"], &["asked"], &[Attribute::Int("axis", 0)]);
    graph = graph.node("Gather", &["x", "ids"], &["hidden"], &[Attribute::Int("axis", 0)]);
    graph = skip(gemm(graph, &["asked", "w4"], "o"), &["hidden", "o", "g"], &["n1", "", "", "sum1"]);
    graph = glu(gemm(graph, &["n1", "w8"], "wide"), "wide", "mlp");
    graph = skip(gemm(graph, &["mlp", "w4", "b4"], "down"), &["sum1", "down", "g"], &["n2", "", "", "sum2"]);
    let bytes = fused_f32(gemm(graph, &["n2", "w6"], "logits").output("logits", F32, &ROWS).to_bytes()).unwrap();
    let expected = [
        "Linear(x, w6, b6, , g) -> q, k, v epsilon=0.5 width2=2 width3=1",
        "Attention(q, k, v) -> attended",
        "Gather(attended, ids) -> asked axis=0",
        "Gather(x, ids) -> hidden axis=0",
        "Linear(asked, w4, , hidden) -> sum1",
        "Linear(sum1, w8, , , g) -> mlp epsilon=0.25 activation=silu",
        "Linear(mlp, w4, b4, sum1) -> sum2",
        "Linear(sum2, w6, , , g) -> logits epsilon=0.25",
    ];
    assert_eq!(nodes(&bytes), expected);
    let graph = GraphProto::decode(ModelProto::decode(&bytes[..]).unwrap().graph).unwrap();
    let names = graph.initializer.iter().map(|tensor| TensorProto::decode(tensor.clone()).unwrap().name);
    assert_eq!(names.collect::<Vec<_>>(), ["w4", "w6", "w8", "b4", "b6", "g"], "no one reads the lengths");
    assert_eq!(fused_f32(bytes), None);
}

#[test]
fn products_of_another_kind_stay() {
    let gemm_with = |inputs: &[&str], attributes: &[Attribute]| rows().node("Gemm", inputs, &["y"], attributes);
    let transposed = || Attribute::Int("transB", 1);
    let plain = ["x", "w4"];
    for (what, graph) in [
        ("not transposed", gemm_with(&plain, &[])),
        ("x transposed", gemm_with(&plain, &[transposed(), Attribute::Int("transA", 1)])),
        ("alpha", gemm_with(&plain, &[transposed(), Attribute::Float("alpha", 2.0)])),
        ("beta", gemm_with(&["x", "w4", "b4"], &[transposed(), Attribute::Float("beta", 0.5)])),
        ("a weight that is an input", gemm_with(&["x", "x"], &[transposed()])),
        ("a bias for each row", gemm_with(&["x", "w4", "x"], &[transposed()])),
        ("a bias of a matrix", gemm_with(&["x", "w4", "w4"], &[transposed()])),
        ("another operator", rows().node("MatMul", &plain, &["y"], &[])),
    ] {
        assert_eq!(fused_f32(graph.output("y", F32, &ROWS).to_bytes()), None, "{what}");
    }
    let bytes = gemm_with(&plain, &[transposed()]).output("y", F32, &ROWS).to_bytes();
    assert_eq!(
        fused(&bytes.into(), Target::Hopper, ElementType::F16).unwrap(),
        None,
        "another type than the model computes in"
    );
}

/// Only the product becomes a Linear.
fn assert_only_product(what: &str, graph: &Graph) {
    let (before, after) = (nodes(&graph.to_bytes()), fused_nodes(graph));
    let expected: Vec<_> = before
        .iter()
        .map(|line| {
            line.strip_prefix("Gemm").map_or(line.clone(), |rest| format!("Linear{}", rest.replace(" transB=1", "")))
        })
        .collect();
    assert_eq!(after, expected, "{what}");
}

#[test]
fn what_others_read_stays() {
    let both = |graph: Graph| graph.node("Neg", &["y"], &["other"], &[]).output("z", F32, &ROWS);
    let shown = |graph: Graph| graph.output("y", F32, &ROWS);
    for (what, graph) in [
        ("gates", both(glu(gemm(rows(), &["x", "w8"], "y"), "y", "z"))),
        ("gates that are an output", shown(glu(gemm(rows(), &["x", "w8"], "y"), "y", "z"))),
        ("packed", both(split(gemm(rows(), &["x", "w6"], "y"), "y", "lengths"))),
        ("added", both(skip(gemm(rows(), &["x", "w4"], "y"), &["x", "y", "g"], &["z", "", "", "s"]))),
        ("normed", both(gemm(norm(rows(), "x", "y"), &["y", "w4"], "z"))),
        ("normed for two", gemm(gemm(norm(rows(), "x", "y"), &["y", "w4"], "z"), &["y", "w6"], "z2")),
    ] {
        assert_only_product(what, &graph);
    }
}

#[test]
fn nodes_that_linear_is_not_stay() {
    let product = |weight| gemm(rows(), &["x", weight], "y");
    let axis = |axis| [Attribute::Int("axis", axis)];
    let normed = |attributes: &[Attribute]| rows().node("RMSNormalization", &["x", "g"], &["n"], attributes);
    let stash = [Attribute::Int("stash_type", 16)];
    for (what, graph) in [
        ("an odd number of gates", glu(gemm(rows().weight("w5", &[5, 4], &[1.0; 20]), &["x", "w5"], "y"), "y", "z")),
        ("another axis", product("w6").node("Split", &["y", "lengths"], &["q", "k", "v"], &axis(0))),
        ("two parts", product("w6").node("Split", &["y", "two"], &["q", "k"], &axis(1)).integers("two", &[4, 2])),
        ("other lengths", split(product("w8"), "y", "lengths")),
        ("an empty part", split(product("w6").integers("none", &[3, 3, 0]), "y", "none")),
        ("lengths that are an input", split(product("w6"), "y", "ids")),
        ("a norm over rows", gemm(normed(&axis(0)), &["n", "w4"], "y")),
        ("a norm in another type", gemm(normed(&stash), &["n", "w4"], "y")),
        (
            "a norm of another type",
            gemm(norm(rows().node("Cast", &["x"], &["c"], &[Attribute::Int("to", 10)]), "c", "n"), &["n", "w4"], "y"),
        ),
        ("a norm of a type unknown", gemm(norm(rows().node("Neg", &["x"], &["c"], &[]), "c", "n"), &["n", "w4"], "y")),
        ("a norm by an input", gemm(rows().node("RMSNormalization", &["x", "x"], &["n"], &[]), &["n", "w4"], "y")),
        ("a bias of the sum", skip(product("w4"), &["x", "y", "g", "b4"], &["n", "", "", "s"])),
        ("statistics", skip(product("w4"), &["x", "y", "g"], &["n", "", "variance", "s"])),
        (
            "a sum of no product",
            skip(product("w4").node("Neg", &["y"], &["z"], &[]), &["x", "z", "g"], &["n", "", "", "s"]),
        ),
        (
            "residuals of a rank unknown",
            skip(product("w4").node("Abs", &["x"], &["h"], &[]), &["h", "y", "g"], &["n", "", "", "s"]),
        ),
        // RMSNormalization is not in version 21 of ONNX's operators, and this norm would be one.
        (
            "a norm for others",
            skip(product("w4"), &["x", "y", "g"], &["n", "", "", "s"]).node("Neg", &["n"], &["z"], &[]),
        ),
    ] {
        assert_only_product(what, &graph);
    }
}

#[test]
fn a_norm_for_others_is_a_node_of_its_own() {
    let graph = skip(gemm(rows(), &["x", "w4"], "y"), &["y", "x", "g"], &["n", "", "", ""]);
    let graph = graph.node("Neg", &["n"], &["z"], &[]).node("Abs", &["n"], &["z2"], &[]);
    let mut model = ModelProto::decode(&graph.to_bytes()[..]).unwrap();
    model.opset_import = vec![OpsetProto { domain: String::new(), version: 23 }.encode_to_vec().into()];
    let bytes = fused_f32(model.encode_to_vec()).unwrap();
    let expected = [
        "Linear(x, w4, , x) -> ai.pagoda.Linear.sum_of.n",
        "RMSNormalization(ai.pagoda.Linear.sum_of.n, g) -> n axis=-1 epsilon=0.25",
        "Neg(n) -> z",
        "Abs(n) -> z2",
    ];
    assert_eq!(nodes(&bytes), expected);
    let opsets = ModelProto::decode(&bytes[..]).unwrap().opset_import;
    let opsets: Vec<_> = opsets.into_iter().map(|opset| OpsetProto::decode(opset).unwrap()).collect();
    assert_eq!((opsets.len(), &*opsets[1].domain, opsets[1].version), (2, "ai.pagoda", 1));
}

#[test]
fn what_is_no_graph_is_an_error() {
    assert!(
        fused(&Bytes::from_static(b"no graph"), Target::Hopper, ElementType::F32)
            .unwrap_err()
            .starts_with("not an ONNX model: ")
    );
}

/// The nodes of a product of rows of 64 with three rows of codes.
fn blocks(
    target: Target,
    element: ElementType,
    attributes: &[(&'static str, i64)],
    inputs: &[&str],
    scales: &[i64],
) -> Option<Vec<String>> {
    let bits = attributes.iter().find(|(name, _)| *name == "bits").map_or(4, |(_, bits)| *bits);
    let attributes: Vec<_> = attributes.iter().map(|(name, value)| Attribute::Int(name, *value)).collect();
    let rows = [Dim::Any("T"), Dim::Is(64)];
    let graph = Graph::new().input("x", element as i32, &rows).input("other", ElementType::U8 as i32, &rows);
    let graph = graph.node("com.microsoft.MatMulNBits", inputs, &["y"], &attributes).output("y", F32, &ROWS);
    let mut model = ModelProto::decode(&graph.to_bytes()[..]).unwrap();
    let mut graph = GraphProto::decode(model.graph.clone()).unwrap();
    // Those of a graph in f16, unless it is one in f32.
    let of_scales = if element == ElementType::F32 { F32 } else { ElementType::F16 as i32 };
    for (name, dims, data_type) in [
        ("codes", &[3, 2, 4 * bits][..], ElementType::U8 as i32),
        ("scales", scales, of_scales),
        ("bias", &[3], of_scales),
    ] {
        let (name, dims) = (name.into(), dims.to_vec());
        graph.initializer.push(TensorProto { name, dims, data_type, ..TensorProto::default() }.encode_to_vec().into());
    }
    model.graph = graph.encode_to_vec().into();
    fused(&model.encode_to_vec().into(), target, element).unwrap().map(|bytes| nodes(&bytes))
}

#[test]
fn products_with_weights_in_blocks_become_those_of_ours() {
    const WHOLE: [(&str, i64); 4] = [("K", 64), ("N", 3), ("bits", 4), ("block_size", 32)];
    let changed =
        |other: (&'static str, i64)| WHOLE.map(|(name, value)| if name == other.0 { other } else { (name, value) });
    let one = |line: &str| Some(vec![line.to_owned()]);
    let plain = ["x", "codes", "scales"];
    for (target, element) in [(Target::Hopper, ElementType::F16), (Target::Cpu, ElementType::F32)] {
        let whole = |inputs: &[&str], scales: &[i64]| blocks(target, element, &WHOLE, inputs, scales);
        assert_eq!(whole(&plain, &[6]), one("BlockLinear(x, codes, scales) -> y"));
        let with_bias = whole(&["x", "codes", "scales", "", "", "bias"], &[3, 2]);
        assert_eq!(with_bias, one("BlockLinear(x, codes, scales, , bias) -> y"));
        // Zero points, an order of the columns, a matrix that a caller gives, scales of something else.
        assert_eq!(whole(&["x", "codes", "scales", "codes"], &[6]), None);
        assert_eq!(whole(&["x", "codes", "scales", "", "codes"], &[6]), None);
        assert_eq!(whole(&["x", "other", "scales"], &[6]), None);
        assert_eq!(whole(&plain, &[5]), None);
        for other in [("bits", 2), ("block_size", 64), ("K", 63)] {
            assert_eq!(blocks(target, element, &changed(other), &plain, &[6]), None, "{other:?}");
        }
    }
    // Kernels of a GPU are for half precision.
    let eight = |target, element| blocks(target, element, &changed(("bits", 8)), &plain, &[6]);
    assert_eq!(eight(Target::Cpu, ElementType::F32), one("BlockLinear(x, codes, scales) -> y"));
    assert_eq!(eight(Target::Hopper, ElementType::F16), one("BlockLinear(x, codes, scales) -> y"));
    assert_eq!(blocks(Target::Hopper, ElementType::F32, &WHOLE, &plain, &[6]), None);
    assert_eq!(blocks(Target::Cpu, ElementType::F16, &WHOLE, &plain, &[6]), None);
    assert_eq!(blocks(Target::Hopper, ElementType::Bf16, &WHOLE, &plain, &[6]), None, "scales of another type");
}

/// A layer in f16 with weights of 4 bits: rows of 64, a head of 8 bits.
#[test]
fn a_layer_with_weights_in_blocks_becomes_its_products() {
    const F16: i32 = ElementType::F16 as i32;
    let rows = [Dim::Any("T"), Dim::Is(64)];
    let product = |graph: Graph, x: &str, width: i64, to: &str| {
        let bits = if to == "logits" { 8 } else { 4 };
        let attributes = [("K", 64), ("N", width), ("bits", bits), ("block_size", 32)];
        let attributes = attributes.map(|(name, value)| Attribute::Int(name, value));
        let names = ["codes", "scales"].map(|name| format!("{name}{width}x{bits}"));
        graph.node("com.microsoft.MatMulNBits", &[x, &names[0], &names[1]], &[to], &attributes)
    };
    let mut graph = Graph::new().input("ids", I32, &[Dim::Any("T")]).integers("lengths", &[64, 32, 32]);
    // Its embedding is quantised too.
    let table = [Attribute::Int("block_size", 32), Attribute::Int("bits", 4)];
    graph = graph.node("com.microsoft.GatherBlockQuantized", &["table", "ids", "scales64x4"], &["x"], &table);
    graph = norm(graph, "x", "n0");
    graph = split(product(graph, "n0", 128, "packed"), "packed", "lengths");
    graph = graph.node("Attention", &["q", "k", "v"], &["attended"], &[]);
    graph = skip(product(graph, "attended", 64, "o"), &["x", "o", "g"], &["n1", "", "", "sum1"]);
    graph = glu(product(graph, "n1", 128, "wide"), "wide", "mlp");
    graph = skip(product(graph, "mlp", 64, "down"), &["sum1", "down", "g"], &["n2", "", "", "sum2"]);
    graph = product(graph, "n2", 64, "logits").output("logits", F16, &rows);
    let mut model = ModelProto::decode(&graph.to_bytes()[..]).unwrap();
    let mut graph = GraphProto::decode(model.graph.clone()).unwrap();
    for (width, bits) in [(64, 4), (128, 4), (64, 8)] {
        for (name, dims, data_type) in
            [("codes", vec![width, 2, 4 * bits], ElementType::U8 as i32), ("scales", vec![width * 2], F16)]
        {
            let tensor =
                TensorProto { name: format!("{name}{width}x{bits}"), dims, data_type, ..TensorProto::default() };
            graph.initializer.push(tensor.encode_to_vec().into());
        }
    }
    for (name, dims, data_type) in [("g", vec![64], F16), ("table", vec![272, 32], ElementType::U8 as i32)] {
        let tensor = TensorProto { name: name.into(), dims, data_type, ..TensorProto::default() };
        graph.initializer.push(tensor.encode_to_vec().into());
    }
    model.graph = graph.encode_to_vec().into();
    let bytes = fused(&model.encode_to_vec().into(), Target::Hopper, ElementType::F16).unwrap().unwrap();
    assert_eq!(
        nodes(&bytes),
        [
            "GatherBlockQuantized(table, ids, scales64x4) -> x block_size=32 bits=4",
            "BlockLinear(x, codes128x4, scales128x4, , , , g) -> q, k, v epsilon=0.5 width2=32 width3=32",
            "Attention(q, k, v) -> attended",
            "BlockLinear(attended, codes64x4, scales64x4, , , x) -> sum1",
            "BlockLinear(sum1, codes128x4, scales128x4, , , , g) -> mlp epsilon=0.25 activation=silu",
            "BlockLinear(mlp, codes64x4, scales64x4, , , sum1) -> sum2",
            "BlockLinear(sum2, codes64x8, scales64x8, , , , g) -> logits epsilon=0.25",
        ]
    );
}

#[test]
fn nothing_but_products_with_blocks_is_replaced_on_the_cpu() {
    let bytes: Bytes = gemm(rows(), &["x", "w4"], "y").output("y", F32, &ROWS).to_bytes().into();
    assert!(fused(&bytes, Target::Hopper, ElementType::F32).unwrap().is_some());
    assert_eq!(fused(&bytes, Target::Cpu, ElementType::F32).unwrap(), None);
}
