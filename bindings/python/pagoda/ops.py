"""The ai.pagoda operators in Python's own ONNX Runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ._native import StrPath, beside
from .error import NotFoundError


def library() -> str:
    """The path of libpagoda_ops.so, which lies beside libpagoda.so."""
    path = beside("libpagoda_ops.so")
    if not Path(path).exists():
        advice = "install a wheel of Pagoda, or set PAGODA_LIBRARY to the libpagoda.so that it lies beside"
        raise NotFoundError(f"{path} does not exist: {advice}")
    return path


def register(session_options: Any, tables: StrPath | None = None) -> None:
    """Registers the operators for sessions with these `onnxruntime.SessionOptions`.

    `tables` is the configuration file of the tables that `EmbeddingBag` nodes of the graph name.

    ```python
    options = onnxruntime.SessionOptions()
    pagoda.ops.register(options)
    session = onnxruntime.InferenceSession("model.onnx", options)
    ```
    """
    session_options.register_custom_ops_library(library())
    if tables is not None:
        session_options.add_session_config_entry("ai.pagoda.tables", os.fspath(tables))
