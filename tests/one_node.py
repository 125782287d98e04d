"""Models of one node of ai.pagoda, in Python's ONNX Runtime."""

import numpy as np
import onnxruntime as ort
from capi import number_of
from exported import OPS
from onnx import helper


def session(op, inputs, outputs, unknown=(), **attributes):
    """Opens one, for arrays like these and outputs of these types; an input or output that is None is left out. Of the
    shapes of those that are `unknown` nothing is said."""
    names = [name if array is not None else "" for name, array in inputs.items()]
    results = [name if kind is not None else "" for name, kind in outputs.items()]
    node = helper.make_node(op, names, results, domain="ai.pagoda", **attributes)
    given = {name: array for name, array in inputs.items() if array is not None}
    rows = next(iter(given.values())).shape[0]

    def info(name, dtype, shape):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    # Whatever is as long as the first input's first dimension may be of any length.
    def dims(name, shape):
        return None if name in unknown else ["T" if dim == rows else dim for dim in shape]

    begins = [info(name, array.dtype, dims(name, array.shape)) for name, array in given.items()]
    ends = [info(name, kind, None) for name, kind in outputs.items() if kind is not None]
    graph = helper.make_graph([node], "one", begins, ends)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.pagoda", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(OPS))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(op, inputs, outputs, **attributes):
    """Fills `outputs`, arrays by name, through memory of our own: numpy's bf16 goes no other way."""
    kinds = {name: None if array is None else array.dtype for name, array in outputs.items()}
    opened = session(op, inputs, kinds, **attributes)
    binding = opened.io_binding()
    for bind, arrays in (binding.bind_input, inputs), (binding.bind_output, outputs):
        for name, array in arrays.items():
            if array is not None:
                bind(name, "cpu", 0, number_of(array.dtype), array.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)
