"""Writes model.onnx, with its weights in it or, where they are too many for that, in a file beside it."""

import hashlib
import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL, WEIGHTS = "model.onnx", "weights.bin"
# protobuf's limit is 2 GiB for all of the file.
MAX_MODEL_BYTES = 2**31 - 2**24
# Smaller weights stay in the model: ONNX reads shapes and the like before it looks for other files.
SMALL = 1024
# Pages, so that ONNX Runtime can map each tensor.
ALIGNMENT = 4096
# Bytes that are hashed and written at once.
CHUNK = 2**24


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path):
        self.file, self.hash, self.bytes = open(path, "wb"), hashlib.sha256(), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        """Writes anything with a buffer."""
        data = memoryview(data).cast("B")
        for start in range(0, len(data), CHUNK):
            self.hash.update(data[start : start + CHUNK])
            self.file.write(data[start : start + CHUNK])
        self.bytes += len(data)

    def align(self):
        """Fills up with zeros; returns where the next write begins."""
        self.write(bytes(-self.bytes % ALIGNMENT))
        return self.bytes

    def described(self):
        """The size and the hash as pagoda.json has them."""
        return {"bytes": self.bytes, "sha256": self.hash.hexdigest()}


class Initializers:
    """The weights of a graph, written into a file beside the model as they come. Small ones stay in the model."""

    def __init__(self, file):
        self.file, self.tensors = file, {}

    def add(self, name, array):
        """Adds a weight that is in memory."""
        array = np.asarray(array, order="C")
        self.stream(name, array.dtype, array.shape, [array])

    def stream(self, name, dtype, shape, parts):
        """Adds a weight whose numbers come in parts, in order."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize * math.prod(shape)
        if size < SMALL:
            array = np.concatenate([np.asarray(part, dtype).reshape(-1) for part in parts]).reshape(shape)
            self.tensors[name] = numpy_helper.from_array(array, name)
            return
        offset = self.file.align()
        for part in parts:
            self.file.write(np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8))
        written = self.file.bytes - offset
        assert written == size, f"{name}: {written} bytes of {size}"
        self.tensors[name] = _external(name, dtype, shape, offset, size)

    def alias(self, name, of, shape):
        """Adds a weight of another shape that has the bytes of `of`."""
        tensor = TensorProto()
        tensor.CopyFrom(self.tensors[of])
        tensor.name, tensor.dims[:] = name, shape
        self.tensors[name] = tensor


def write(folder, model, weights, max_model_bytes=MAX_MODEL_BYTES):
    """Adds the weights to the model and writes both. Returns the files that it made, with their sizes and hashes."""
    arrays = {name: np.asarray(array, order="C") for name, array in weights.items()}
    if sum(array.nbytes for array in arrays.values()) <= max_model_bytes:
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
        return {MODEL: _write(folder, model)}

    def fill(initializers):
        for name, array in arrays.items():
            initializers.add(name, array)
        return {MODEL: model}

    return write_streamed(folder, fill)


def write_streamed(folder, fill):
    """Writes models whose weights are in a file beside them. `fill` adds these to the Initializers that it gets, and returns the
    models without them, by the names of their files. Returns the files that it made, with their sizes and hashes."""
    with HashedFile(folder / WEIGHTS) as file:
        initializers = Initializers(file)
        models = fill(initializers)
    files = {}
    for name, model in models.items():
        used = {value for node in model.graph.node for value in node.input}
        model.graph.initializer.extend(tensor for key, tensor in initializers.tensors.items() if key in used)
        files[name] = _write(folder, model, name)
    return files | {WEIGHTS: file.described()}


def _write(folder, model, name=MODEL):
    with HashedFile(folder / name) as file:
        file.write(model.SerializeToString(deterministic=True))
    # By its path: the checker looks for the other file.
    onnx.checker.check_model(str(folder / name))
    return file.described()


def _external(name, dtype, shape, offset, size):
    element = helper.np_dtype_to_tensor_dtype(dtype)
    tensor = TensorProto(name=name, dims=shape, data_type=element, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": WEIGHTS, "offset": offset, "length": size}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
