"""What concerns the process: versions, live objects, metrics, the log."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from . import _header
from ._native import call, decoded, ffi, lib, written

METRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0"
"""The content type of `metrics`."""
HEADER_VERSION: str = _header.VERSION
"""The version of the header that this package was written against. The library may be a later one: see `version`."""


class LogLevel(IntEnum):
    """How much is logged. A level includes the levels before it."""

    OFF = 0
    """Nothing."""
    ERROR = 1
    """Failures, above all those that no call raises."""
    WARN = 2
    """What is probably not intended, such as a model that runs on the CPU because there is no GPU."""
    INFO = 3
    """Rare events, such as a model swap."""
    DEBUG = 4
    """Details for debugging, such as every error that a call raises."""
    TRACE = 5
    """Everything."""


def version() -> str:
    """The version of the library, e.g. "0.1.0"."""
    return decoded(lib.pagoda_version())


def version_number() -> int:
    """The version of the library as a number: major * 1,000,000 + minor * 1,000 + patch."""
    return int(lib.pagoda_version_number())


def abi_version() -> int:
    """The version of the library's binary interface."""
    return int(lib.pagoda_abi_version())


def live_objects() -> int:
    """How many objects of the library are open; 0 if everything was closed."""
    return int(lib.pagoda_live_objects())


def metrics() -> str:
    """The metrics of the process as Prometheus text, to be served as `METRICS_CONTENT_TYPE`."""
    return written(lib.pagoda_metrics_text)


_LOGGING = {
    LogLevel.ERROR: logging.ERROR,
    LogLevel.WARN: logging.WARNING,
    LogLevel.INFO: logging.INFO,
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.TRACE: logging.DEBUG,
}
_setting = threading.Lock()
_current: list[Any] = []


def _to_logging(level: LogLevel, source: str, message: str) -> None:
    name = source.replace("::", ".")
    logging.getLogger(name if name.startswith("pagoda") else f"pagoda.{name}").log(_LOGGING[level], "%s", message)


@ffi.callback("pagoda_log_callback")  # type: ignore[untyped-decorator]
def _logged(user_data: Any, level: int, source: Any, message: Any) -> None:
    ffi.from_handle(user_data)(LogLevel(level), decoded(source), decoded(message))


def set_log(level: LogLevel, line: Callable[[LogLevel, str, str], None] | None = None) -> None:
    """Sends the log of Pagoda and of ONNX Runtime to `line(level, source, message)`, up to `level`; None: to Python's
    `logging`, to loggers below "pagoda". OFF stops it. Until then nothing is logged.

    `line` is called on any thread, and must not call `set_log` or open models. When this returns, the function of before
    is not called any more.
    """
    line = _to_logging if line is None else line
    with _setting:
        handle = ffi.new_handle(line)
        call(lib.pagoda_log_set, level, ffi.NULL if level == LogLevel.OFF else _logged, handle)
        _current[:] = [handle, line]
        # No line may come when the interpreter is gone.
        atexit.unregister(_stop)
        if level != LogLevel.OFF:
            atexit.register(_stop)


def _stop() -> None:
    set_log(LogLevel.OFF)
