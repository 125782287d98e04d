"""Writes model.onnx, with its weights in it or, where they are too many for that, in a file beside it."""

import hashlib

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


def write(folder, model, weights, max_model_bytes=MAX_MODEL_BYTES):
    """Adds the weights to the model and writes both. Returns the files that it made, with their sizes and hashes."""
    arrays = {name: np.asarray(array, order="C") for name, array in weights.items()}
    files = {}
    if sum(array.nbytes for array in arrays.values()) <= max_model_bytes:
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
        onnx.checker.check_model(model)
    else:
        with HashedFile(folder / WEIGHTS) as file:
            model.graph.initializer.extend(_stored(file, name, array) for name, array in arrays.items())
        files[WEIGHTS] = file.described()
    with HashedFile(folder / MODEL) as file:
        file.write(model.SerializeToString(deterministic=True))
    if files:
        # By its path: the checker looks for the other file.
        onnx.checker.check_model(str(folder / MODEL))
    return {MODEL: file.described()} | files


def _stored(file, name, array):
    """The tensor of a weight, whose numbers are written to the file unless they are few."""
    if array.nbytes < SMALL:
        return numpy_helper.from_array(array, name)
    element = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, dims=array.shape, data_type=element, data_location=TensorProto.EXTERNAL)
    place = {"location": WEIGHTS, "offset": file.align(), "length": array.nbytes}
    file.write(array.reshape(-1).view(np.uint8))
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
