"""Exceptions: one class for each status of the library, all of them `PagodaError`."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How a call ended. Each but OK has an exception of its own; later versions of the library may add numbers."""

    OK = 0
    INVALID_ARGUMENT = 1
    INVALID_HANDLE = 2
    NOT_FOUND = 3
    UNSUPPORTED = 4
    CAPACITY = 5
    CANCELLED = 6
    MODEL = 7
    RUNTIME = 8
    IO = 9
    INTERNAL = 10
    BUSY = 11


class PagodaError(Exception):
    """What every call raises that fails. The message says which value was wrong, and what to do about it."""

    status: int = 0
    """The `Status`; a plain number if this package does not know it yet."""
    argument: str
    """The argument at fault by its name in pagoda.h, e.g. "options.provider"; "" if there is none."""
    message: str
    """What was wrong with which value, and what to do."""

    def __init__(self, message: str, argument: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.message, self.argument = message, argument
        self.status = type(self).status if status is None else status


class InvalidArgumentError(PagodaError, ValueError):
    """An argument has an invalid value; `argument` names it."""

    status = Status.INVALID_ARGUMENT


class InvalidHandleError(PagodaError, ValueError):
    """An object was closed."""

    status = Status.INVALID_HANDLE


class NotFoundError(PagodaError, LookupError):
    """A file, a library or a name does not exist."""

    status = Status.NOT_FOUND


class UnsupportedError(PagodaError):
    """The build, the model or the machine does not support this."""

    status = Status.UNSUPPORTED


class CapacityError(PagodaError):
    """A limit is reached: a queue is full, or memory is exhausted."""

    status = Status.CAPACITY


class CancelledError(PagodaError):
    """The call was cancelled, or its time limit was exceeded. It is not asyncio's `CancelledError`."""

    status = Status.CANCELLED


class ModelError(PagodaError):
    """The model can not be loaded."""

    status = Status.MODEL


class RunError(PagodaError, RuntimeError):
    """ONNX Runtime failed while it ran the model."""

    status = Status.RUNTIME


class IoError(PagodaError, OSError):
    """A file could not be read or written."""

    status = Status.IO


class InternalError(PagodaError):
    """A bug in Pagoda: a panic was caught. Please report it."""

    status = Status.INTERNAL


class BusyError(PagodaError):
    """The object is in use; try again later."""

    status = Status.BUSY


BY_STATUS: dict[int, type[PagodaError]] = {kind.status: kind for kind in PagodaError.__subclasses__()}
"""The class of each status."""


def from_status(status: int, message: str, argument: str = "") -> PagodaError:
    """The exception of a status."""
    return BY_STATUS.get(status, PagodaError)(message, argument, status)
