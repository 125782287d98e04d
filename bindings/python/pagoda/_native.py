"""libpagoda.so: loading it, calling it, and what goes in and out. The declarations are in _header.py.

cffi lets go of the GIL during every call. What a call points to is kept in a list, `keep`, until the call returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from . import _header
from .error import InvalidArgumentError, InvalidHandleError, NotFoundError, PagodaError, from_status

ffi: Any = _header.ffi
StrPath: TypeAlias = str | os.PathLike[str]
Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
Q_co = TypeVar("Q_co", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


# ---- the library -------------------------------------------------------------------------------------------------


class _Library:
    """The functions of a library. It is loaded when the first one is asked for, so that the exporter works without."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._loaded: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if not self._loaded:
                self._loaded.append(self._load())
        found = getattr(self._loaded[0], name)
        setattr(self, name, found)
        return found


def _open(path: str) -> Any:
    try:
        return ffi.dlopen(path)
    except OSError as failure:
        name, advice = Path(path).name, "install a wheel of Pagoda, or set PAGODA_LIBRARY to the path of a libpagoda.so"
        raise NotFoundError(f"{name} can not be loaded: {failure}; {advice}") from None


def _load() -> Any:
    library = _open(library_path())
    error = ffi.new("pagoda_error **")
    if status := library.pagoda_abi_check(library.PAGODA_ABI_VERSION, error):
        raise take_error(status, error[0], library)
    return library


# pagoda.h, and native/stream.h, which lies beside it.
lib = _Library(_load)
streams = _Library(lambda: _open(beside("libpagoda_python.so")))


def beside(name: str) -> str:
    """The path of another library of the wheel; only its name if the system's loader finds libpagoda.so."""
    path = library_path()
    return str(Path(path).absolute().with_name(name)) if "/" in path else name


def library_path() -> str:
    """The file of libpagoda.so: PAGODA_LIBRARY, or that of the wheel, or what the system's loader finds."""
    if given := os.environ.get("PAGODA_LIBRARY"):
        return given
    packaged = Path(__file__).parent / "lib/libpagoda.so"
    return str(packaged) if packaged.exists() else "libpagoda.so.1"


def onnxruntime_path() -> str | None:
    """The library of the installed package onnxruntime or onnxruntime-gpu. None: libpagoda.so looks for one itself, as
    it does with PAGODA_ONNXRUNTIME."""
    if os.environ.get("PAGODA_ONNXRUNTIME"):
        return None
    # Not imported: that takes long, and loads another copy of the runtime.
    package = importlib.util.find_spec("onnxruntime")
    for folder in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(folder, "capi").glob("libonnxruntime.so*")):
            return str(file)
    return None


# ---- calls -------------------------------------------------------------------------------------------------------


def call(function: Any, *arguments: Any) -> None:
    """Calls a function that reports errors, and raises them."""
    error = ffi.new("pagoda_error **")
    if status := function(*arguments, error):
        raise take_error(status, error[0])


def take_error(status: int, error: Any, library: Any = lib) -> PagodaError:
    """An error as an exception; it is freed."""
    made = read_error(status, error, library)
    library.pagoda_error_free(error)
    return made


def read_error(status: int, error: Any, library: Any = lib) -> PagodaError:
    """An error as an exception; the library keeps it."""
    if not error:
        return from_status(status, f"the library gives no reason: {decoded(library.pagoda_status_name(status))}")
    message, argument = (decoded(read(error)) for read in (library.pagoda_error_message, library.pagoda_error_argument))
    return from_status(library.pagoda_error_status(error), message, argument)


def out(function: Any, kind: str, *arguments: Any) -> Any:
    """Calls a function whose last output is one value, and returns it."""
    value = ffi.new(f"{kind} *")
    call(function, *arguments, value)
    return value[0]


def decoded(chars: Any) -> str:
    """A text that ends with a NUL."""
    return cast(bytes, ffi.string(chars)).decode()


def written(function: Any, *arguments: Any) -> str:
    """A text of a length that the library says first. It may have grown by the time that there is room for it."""
    length = ffi.new("size_t *")
    call(function, *arguments, ffi.NULL, 0, length)
    room = length[0] + 65536
    buffer = ffi.new("char[]", room)
    call(function, *arguments, buffer, room, length)
    return cast(bytes, ffi.unpack(buffer, length[0] - 1)).decode()


def listed(pointer: Any, count: int) -> list[Any]:
    """A C array as a list."""
    return cast(list[Any], ffi.unpack(pointer, count)) if count else []


# ---- what goes in ------------------------------------------------------------------------------------------------

_DTYPES = {"int32_t": np.int32, "uint32_t": np.uint32, "int64_t": np.int64, "uint64_t": np.uint64, "float": np.float32}


def text(value: StrPath, argument: str) -> Any:
    """A text or a path as C has it."""
    value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError(f"{argument}: {value!r} is no text")
    if "\0" in value:
        raise InvalidArgumentError(f"{argument}: {value!r} has a NUL in it", argument)
    try:
        return ffi.new("char[]", value.encode())
    except UnicodeEncodeError as failure:
        raise InvalidArgumentError(f"{argument}: {value!r} can not be written in UTF-8: {failure}", argument) from None


def texts(values: Iterable[StrPath], argument: str, keep: list[Any]) -> tuple[Any, int]:
    """A list of texts, and how many there are."""
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{argument}: {values!r} is one text; give a list")
    made = [text(value, f"{argument}[{index}]") for index, value in enumerate(values)]
    array = ffi.new("const char *[]", made or [ffi.NULL])
    keep += [made, array]
    return array, len(made)


def numbers(values: Any, kind: str, argument: str, keep: list[Any]) -> tuple[Any, int]:
    """A list of numbers, and how many there are; an array of the right type is not copied."""
    dtype = np.dtype(_DTYPES[kind])
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{argument}: {values!r} is a text; give a list of numbers")
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(dtype)
    if array.ndim != 1:
        raise InvalidArgumentError(f"{argument}: it has {array.ndim} dimensions; give a list of numbers", argument)
    if array.dtype != dtype:
        if array.dtype.kind not in ("iufb" if dtype.kind == "f" else "iu"):
            raise TypeError(f"{argument}: {array.dtype} are not numbers of the type {dtype}")
        converted = array.astype(dtype)
        if dtype.kind != "f" and (wrong := array[converted != array]).size:
            raise InvalidArgumentError(f"{argument}: {wrong[0]} does not fit into {dtype}", argument)
        array = converted
    array = np.ascontiguousarray(array)
    keep.append(array)
    return pointer(array, kind), array.size


def pointer(array: npt.NDArray[Any], kind: str) -> Any:
    """Where an array lies."""
    return ffi.cast(f"{kind} *", array.ctypes.data)


def handles(objects: Iterable[Object | None], kind: str, keep: list[Any]) -> Any:
    """A list of objects; None is NULL."""
    array = ffi.new(f"{kind} *[]", [ffi.NULL if it is None else it.handle for it in objects] or [ffi.NULL])
    keep.append(array)
    return array


def instance_of(kind: type[R], value: R, argument: str) -> R:
    """`value`, if it is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{argument}: {value!r} is no {kind.__name__}")
    return value


STRUCTS: dict[str, type[Struct]] = {}
"""The Python class of each struct of pagoda.h that has one. The tests compare both field by field."""


@functools.cache
def fields_of(kind: str) -> dict[str, Any]:
    """The type of each field of a struct."""
    return {name: field.type for name, field in ffi.typeof(kind).fields}


def count_field(name: str, fields: Mapping[str, Any]) -> str | None:
    """The field that has the number of elements of the list `name`: stop and stop_count, tokens and token_count."""
    return next((count for count in (f"{name}_count", f"{name[:-1]}_count") if count in fields), None)


class Struct:
    """A dataclass that is a struct of pagoda.h. Its fields have the names and the defaults of the struct; None is what
    PAGODA_..._INIT sets. To add a field of the header, add it to the dataclass."""

    struct: ClassVar[str] = ""
    # Fields that are JSON: a text, or anything that json.dumps takes.
    json_fields: ClassVar[frozenset[str]] = frozenset()
    # Fields of the struct by the field of the dataclass that sets them, where the names differ.
    made_of: ClassVar[Mapping[str, str]] = {}
    # Fields that the dataclass sets itself, in its own `fill`.
    by_hand: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, struct: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.struct = struct
        STRUCTS[struct] = cls

    @classmethod
    def given(cls, options: Self | None) -> Self:
        """The options that a caller has given, or the defaults."""
        return instance_of(cls, cls() if options is None else options, "options")

    def to_c(self, argument: str, keep: list[Any]) -> Any:
        """A struct in C, which points to what is in `keep`."""
        made = initialised(self.struct)
        keep.append(made)
        self.fill(made, argument, keep)
        return made

    def fill(self, made: Any, argument: str, keep: list[Any]) -> None:
        """Sets the fields of a struct that has its defaults."""
        names = fields_of(self.struct)
        for field in dataclasses.fields(cast(Any, self)):
            value = getattr(self, field.name)
            if field.name in names and field.name not in self.by_hand and value is not None:
                if field.name in self.json_fields and not isinstance(value, str):
                    value = json.dumps(value)
                set_field(made, field.name, value, f"{argument}.{field.name}", keep)
                if f"has_{field.name}" in names:
                    setattr(made, f"has_{field.name}", 1)

    @classmethod
    def from_c(cls, read: Any) -> Self:
        """The numbers and texts of a struct in C."""
        values = {}
        for field in dataclasses.fields(cast(Any, cls)):
            value = getattr(read, field.name)
            values[field.name] = decoded(value) if isinstance(value, ffi.CData) else value
        return cls(**values)

    @classmethod
    def filled(cls, function: Any, *arguments: Any) -> Self:
        """What a function fills in, whose last output is this struct."""
        made = initialised(cls.struct)
        call(function, *arguments, made)
        return cls.from_c(made)


def initialised(kind: str) -> Any:
    """A struct as its INIT makes it."""
    made = ffi.new(f"{kind} *", {"struct_size": ffi.sizeof(kind)})
    for name, value in _header.INIT.get(kind, {}).items():
        setattr(made, name, value)
    return made


def set_field(made: Any, name: str, value: Any, argument: str, keep: list[Any]) -> None:
    """Sets a field of a struct by its type in C."""
    names = fields_of(ffi.typeof(made).item.cname)
    kind, count = names[name], count_field(name, names)
    item = kind.item if kind.kind == "pointer" else None
    if item is None:
        try:
            setattr(made, name, value)
        except OverflowError as failure:
            raise InvalidArgumentError(f"{argument}: {value!r} does not fit: {failure}", argument) from None
        except TypeError as failure:
            raise TypeError(f"{argument}: {value!r}: {failure}") from None
    elif item.cname == "char":
        keep.append(made_text := text(value, argument))
        setattr(made, name, made_text)
    elif item.kind == "pointer":
        array, length = texts(value, argument, keep)
        setattr(made, name, array)
        setattr(made, count or "", length)
    elif item.kind == "primitive":
        array, length = numbers(value, item.cname, argument, keep)
        setattr(made, name, array)
        setattr(made, count or "", length)
    elif count:
        array = struct_array(item.cname, value, argument, keep)
        setattr(made, name, array)
        setattr(made, count, len(value))
    elif isinstance(value, Object):
        if ffi.typeof(value.handle) is not kind:
            raise TypeError(f"{argument}: {value!r} is of the wrong type")
        keep.append(value)
        setattr(made, name, value.handle)
    elif isinstance(value, Struct) and value.struct == item.cname:
        setattr(made, name, value.to_c(argument, keep))
    else:
        raise TypeError(f"{argument}: {value!r} is of the wrong type")


def struct_array(kind: str, values: Any, argument: str, keep: list[Any]) -> Any:
    """An array of structs, from dataclasses; from pairs, or a mapping, where a struct has two fields."""
    values = [*values.items()] if isinstance(values, Mapping) else [*values]
    array = ffi.new(f"{kind}[]", len(values) or 1)
    keep.append(array)
    for index, value in enumerate(values):
        where = f"{argument}[{index}]"
        array[index] = initialised(kind)[0]
        if isinstance(value, Struct) and value.struct == kind:
            value.fill(ffi.addressof(array, index), where, keep)
        elif isinstance(value, tuple):
            for name, part in zip([*fields_of(kind)][1:], value, strict=True):
                set_field(ffi.addressof(array, index), name, part, f"{where}.{name}", keep)
        else:
            raise TypeError(f"{where}: {value!r} is of the wrong type")
    return array


# ---- objects -----------------------------------------------------------------------------------------------------


class Object:
    """An object of the library. It is closed by `close`, at the end of a `with`, or, if it is forgotten, by the garbage
    collector. Any number of threads may use it at the same time, and close it meanwhile."""

    _free: ClassVar[str]
    _handle: Any
    _finalizer: weakref.finalize[Any, Any]

    def _own(self, handle: Any) -> None:
        self._handle = handle
        # Also runs when the interpreter ends, while callbacks can still be called.
        self._finalizer = weakref.finalize(self, getattr(lib, self._free), handle)

    @property
    def handle(self) -> Any:
        """The handle in C, for calls of functions that this package does not have."""
        # A handle is a number that the library checks, so that another thread may close the object at any time.
        if self.closed:
            argument = self._free.removesuffix("_free").removeprefix("pagoda_").removeprefix("kv_")
            raise InvalidHandleError(f"{argument}: this {type(self).__name__} was closed", argument)
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Closes the object. Another call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<pagoda.{type(self).__name__}{' (closed)' if self.closed else ''}>"


# ---- callbacks ---------------------------------------------------------------------------------------------------

_kept: dict[int, tuple[Any, Any]] = {}


def kept(value: Any, handle: Any = None) -> Any:
    """A `user_data` for a callback, or that of the caller. `value` stays alive until `taken`."""
    handle = ffi.new_handle(value) if handle is None else handle
    _kept[int(ffi.cast("uintptr_t", handle))] = handle, value
    return handle


def taken(user_data: Any) -> Any:
    """The value of a `user_data`, which is not used again."""
    return _kept.pop(int(ffi.cast("uintptr_t", user_data)))[1]


def begin(value: Any, function: Any, *arguments: Any, user_data: Any = None) -> None:
    """Calls a function that returns at once and ends with a callback; its last argument is the `user_data` of that, from
    which the callback takes `value`."""
    user_data = kept(value, user_data)
    try:
        call(function, *arguments, user_data)
    except BaseException:
        taken(user_data)
        raise


def pending() -> Future[Any]:
    """A future that a callback resolves. Who waits can not cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


# ---- requests as keywords ----------------------------------------------------------------------------------------


class Request(Generic[P, Q_co, R_co]):
    """A method that takes a request, or the fields of one."""

    @overload
    def __call__(self, request: Q_co, /) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class TakesRequest(Protocol[P, Q_co, R_co]):
    """For type checkers: how such a method lies in its class."""

    def __get__(self, instance: Any, owner: Any) -> Request[P, Q_co, R_co]: ...


def takes(kind: Callable[P, Q]) -> Callable[[Callable[[Any, Q], R]], TakesRequest[P, Q, R]]:
    """Lets a method that takes a `kind` take its fields instead: the fields are written once, in their dataclass."""

    made: Any = kind

    def decorate(method: Callable[[Any, Q], R]) -> TakesRequest[P, Q, R]:
        @functools.wraps(method)
        def taking(self: Any, *args: Any, **fields: Any) -> R:
            ready = len(args) == 1 and not fields and isinstance(args[0], made)
            return method(self, args[0] if ready else made(*args, **fields))

        signature = inspect.signature(method)
        given = inspect.signature(kind).parameters.values()
        cast(Any, taking).__signature__ = signature.replace(parameters=[*signature.parameters.values()][:1] + [*given])
        return cast("TakesRequest[P, Q, R]", taking)

    return decorate
