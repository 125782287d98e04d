//! Models through the Rust interface, on a real ONNX Runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use pagoda::runtime::Request;
use pagoda::{Cancel, ElementType, Model, ModelOptions, Provider, Status, Tensor};
use pagoda_test_support::{Attribute, Dim, F32, Graph, I32, STRING};

fn cpu() -> ModelOptions {
    ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, ..ModelOptions::default() }
}

/// z = x + y, with a free and a fixed dimension.
fn add() -> Model {
    let dims = || [Dim::Any("batch"), Dim::Is(2)];
    let graph = Graph::new().input("x", F32, &dims()).input("y", F32, &dims()).output("z", F32, &dims());
    Model::open_memory(&graph.node("Add", &["x", "y"], &["z"], &[]).to_bytes(), &cpu()).unwrap()
}

#[test]
fn inputs_and_outputs_are_described() {
    let model = add();
    let names: Vec<_> = model.inputs().iter().map(|input| input.name()).collect();
    assert_eq!(names, ["x", "y"]);
    let z = &model.outputs()[0];
    assert_eq!((z.name(), z.element_type(), z.dims()), ("z", Some(ElementType::F32), Some(&[-1, 2][..])));
    assert_eq!(z.symbols(), ["batch", ""]);
    assert_eq!((model.provider(), model.provider_reason()), (Provider::Cpu, ""));
}

#[test]
fn a_run_gives_the_sum() {
    let x = Tensor::from_slice(&[1, 2], &[1.0_f32, 2.0]).unwrap();
    let y = Tensor::from_slice(&[1, 2], &[10.0_f32, 20.0]).unwrap();
    let z = add().run(&[("x", &x), ("y", &y)], &["z"]).unwrap();
    assert_eq!(z[0].dims(), [1, 2]);
    assert_eq!(z[0].as_slice::<f32>().unwrap(), [11.0, 22.0]);
}

#[test]
fn a_bound_output_is_written_in_place() {
    let x = Tensor::from_slice(&[1, 2], &[1.0_f32, 2.0]).unwrap();
    let mut z = Tensor::zeros(ElementType::F32, &[1, 2]).unwrap();
    let before = z.memory().unwrap();
    add().run_into(&[("x", &x), ("y", &x)], &mut [("z", &mut z)]).unwrap();
    assert_eq!(z.as_slice::<f32>().unwrap(), [2.0, 4.0]);
    assert_eq!(z.memory().unwrap(), before);
}

#[test]
fn what_does_not_fit_is_named() {
    let model = add();
    let good = Tensor::from_slice(&[1, 2], &[1.0_f32, 2.0]).unwrap();
    let wide = Tensor::zeros(ElementType::F32, &[1, 3]).unwrap();
    let flat = Tensor::zeros(ElementType::F32, &[2]).unwrap();
    let ints = Tensor::zeros(ElementType::I32, &[1, 2]).unwrap();
    let refused = |inputs: &[(&str, &Tensor)], outputs: &[&str], argument: &str, status: Status| {
        let error = model.run(inputs, outputs).unwrap_err();
        assert_eq!((error.argument(), error.status()), (Some(argument), status), "{error}");
    };
    refused(&[("x", &good), ("y", &wide)], &["z"], "inputs[1]", Status::InvalidArgument);
    refused(&[("x", &flat), ("y", &good)], &["z"], "inputs[0]", Status::InvalidArgument);
    refused(&[("x", &good), ("y", &ints)], &["z"], "inputs[1]", Status::InvalidArgument);
    refused(&[("x", &good), ("w", &good)], &["z"], "input_names[1]", Status::NotFound);
    refused(&[("x", &good), ("x", &good)], &["z"], "input_names[1]", Status::InvalidArgument);
    refused(&[("x", &good)], &["z"], "input_names", Status::InvalidArgument);
    refused(&[("x", &good), ("y", &good)], &["w"], "output_names[0]", Status::NotFound);
    refused(&[("x", &good), ("y", &good)], &["z", "z"], "output_names[1]", Status::InvalidArgument);
    refused(&[("x", &good), ("y", &good)], &[], "output_names", Status::InvalidArgument);
}

/// Every type goes through a graph as it is: these with all ONNX Runtimes that we know, the others where it has them.
#[test]
fn every_element_type_goes_through() {
    use ElementType::{Bf16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    for &element in ElementType::ALL.iter().filter(|&&element| element != ElementType::String) {
        let dims = || [Dim::Is(3), Dim::Is(5)];
        let graph = Graph::new().input("x", element as i32, &dims()).output("y", element as i32, &dims());
        let model = Model::open_memory(&graph.node("Identity", &["x"], &["y"], &[]).to_bytes(), &cpu());
        let must = [Bf16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64].contains(&element);
        let Ok(model) = model else {
            assert!(!must, "{element:?}: {}", model.err().unwrap());
            continue;
        };
        let bytes: Vec<u8> = (0..(15 * element.bits()).div_ceil(8)).map(|i| (i % 2) as u8).collect();
        let mut memory = vec![0_u64; bytes.len().div_ceil(8)];
        // SAFETY: the memory is as long as the bytes; it outlives the tensor and is not touched meanwhile.
        let x = unsafe {
            let data = memory.as_mut_ptr().cast::<u8>();
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Tensor::from_memory(element, &[3, 5], data.cast(), bytes.len(), Box::new(())).unwrap()
        };
        let y = model.run(&[("x", &x)], &["y"]).unwrap().remove(0);
        assert_eq!((y.element_type(), y.dims()), (element, &[3_i64, 5][..]));
        let (data, size) = y.memory().unwrap();
        // SAFETY: the tensor lives and has that many bytes.
        let got = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
        assert_eq!(got, bytes, "{element:?}");
    }
}

/// Two a byte, the first in the low bits.
#[test]
fn four_bit_numbers_go_in() {
    for (element, expected) in [(ElementType::U4, [1.0, 2.0, 15.0]), (ElementType::I4, [1.0, 2.0, -1.0])] {
        let graph = Graph::new().input("x", element as i32, &[Dim::Is(3)]).output("y", F32, &[Dim::Is(3)]);
        let graph = graph.node("Cast", &["x"], &["y"], &[Attribute::Int("to", F32.into())]);
        let model = Model::open_memory(&graph.to_bytes(), &cpu()).unwrap();
        let mut bytes = [0x21_u8, 0x0F];
        // SAFETY: the bytes outlive the tensor and are not touched meanwhile.
        let x = unsafe { Tensor::from_memory(element, &[3], bytes.as_mut_ptr().cast(), 2, Box::new(())) }.unwrap();
        assert_eq!(model.run(&[("x", &x)], &["y"]).unwrap()[0].as_slice::<f32>().unwrap(), expected);
    }
}

#[test]
fn strings_go_in_and_come_out() {
    let graph = Graph::new().input("x", STRING, &[Dim::Any("n")]).output("y", STRING, &[Dim::Any("n")]);
    let model = Model::open_memory(&graph.node("Identity", &["x"], &["y"], &[]).to_bytes(), &cpu()).unwrap();
    let texts = ["", "pagoda", "塔", "a\0b"].map(str::to_owned).to_vec();
    let x = Tensor::from_strings(&[4], texts.clone()).unwrap();
    let y = model.run(&[("x", &x)], &["y"]).unwrap();
    assert_eq!(y[0].as_strings().unwrap(), texts);
}

#[test]
fn an_asynchronous_run_calls_back() {
    let model = Arc::new(add());
    let x = Arc::new(Tensor::from_slice(&[1, 2], &[1.0_f32, 2.0]).unwrap());
    let (send, receive) = channel();
    for _ in 0..100 {
        let send = send.clone();
        let request = Request::new().input("x", Arc::clone(&x)).input("y", Arc::clone(&x)).output("z");
        model.run_async(request, move |result| send.send(result.unwrap().remove(0).unwrap()).unwrap()).unwrap();
    }
    for _ in 0..100 {
        assert_eq!(receive.recv().unwrap().as_slice::<f32>().unwrap(), [2.0, 4.0]);
    }
    let error = model.run_async(Request::new().output("z"), |_| unreachable!("refused at once")).unwrap_err();
    assert_eq!(error.argument(), Some("input_names"));
}

#[test]
fn a_triggered_cancel_stops_runs() {
    let model = add();
    let x = Tensor::from_slice(&[1, 2], &[1.0_f32, 2.0]).unwrap();
    let cancel = Cancel::new();
    let run = || {
        // SAFETY: no output is bound.
        unsafe { model.run_bound(&[("x", &x), ("y", &x)], &[("z", None)], Some(&cancel)) }
    };
    run().unwrap();
    cancel.trigger();
    assert_eq!(run().unwrap_err().status(), Status::Cancelled);
}

/// A chain of matrix products that takes seconds. An output that the first node writes shows that the run has begun.
#[test]
fn a_long_run_is_stopped_in_the_middle() {
    let square = || [Dim::Is(768), Dim::Is(768)];
    let mut graph = Graph::new().input("x", F32, &square()).output("y", F32, &square());
    graph = graph.input("zero", F32, &[Dim::Is(1)]).output("begun", F32, &[Dim::Is(1)]);
    graph = graph.node("Exp", &["zero"], &["begun"], &[]);
    let names: Vec<String> = (0..2_000).map(|i| format!("x{i}")).collect();
    graph = graph.node("Mul", &["x", "begun"], &[&names[0]], &[]);
    for pair in names.windows(2) {
        graph = graph.node("MatMul", &[&pair[0], "x"], &[&pair[1]], &[]);
    }
    graph = graph.node("Identity", &[&names[names.len() - 1]], &["y"], &[]);
    let model = Arc::new(Model::open_memory(&graph.to_bytes(), &cpu()).unwrap());
    let cancel = Arc::new(Cancel::new());
    let zeros = |dims| Arc::new(Tensor::zeros(ElementType::F32, dims).unwrap());
    let (x, zero, begun) = (zeros(&[768, 768]), zeros(&[1]), zeros(&[1]));
    let (send, receive) = channel();
    let request = Request::new().input("x", x).input("zero", zero).output("y").cancel(Arc::clone(&cancel));
    // SAFETY: the run alone writes to the tensor, and here one number of it is read atomically.
    let (request, first) = unsafe {
        let first = AtomicU32::from_ptr(begun.memory().unwrap().0.cast());
        (request.output_into("begun", Arc::clone(&begun)), first)
    };
    model.run_async(request, move |result| send.send(result.map(drop)).unwrap()).unwrap();
    while first.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    assert!(receive.try_recv().is_err(), "the run should still be under way");
    cancel.trigger();
    assert_eq!(receive.recv().unwrap().unwrap_err().status(), Status::Cancelled);
}

#[test]
fn a_model_that_can_not_be_opened_says_why() {
    let error = Model::open("/nowhere/model.onnx", &cpu()).err().unwrap();
    assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("path")));
    let error = Model::open_memory(b"this is not a model", &cpu()).err().unwrap();
    assert_eq!((error.status(), error.argument()), (Status::Model, Some("bytes")), "{error}");
    let graph = Graph::new().input("x", F32, &[Dim::Is(1)]).output("y", F32, &[Dim::Is(1)]);
    let unknown = graph.node("NoSuchOperator", &["x"], &["y"], &[]).to_bytes();
    let error = Model::open_memory(&unknown, &cpu()).err().unwrap();
    assert_eq!(error.status(), Status::Model, "{error}");
    assert!(error.message().contains("NoSuchOperator"), "{error}");
}

#[test]
fn a_gpu_that_is_not_there_is_said() {
    let graph = Graph::new().input("x", F32, &[Dim::Is(1)]).output("y", F32, &[Dim::Is(1)]);
    let bytes = graph.node("Identity", &["x"], &["y"], &[]).to_bytes();
    let auto = Model::open_memory(&bytes, &ModelOptions::default()).unwrap();
    let cuda = Model::open_memory(&bytes, &ModelOptions { provider: Provider::Cuda, ..ModelOptions::default() });
    match cuda {
        Ok(model) => assert_eq!((model.provider(), auto.provider()), (Provider::Cuda, Provider::Cuda)),
        Err(error) => {
            assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("options.provider")));
            assert_eq!(auto.provider(), Provider::Cpu);
            assert!(auto.provider_reason().contains("CUDA"), "{}", auto.provider_reason());
        }
    }
}

#[test]
fn a_second_onnx_runtime_is_refused() {
    add();
    let options = ModelOptions { onnxruntime_path: Some("/nowhere/libonnxruntime.so".into()), ..cpu() };
    let error = Model::open_memory(b"x", &options).err().unwrap();
    assert_eq!(error.argument(), Some("options.onnxruntime_path"), "{error}");
}

#[test]
fn a_profile_is_where_it_was_asked_for() {
    let path = std::env::temp_dir().join(format!("pagoda-profile-{}.json", std::process::id()));
    let graph = Graph::new().input("x", F32, &[Dim::Is(1)]).output("y", F32, &[Dim::Is(1)]);
    let bytes = graph.node("Exp", &["x"], &["y"], &[]).to_bytes();
    let model = Model::open_memory(&bytes, &ModelOptions { profile_path: Some(path.clone()), ..cpu() }).unwrap();
    model.run(&[("x", &Tensor::from_slice(&[1], &[0.0_f32]).unwrap())], &["y"]).unwrap();
    drop(model);
    let profile = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(profile.contains("Exp"), "{profile}");
}

#[test]
fn a_profile_without_a_place_is_refused() {
    for path in ["", "/", "/nowhere/profile.json", "/tmp"] {
        let error = Model::open_memory(b"x", &ModelOptions { profile_path: Some(path.into()), ..cpu() }).err().unwrap();
        assert_eq!(error.argument(), Some("options.profile_path"), "{path:?}: {error}");
    }
}

/// The attention of one user with one history row and one candidate, by hand: silu(q·k) v summed over what each sees.
#[test]
fn the_operators_are_there_without_further_ado() {
    let rows = || [Dim::Any("T"), Dim::Is(1), Dim::Is(2)];
    let graph = ["query", "key", "value"].iter().fold(Graph::new(), |graph, name| graph.input(name, F32, &rows()));
    let graph = graph.input("row_offsets", I32, &[Dim::Any("B+1")]).input("num_candidates", I32, &[Dim::Any("B")]);
    let inputs = ["query", "key", "value", "row_offsets", "num_candidates"];
    let attributes = [Attribute::Int("scaling_seqlen", 2), Attribute::Float("alpha", 1.0)];
    let graph = graph.node("ai.pagoda.HstuAttention", &inputs, &["output"], &attributes).output("output", F32, &rows());
    let model = Model::open_memory(&graph.to_bytes(), &cpu()).unwrap();
    let query = Tensor::from_slice(&[2, 1, 2], &[1.0_f32, 0.0, 0.5, 0.5]).unwrap();
    let key = Tensor::from_slice(&[2, 1, 2], &[2.0_f32, 0.0, 0.0, 4.0]).unwrap();
    let value = Tensor::from_slice(&[2, 1, 2], &[1.0_f32, 0.0, 0.0, 1.0]).unwrap();
    let row_offsets = Tensor::from_slice(&[2], &[0, 2]).unwrap();
    let num_candidates = Tensor::from_slice(&[1], &[1]).unwrap();
    let tensors = [&query, &key, &value, &row_offsets, &num_candidates];
    let feed: Vec<_> = inputs.into_iter().zip(tensors).collect();
    let output = model.run(&feed, &["output"]).unwrap().remove(0);
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let expected = [silu(2.0) / 2.0, 0.0, silu(1.0) / 2.0, silu(2.0) / 2.0];
    for (got, expected) in output.as_slice::<f32>().unwrap().iter().zip(expected) {
        assert!((got - expected).abs() < 1e-6, "{:?} is not {expected:?}", output.as_slice::<f32>());
    }
    // An error inside an operator names the tensor, the user and the value.
    let bad = Tensor::from_slice(&[1], &[3]).unwrap();
    let feed: Vec<_> = inputs.into_iter().zip([&query, &key, &value, &row_offsets, &bad]).collect();
    let error = model.run(&feed, &["output"]).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(error.message().contains("num_candidates: user 0"), "{error}");
}
