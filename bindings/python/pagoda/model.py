"""ONNX models, opened and run by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self, TypeAlias

from ._native import (
    Object,
    StrPath,
    Struct,
    begin,
    call,
    decoded,
    ffi,
    handles,
    instance_of,
    lib,
    listed,
    onnxruntime_path,
    out,
    pending,
    read_error,
    taken,
    text,
    texts,
)
from .cancel import Cancel, awaited
from .embedding import Embeddings
from .error import InvalidArgumentError
from .tensor import Array, ElementType, Tensor, as_tensor


class Provider(IntEnum):
    """The execution provider: where a model runs."""

    AUTO = 0
    """On a GPU if there is one, else on the CPU."""
    CPU = 1
    """On the CPU."""
    CUDA = 2
    """On an NVIDIA GPU. Opening the model fails if that is not possible."""


class Optimization(IntEnum):
    """How far ONNX Runtime optimizes the graph when a model is opened."""

    ALL = 0
    """All optimizations."""
    NONE = 1
    """None."""
    BASIC = 2
    """Only those whose result is standard ONNX."""
    EXTENDED = 3
    """Node fusions too, but no changes of memory layouts."""


@dataclass(kw_only=True)
class ModelOptions(Struct, struct="pagoda_model_options"):
    """How to open a model."""

    provider: Provider = Provider.AUTO
    """Where the model runs."""
    device_id: int = 0
    """The number of the GPU."""
    intra_op_threads: int = 0
    """The number of threads that work on one run; 0: one for each core."""
    optimization: Optimization = Optimization.ALL
    """How far the graph is optimized."""
    sleep_when_idle: bool = False
    """Idle threads sleep. Otherwise they spin for a while after each run, which wakes them sooner, and takes cores from
    everything else in the process."""
    tf32: bool = False
    """f32 matrix products on a GPU may use TF32, which keeps 10 bits of the fraction and is several times as fast."""
    host_pools: bool = False
    """The ai.pagoda operators run on the CPU even if the rest of the model runs on a GPU."""
    onnxruntime_path: StrPath | None = None
    """The ONNX Runtime library. None: the environment variable PAGODA_ONNXRUNTIME; then that of the installed package
    onnxruntime or onnxruntime-gpu; then what libpagoda.so finds. A process loads one, for the first model."""
    profile_path: StrPath | None = None
    """Where to write a profile of all runs when the model is closed, in Chrome's trace format; None: no profile."""
    tables: Embeddings | None = None
    """The tables that EmbeddingBag nodes of the graph name. The model keeps those that it uses open."""

    def fill(self, made: Any, argument: str, keep: list[Any]) -> None:
        super().fill(made, argument, keep)
        if self.onnxruntime_path is None and not _opened and (path := onnxruntime_path()):
            keep.append(found := text(path, argument))
            made.onnxruntime_path = found


# Whether a model was opened: from then on the process has its ONNX Runtime, whichever it is.
_opened: list[bool] = []


def opening(function: Any, kind: str, what: tuple[Any, ...], options: Struct) -> Any:
    """Opens something that runs models, and returns its handle."""
    while True:
        keep: list[Any] = []
        try:
            made = options.to_c("options", keep)
            # Where a model runs inside something else: without options, too, ONNX Runtime is that of the package.
            if getattr(options, "model", made) is None:
                made.model = ModelOptions().to_c("options.model", keep)
            handle = out(function, kind, *what, made)
        except InvalidArgumentError as failure:
            # Other code of the process has loaded another ONNX Runtime than that of the installed package.
            if _opened or not failure.argument.endswith("onnxruntime_path"):
                raise
            _opened.append(True)
        else:
            _opened.append(True)
            return handle


@dataclass(frozen=True)
class ValueInfo(Struct, struct="pagoda_value_info"):
    """An input or an output of a model."""

    name: str
    """The name."""
    type: ElementType
    """The element type; UNDEFINED if it is not a tensor."""
    dims: tuple[int, ...] | None
    """The dimensions, -1 for a dynamic one; None if the model does not specify the rank."""
    symbols: tuple[str, ...]
    """The symbolic name of each dimension; "" if it is fixed or has no name."""

    @classmethod
    def from_c(cls, read: Any) -> ValueInfo:
        dims = tuple(listed(read.dims, read.rank)) if read.dims else None
        symbols = tuple(decoded(symbol) for symbol in listed(read.symbols, read.rank)) if read.symbols else ()
        return cls(decoded(read.name), ElementType(read.type), dims, symbols)


Value: TypeAlias = Tensor | Array | Any
"""A tensor, a numpy array, or anything with `__dlpack__`."""
Outputs: TypeAlias = Iterable[str] | Mapping[str, Value | None] | None


class _Run:
    """What a run is called with. After the `with` the tensors are closed that it has made over arrays."""

    def __init__(self, model: Model, inputs: Mapping[str, Value], outputs: Outputs, cancel: Cancel | None) -> None:
        if outputs is None:
            outputs = [value.name for value in model.outputs]
        if not isinstance(outputs, Mapping):
            if isinstance(outputs, str):
                raise TypeError(f"outputs: {outputs!r} is one text; give a list")
            outputs = dict.fromkeys(outputs)
        self.keep: list[Any] = []
        self.future: Future[dict[str, Tensor]] = pending()
        self.made: list[Tensor] = []
        given = [self.tensor(value) for value in inputs.values()]
        # Bound outputs are returned, and the caller's.
        self.names = list(outputs)
        self.bound = [None if value is None else as_tensor(value) for value in outputs.values()]
        for name, tensor in zip(self.names, self.bound, strict=True):
            if tensor is not None and not tensor.writable:
                message = f"outputs[{name!r}]: the array is read-only, and the run would write to it"
                raise InvalidArgumentError(message, "outputs")
        self.array = handles(self.bound, "pagoda_tensor", self.keep)
        ins = texts(inputs, "input_names", self.keep)[0], handles(given, "pagoda_tensor", self.keep), len(given)
        outs = texts(self.names, "output_names", self.keep)[0], self.array, len(self.names)
        stop = ffi.NULL if cancel is None else instance_of(Cancel, cancel, "cancel").handle
        self.arguments = (*ins, *outs, stop)

    def tensor(self, value: Value) -> Tensor:
        tensor = as_tensor(value)
        if tensor is not value:
            self.made.append(tensor)
        return tensor

    def named(self, found: list[Any]) -> dict[str, Tensor]:
        pairs = zip(self.names, self.bound, found, strict=True)
        return {name: Tensor._of(handle) if given is None else given for name, given, handle in pairs}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tensor in self.made:
            tensor.close()


@ffi.callback("pagoda_run_callback")  # type: ignore[untyped-decorator]
def _ran(user_data: Any, status: int, outputs: Any, count: int, error: Any) -> None:
    run = taken(user_data)
    if status:
        run.future.set_exception(read_error(status, error))
    else:
        run.future.set_result(run.named(listed(outputs, count)))


class Model(Object):
    """An open ONNX model. The ai.pagoda operators are always available."""

    _free = "pagoda_model_free"

    def __init__(self, model: StrPath | bytes, options: ModelOptions | None = None) -> None:
        """Opens an .onnx file; or a model from the bytes of one."""
        options = ModelOptions.given(options)
        if isinstance(model, bytes):
            what = ffi.from_buffer(model), len(model)
            self._own(opening(lib.pagoda_model_open_memory, "pagoda_model *", what, options))
        else:
            self._own(opening(lib.pagoda_model_open, "pagoda_model *", (text(model, "path"),), options))

    @property
    def provider(self) -> tuple[Provider, str]:
        """Where the model runs, and why AUTO chose the CPU; "" in all other cases."""
        provider, reason = ffi.new("pagoda_provider *"), ffi.new("const char **")
        call(lib.pagoda_model_provider, self.handle, provider, reason)
        return Provider(provider[0]), decoded(reason[0])

    @property
    def inputs(self) -> list[ValueInfo]:
        """The inputs of the model."""
        count = out(lib.pagoda_model_input_count, "size_t", self.handle)
        return [ValueInfo.filled(lib.pagoda_model_input, self.handle, index) for index in range(count)]

    @property
    def outputs(self) -> list[ValueInfo]:
        """The outputs of the model."""
        count = out(lib.pagoda_model_output_count, "size_t", self.handle)
        return [ValueInfo.filled(lib.pagoda_model_output, self.handle, index) for index in range(count)]

    def run(
        self, inputs: Mapping[str, Value], outputs: Outputs = None, cancel: Cancel | None = None
    ) -> dict[str, Tensor]:
        """Runs the model, and returns its outputs by name.

        `inputs` has a tensor or an array for each input. Nothing but strings is copied. `outputs` names those that are
        wanted; None: all of them. In a mapping, an output with a tensor or an array is written to its memory; one with
        None gets a new tensor. A tensor may be both an input and an output if the operators of the model allow that, as
        with pools of keys and values.

        While it runs, the memory of inputs must not be written, and that of bound outputs neither written nor read.
        """
        with _Run(self, inputs, outputs, cancel) as run:
            call(lib.pagoda_model_run, self.handle, *run.arguments)
            return run.named(listed(run.array, len(run.names)))

    async def run_async(
        self, inputs: Mapping[str, Value], outputs: Outputs = None, cancel: Cancel | None = None
    ) -> dict[str, Tensor]:
        """`run` on a thread of Pagoda, for asyncio. A task that is cancelled cancels the run, unless the run has a
        `cancel` of the caller."""

        def start(stop: Cancel) -> Future[dict[str, Tensor]]:
            with _Run(self, inputs, outputs, stop) as run:
                begin(run, lib.pagoda_model_run_async, self.handle, *run.arguments, _ran)
                return run.future

        return await awaited(start, cancel)
