"""Weights of a model folder, wherever in the graph they are: none is served that is not finite, or that the folder's
version does not cover."""

import hashlib
import json
import re

import numpy as np
import onnx
import pytest
from exported import error, made, people  # noqa: F401  (a fixture)
from onnx import TensorProto, helper, numpy_helper
from test_cli import pagoda
from test_cli_rank import model, rank, request, scores

WEIGHT, FILE = "layers.0.uvqk.bias", "weights/dense.bin"


# ---- places for a weight -----------------------------------------------------------------------------------------


def constant(tensor, output=WEIGHT):
    return helper.make_node("Constant", [], [output], value=tensor)


def sparse(tensor):
    made = onnx.SparseTensorProto(values=tensor, dims=tensor.dims)
    made.indices.CopyFrom(numpy_helper.from_array(np.arange(tensor.dims[0], dtype=np.int64), "places"))
    return made


def initializer(graph, tensor):
    graph.graph.initializer.append(tensor)


def in_constant(graph, tensor):
    graph.graph.node.insert(0, constant(tensor))


def in_sparse_initializer(graph, tensor):
    graph.graph.sparse_initializer.append(sparse(tensor))


def in_sparse_constant(graph, tensor):
    graph.graph.node.insert(0, helper.make_node("Constant", [], [WEIGHT], sparse_value=sparse(tensor)))


def in_subgraph(graph, tensor):
    output = helper.make_tensor_value_info("inner", tensor.data_type, tensor.dims)
    branch = helper.make_graph([constant(tensor, "inner")], "branch", [], [output])
    graph.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    graph.graph.node.insert(0, helper.make_node("If", ["always"], [WEIGHT], then_branch=branch, else_branch=branch))


def in_function(graph, tensor):
    opset = next(opset for opset in graph.opset_import if not opset.domain)
    graph.functions.append(helper.make_function("hidden", "Weight", [], ["made"], [constant(tensor, "made")], [opset]))
    graph.opset_import.append(helper.make_opsetid("hidden", 1))
    graph.graph.node.insert(0, helper.make_node("Weight", [], [WEIGHT], domain="hidden"))


PLACES = {
    "initializer": initializer,
    "constant": in_constant,
    "sparse initializer": in_sparse_initializer,
    "sparse constant": in_sparse_constant,
    "subgraph": in_subgraph,
    "function": in_function,
    "behind a group": initializer,
}


# ---- folders -----------------------------------------------------------------------------------------------------


def move(folder, place, change):
    """Puts a weight of the graph, changed, into another place, and returns its numbers."""
    graph = onnx.load(folder / "model.onnx")
    (old,) = [tensor for tensor in graph.graph.initializer if tensor.name == WEIGHT]
    graph.graph.initializer.remove(old)
    PLACES[place](graph, change(old))
    # Of field 100, which no ONNX has.
    group = b"\xa3\x06\xa4\x06" if place == "behind a group" else b""
    (folder / "model.onnx").write_bytes(group + graph.SerializeToString())
    return numpy_helper.to_array(old).copy()


def seal(folder, *more):
    """Has pagoda.json say what is in the folder now, and lists more files; returns the version."""
    about = json.loads((folder / "pagoda.json").read_text())
    data = {name: (folder / name).read_bytes() for name in [*about["files"], *more]}
    about["files"] = {
        name: {"bytes": len(bytes), "sha256": hashlib.sha256(bytes).hexdigest()} for name, bytes in data.items()
    }
    text = json.dumps(about | {"version": "0" * 64}, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    (folder / "pagoda.json").write_text(text.replace("0" * 64, version, 1))
    return version


def with_nan(tensor):
    numbers = numpy_helper.to_array(tensor).copy()
    numbers[5] = np.nan
    return numpy_helper.from_array(numbers, WEIGHT)


def elsewhere(tensor, offset=64):
    moved = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
    moved.data_location = TensorProto.EXTERNAL
    for key, value in {"location": FILE, "offset": offset, "length": 4 * np.prod(tensor.dims)}.items():
        moved.external_data.add(key=key, value=str(value))
    return moved


def write(folder, numbers):
    (folder / FILE).parent.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(bytes(64) + numbers.tobytes())


def refused(folder, message):
    for command in "inspect", "rank":
        done = pagoda(command, folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"pagoda: folder: {re.escape(str(folder))}: {message}.*\n", done.stderr), done.stderr


# ---- what is served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_looked_at_wherever_they_are(made, place):  # noqa: F811
    folder, _, _ = model(made)
    move(folder, place, with_nan)
    seal(folder)
    refused(folder, rf'model.onnx: the tensor "{WEIGHT}" has NaN at index 5')


def test_numbers_of_an_attribute_are_named_by_their_node(made):  # noqa: F811
    folder, _, _ = model(made)
    graph = onnx.load(folder / "model.onnx")
    (old,) = [tensor for tensor in graph.graph.initializer if tensor.name == WEIGHT]
    graph.graph.initializer.remove(old)
    numbers = [*numpy_helper.to_array(old)[:-1], np.nan]
    graph.graph.node.insert(0, helper.make_node("Constant", [], [WEIGHT], "hidden", value_floats=numbers))
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    seal(folder)
    refused(folder, 'model.onnx: the attribute "value_floats" of the Constant node "hidden" has NaN at index 63')


@pytest.mark.parametrize("place", PLACES)
def test_other_files_are_served_if_the_version_covers_them(made, place):  # noqa: F811
    folder, config, oracle = model(made)
    numbers = move(folder, place, elsewhere)
    write(folder, numbers)
    seal(folder)
    refused(folder, rf'model.onnx: the tensor "{WEIGHT}" lies in another file, "{FILE}", which `files`.*does not list')
    version = seal(folder, FILE)
    [user] = people(config, [(7, 4)])
    done, [answer] = rank(folder, [request(config, user, 7)])
    assert done.returncode == 0, done.stderr
    assert error(scores(answer), oracle.scores([user])) <= 1e-5
    assert FILE in pagoda("inspect", folder).stdout
    # Other weights are another version, or are not served.
    write(folder, numbers + 1)
    refused(folder, rf"{FILE} was changed: its SHA-256 is")
    assert seal(folder) != version
    done, [other] = rank(folder, [request(config, user, 7)])
    assert done.returncode == 0, done.stderr
    assert error(scores(other), scores(answer)) > 1e-3
    numbers[3] = np.inf
    write(folder, numbers)
    seal(folder)
    refused(folder, rf'model.onnx: the tensor "{WEIGHT}" has inf at index 3')


def test_weights_that_the_exporter_puts_beside_the_model_are_served(made):  # noqa: F811
    folder, config, oracle = model(lambda *given: made(*given, max_model_bytes=0))
    [user] = people(config, [(7, 4)])
    done, [answer] = rank(folder, [request(config, user, 7)])
    assert done.returncode == 0, done.stderr
    assert error(scores(answer), oracle.scores([user])) <= 1e-5
    data = bytearray((folder / "weights.bin").read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (folder / "weights.bin").write_bytes(data)
    refused(folder, "weights.bin was changed: its SHA-256 is")
    seal(folder)
    refused(folder, r'model.onnx: the tensor ".*" has NaN at index ')
    (folder / "weights.bin").write_bytes(data[:-1])
    refused(folder, rf"weights.bin was cut: it has {len(data) - 1} bytes and pagoda.json says {len(data)}")


def test_folders_of_another_kind_are_refused(made):  # noqa: F811
    folder, config, _ = model(made)
    manifest = folder / "pagoda.json"
    manifest.write_text(re.sub(r'"kind": "\w+"', '"kind": "rang"', manifest.read_text()))
    seal(folder)
    refused(folder, r'pagoda.json: this folder has the kind "rang" and this Pagoda knows "rank" and "generate": ')
    # Folders from before there were kinds.
    manifest.write_text(re.sub(r'  "kind": "\w+",\n', "", manifest.read_text()))
    assert "kind" not in json.loads(manifest.read_text())
    seal(folder)
    [user] = people(config, [(7, 4)])
    done, _ = rank(folder, [request(config, user, 7)])
    assert done.returncode == 0, done.stderr


def test_what_does_not_lie_in_the_file_is_refused(made):  # noqa: F811
    folder, _, _ = model(made)
    write(folder, move(folder, "constant", lambda tensor: elsewhere(tensor, offset=65)))
    seal(folder, FILE)
    refused(folder, rf'model.onnx: the tensor "{WEIGHT}" lies in {FILE} at offset 65 with 256 bytes, and the file has 320')


def test_what_is_no_onnx_is_refused(made):  # noqa: F811
    folder, _, _ = model(made)
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data[: len(data) // 2])
    seal(folder)
    refused(folder, "model.onnx: this is no ONNX model: .*Export the model again")
    about = (folder / "pagoda.json").read_text().replace("model.onnx", "model.ort")
    (folder / "pagoda.json").write_text(about)
    (folder / "model.ort").write_bytes(data)
    seal(folder)
    refused(folder, "model.ort: ONNX Runtime's own format can not be checked")
