"""Tensors: typed arrays, the inputs and outputs of models."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ._native import Object, call, decoded, ffi, kept, lib, listed, out, taken
from .error import InvalidArgumentError, UnsupportedError

Array: TypeAlias = npt.NDArray[Any]


class ElementType(IntEnum):
    """The type of the elements of a tensor. The numbers are those of ONNX."""

    UNDEFINED = 0
    F32 = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    I32 = 6
    I64 = 7
    STRING = 8
    BOOL = 9
    F16 = 10
    F64 = 11
    U32 = 12
    U64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BF16 = 16
    F8E4M3FN = 17
    F8E4M3FNUZ = 18
    F8E5M2 = 19
    F8E5M2FNUZ = 20
    U4 = 21
    I4 = 22
    F4E2M1 = 23
    F8E8M0 = 24
    U2 = 25
    I2 = 26

    @property
    def short_name(self) -> str:
        """The name that messages of the library have for it, e.g. "f32"."""
        return decoded(lib.pagoda_element_type_name(self))


# By the names of numpy, and of ml_dtypes, which has the others.
_NAMES = {
    "float32": ElementType.F32,
    "uint8": ElementType.U8,
    "int8": ElementType.I8,
    "uint16": ElementType.U16,
    "int16": ElementType.I16,
    "int32": ElementType.I32,
    "int64": ElementType.I64,
    "bool": ElementType.BOOL,
    "float16": ElementType.F16,
    "float64": ElementType.F64,
    "uint32": ElementType.U32,
    "uint64": ElementType.U64,
    "complex64": ElementType.COMPLEX64,
    "complex128": ElementType.COMPLEX128,
    "bfloat16": ElementType.BF16,
    "float8_e4m3fn": ElementType.F8E4M3FN,
    "float8_e4m3fnuz": ElementType.F8E4M3FNUZ,
    "float8_e5m2": ElementType.F8E5M2,
    "float8_e5m2fnuz": ElementType.F8E5M2FNUZ,
    "float8_e8m0fnu": ElementType.F8E8M0,
}
_BY_TYPE = {kind: name for name, kind in _NAMES.items()}
# Several elements in a byte: the memory of such a tensor is a list of bytes.
_PACKED = (ElementType.U4, ElementType.I4, ElementType.F4E2M1, ElementType.U2, ElementType.I2)


@ffi.callback("pagoda_release_callback")  # type: ignore[untyped-decorator]
def _released(user_data: Any) -> None:
    taken(user_data)


class _Owner:
    """Frees a tensor when neither it nor an array over its memory is left."""

    def __init__(self, handle: Any) -> None:
        # Arrays may be used until the very end of the process.
        weakref.finalize(self, lib.pagoda_tensor_free, handle).atexit = False


class _View:
    """The memory of a tensor, as numpy takes it."""

    def __init__(self, owner: _Owner | None, address: int, size: int, writable: bool) -> None:
        self.owner = owner
        data = address, not writable
        self.__array_interface__ = {"data": data, "shape": (size,), "typestr": "|u1", "version": 3}


class _Lender:
    """What lends its memory by DLPack, and whether it may be written."""

    def __init__(self, lender: Any) -> None:
        self.lender, self.read_only_is_told = lender, False

    def __dlpack_device__(self) -> Any:
        return self.lender.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        try:
            capsule = self.lender.__dlpack__(**options)
        except TypeError:
            # Before version 1 of DLPack there were no options, and nothing that is read-only was lent.
            return self.lender.__dlpack__()
        self.read_only_is_told = "versioned" in repr(capsule)
        return capsule


class Tensor(Object):
    """A tensor: an element type, dimensions, and memory, which runs read and write in place.

    `Tensor(array)` is made over the memory of a numpy array or of anything with `__dlpack__`, such as a torch tensor on
    the CPU, without a copy. The array must be contiguous, and stays alive for as long as the library uses it. `type`
    says what the elements are where numpy has no name for them: `Tensor(bits, ElementType.BF16)` for an array of 16-bit
    integers.

    The caller orders reads and writes of the memory: a run must not write to an array that is read at the same time.
    """

    _free = "pagoda_tensor_free"
    _owner: _Owner | None
    _writable: bool

    def __init__(self, array: Any, type: ElementType | None = None) -> None:
        array, writable = _as_array(array)
        kind = _type_of(array) if type is None else ElementType(type)
        if not array.flags.c_contiguous:
            advice = "numpy.ascontiguousarray makes a copy that is"
            raise InvalidArgumentError(
                f"data: an array of the strides {array.strides} is not contiguous; {advice}", "data"
            )
        dims = ffi.new("int64_t[]", list(array.shape) or [0])
        data = ffi.cast("void *", array.ctypes.data)
        user_data, handle = kept(array), ffi.new("pagoda_tensor **")
        try:
            memory = data, array.nbytes, _released, user_data
            call(lib.pagoda_tensor_borrow, kind, dims, array.ndim, *memory, handle)
        except BaseException:
            taken(user_data)
            raise
        self._own(handle[0])
        self._writable = writable

    def _own(self, handle: Any) -> None:
        self._handle, self._owner, self._writable = handle, _Owner(handle), True

    @property
    def writable(self) -> bool:
        """Whether a run may write to it: not if it was made over an array that is read-only."""
        return self._writable

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._owner is None

    def close(self) -> None:
        """Closes the tensor. Its memory is released when no array and no run uses it. Another call does nothing."""
        self._owner = None

    @classmethod
    def _of(cls, handle: Any) -> Self:
        made = cls.__new__(cls)
        made._own(handle)
        return made

    @classmethod
    def zeros(cls, type: ElementType, shape: Sequence[int]) -> Self:
        """A tensor with memory of its own, aligned to 64 bytes: zeros or empty strings."""
        return cls._of(out(lib.pagoda_tensor_new, "pagoda_tensor *", type, list(shape) or ffi.NULL, len(shape)))

    @classmethod
    def strings(cls, values: Sequence[str], shape: Sequence[int] | None = None) -> Self:
        """A tensor with a copy of strings; `shape` is their number if it is not given."""
        if isinstance(values, str):
            raise TypeError(f"values: {values!r} is one text; give a list")
        encoded = [value.encode() for value in values]
        texts = [ffi.new("char[]", value) for value in encoded]
        dims = [len(encoded)] if shape is None else list(shape)
        lists = texts or [ffi.NULL], [len(value) for value in encoded] or [0], len(encoded)
        return cls._of(out(lib.pagoda_tensor_new_strings, "pagoda_tensor *", *lists, dims or ffi.NULL, len(dims)))

    @property
    def type(self) -> ElementType:
        """The type of the elements."""
        return ElementType(out(lib.pagoda_tensor_type, "pagoda_element_type", self.handle))

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        dims, rank = ffi.new("const int64_t **"), ffi.new("size_t *")
        call(lib.pagoda_tensor_dims, self.handle, dims, rank)
        return tuple(listed(dims[0], rank[0]))

    def numpy(self, dtype: npt.DTypeLike | None = None) -> Array:
        """The elements as an array over the memory of the tensor, without a copy; a tensor of strings is copied.

        The array stays valid after `close`. `dtype` names another type of the same size, such as numpy.uint16 for BF16.
        Types that numpy does not have need the package ml_dtypes, or a `dtype`; types of less than a byte are given as
        their bytes, a list of uint8. A tensor on a GPU is an `UnsupportedError`.
        """
        kind, shape = self.type, self.shape
        if kind == ElementType.STRING:
            return self._texts(shape)
        data, size = ffi.new("void **"), ffi.new("size_t *")
        call(lib.pagoda_tensor_data, self.handle, data, size)
        memory = np.asarray(_View(self._owner, int(ffi.cast("uintptr_t", data[0])), size[0], self._writable))
        if kind in _PACKED:
            return memory if dtype is None else memory.view(dtype)
        return memory.view(_dtype_of(kind) if dtype is None else dtype).reshape(shape)

    def _texts(self, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        found = np.empty(count, object)
        text, length = ffi.new("const char **"), ffi.new("size_t *")
        for index in range(count):
            call(lib.pagoda_tensor_string, self.handle, index, text, length)
            found[index] = cast(bytes, ffi.unpack(text[0], length[0])).decode() if length[0] else ""
        return found.reshape(shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        found = self.numpy()
        if dtype is not None and found.dtype != np.dtype(dtype):
            if copy is False:
                raise ValueError(f"a tensor of {found.dtype} can not be an array of {np.dtype(dtype)} without a copy")
            return found.astype(dtype)
        return found.copy() if copy else found

    def __dlpack__(self, **options: Any) -> Any:
        return cast(Any, self.numpy()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return cast(tuple[int, int], cast(Any, self.numpy()).__dlpack_device__())


def _as_array(value: Any) -> tuple[Array, bool]:
    """An array over the memory of `value`, and whether that may be written."""
    if isinstance(value, np.ndarray):
        return value, value.flags.writeable
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"data: {type(value).__name__} is neither a numpy array nor has it __dlpack__")
    lender = _Lender(value)
    try:
        array = np.from_dlpack(lender)
    except (BufferError, RuntimeError, TypeError) as failure:
        advice = "for a type that numpy does not have, give a view as integers, and `type`"
        raise UnsupportedError(f"data: {type(value).__name__}: {failure}; {advice}", "data") from None
    return array, array.flags.writeable or not lender.read_only_is_told


def _type_of(array: Array) -> ElementType:
    native = array.dtype.isnative or array.dtype.itemsize == 1
    if (kind := _NAMES.get(array.dtype.name)) is None or not native:
        raise UnsupportedError(f"data: a tensor can not have elements of numpy's type {array.dtype}", "data")
    return kind


def _dtype_of(kind: ElementType) -> np.dtype[Any]:
    name = _BY_TYPE[kind]
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        advice = "install ml_dtypes, or give a dtype of the same size, such as numpy.uint16"
        raise UnsupportedError(f"numpy has no type for {kind.name}: {advice}", "dtype") from None
    return cast("np.dtype[Any]", np.dtype(getattr(ml_dtypes, name)))


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; an array as a tensor over its memory; an array of texts as a copy."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "UOT":
        return Tensor.strings([str(text) for text in value.reshape(-1)], value.shape)
    return Tensor(value)
