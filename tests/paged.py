"""Runs an exported language model in Python's ONNX Runtime, with the simplest page table there can be."""

import json

import ml_dtypes
import numpy as np
import onnxruntime as ort
from capi import number_of
from exported import OPS

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


class Paged:
    """A model and its pages. Sequences are lists of tokens; `step` runs new tokens of several at once."""

    def __init__(self, folder, pages=64, threads=2, seed=1, graph="cpu_model"):
        self.manifest = json.loads((folder / "pagoda.json").read_text())
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, threads
        options.register_custom_ops_library(str(OPS))
        # What the CPU runs, or what all providers can run: with native weights there is one graph.
        graph = self.manifest.get(graph, self.manifest["model"])
        self.session = ort.InferenceSession(str(folder / graph), options, providers=["CPUExecutionProvider"])
        self.page_size = self.manifest["kv"]["page_size"]
        self.pools = {}
        for value in self.session.get_inputs():
            if value.name.startswith("kv_"):
                kind = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16}.get(value.type)
                kind = kind or NUMPY[self.manifest["compute"]]
                # What is in pages that were not written must not matter: NaN in those that can hold it.
                filler = np.nan if kind != np.uint8 else 255
                self.pools[value.name] = np.full([pages, *value.shape[1:]], filler, kind)
        # Pages of a sequence are in no order.
        self.free = list(np.random.default_rng(seed).permutation(pages))
        self.tables, self.cached = {}, {}

    def step(self, new, rows=None):
        """Runs `new`, tokens by sequence; returns the logits of all rows, or of `rows`, by sequence."""
        offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in new.values()])])
        cached = [self.cached.get(name, 0) for name in new]
        for (name, tokens), length in zip(new.items(), cached):
            table = self.tables.setdefault(name, [])
            while len(table) * self.page_size < length + len(tokens):
                table.append(self.free.pop())
        tables = [self.tables[name] for name in new]
        rows = np.arange(offsets[-1]) if rows is None else np.asarray(rows)
        inputs = {
            "input_ids": np.concatenate([*new.values()]),
            "positions": np.concatenate([length + np.arange(len(new[name])) for name, length in zip(new, cached)]),
            "row_offsets": offsets,
            "cached_len": np.array(cached),
            "page_indptr": np.concatenate([[0], np.cumsum([len(table) for table in tables])]),
            "page_ids": np.concatenate(tables),
            "logits_rows": rows,
        }
        logits = np.empty([len(rows), self.manifest["vocab_size"]], np.float32)
        self._run({name: array.astype(np.int32) for name, array in inputs.items()}, logits)
        for name, length in zip(new, cached):
            self.cached[name] = length + len(new[name])
        at = np.searchsorted(offsets, rows, "right") - 1
        return {name: logits[at == index] for index, name in enumerate(new)}

    def _run(self, inputs, logits):
        binding = self.session.io_binding()
        known = {value.name for value in self.session.get_inputs()}

        def bind(to, name, array):
            to(name, "cpu", 0, number_of(array.dtype), array.shape, array.ctypes.data)

        for name, array in inputs.items():
            if name in known:
                bind(binding.bind_input, name, array)
        for name, pool in self.pools.items():
            bind(binding.bind_input, name, pool)
            bind(binding.bind_output, f"{name}_out", pool)
        bind(binding.bind_output, "logits", logits)
        self.session.run_with_iobinding(binding)

    def drop(self, name):
        self.free += self.tables.pop(name, [])
        self.cached.pop(name, None)
