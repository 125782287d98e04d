"""libpagoda.so through ctypes, with every prototype read out of include/pagoda.h.

There is no list of functions here. The tests call and misuse every function of the header, and make it panic, also a
new one. If they can not make a good call of a function, they fail.
"""

import ctypes
import json
import math
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent
SENTINEL = 0xA5
# Seconds for what other threads do.
PATIENCE = 60

INTS = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64}
INTS |= {"uint64_t": ctypes.c_uint64, "uint8_t": ctypes.c_uint8, "float": ctypes.c_float}
TYPES = {1: np.float32, 2: np.uint8, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16, 11: np.float64}
TYPES[16] = ml_dtypes.bfloat16


def number_of(dtype):
    """The pagoda_element_type of a numpy type."""
    return next(number for number, known in TYPES.items() if np.dtype(known) == np.dtype(dtype))


# ---- the header --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    role: str

    def __str__(self):
        return f"{self.type} {self.name}"

    @property
    def kind(self):
        """What a handle is of, e.g. pagoda_model."""
        return re.sub(r"\bconst\b|\*", "", self.type).strip()


@dataclass(frozen=True)
class Function:
    name: str
    result: str
    parameters: tuple

    def has(self, name):
        return any(parameter.name == name for parameter in self.parameters)

    @property
    def reports(self):
        """Whether it hands out an error."""
        return bool(self.parameters) and str(self.parameters[-1]) == "pagoda_error ** error"


class Header:
    def __init__(self, text):
        text = text.replace("\\\n", "")
        self.constants = {name: int(value) for name, value in re.findall(r"^#define (PAGODA_\w+) (-?\d+)$", text, re.M)}
        inits = re.findall(r"^#define PAGODA_\w+_INIT\s+\{ sizeof\((\w+)\), (.*) \}$", text, re.M)
        self.inits = {kind: [self.initial(value) for value in values.split(",")] for kind, values in inits}
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        code = re.sub(r"^\s*#.*$|extern \"C\" \{|^\}\s*$", "", code, flags=re.M)
        code, opaque = self.take(code, r"typedef struct (pagoda_\w+) \1;")
        code, integers = self.take(code, r"typedef (u?int32_t) (pagoda_\w+);")
        code, callbacks = self.take(code, r"typedef void \(\*(pagoda_\w+)\)\(([^)]*)\);")
        code, structs = self.take(code, r"typedef struct \{([^}]*)\} (pagoda_\w+);")
        code, functions = self.take(code, r"([\w ]+?[ *]+)(pagoda_\w+)\(([^)]*)\);")
        assert "pagoda" not in code, f"this part of pagoda.h was not understood: {code.strip()}"
        self.opaque = {match[1] for match in opaque}
        self.integers = INTS | {match[2]: INTS[match[1]] for match in integers}
        self.callbacks = {match[1]: self.callback(match[2]) for match in callbacks}
        self.structs = {match[2]: self.struct(match[2], match[1]) for match in structs}
        self.functions = {match[2]: self.function(match) for match in functions}

    @staticmethod
    def initial(value):
        """A value in an INIT macro."""
        value = value.strip().removesuffix("f")
        return None if value == "NULL" else float(value) if "." in value else int(value)

    @staticmethod
    def take(code, pattern):
        return re.sub(pattern, "", code), list(re.finditer(pattern, code))

    @staticmethod
    def declaration(text):
        """A type and a name: `const char *const *names` is (`const char *const *`, `names`)."""
        kind, name = re.fullmatch(r"\s*(.*?)(\w+)\s*", text, re.S).groups()
        return re.sub(r"\s+", " ", kind).strip(), name

    def ctype(self, kind):
        return ctypes.c_void_p if "*" in kind or kind in getattr(self, "callbacks", ()) else self.integers[kind]

    def callback(self, parameters):
        return ctypes.CFUNCTYPE(None, *(self.ctype(self.declaration(text)[0]) for text in parameters.split(",")))

    def struct(self, name, body):
        fields = [self.declaration(text) for text in body.split(";") if text.strip()]
        return type(name, (ctypes.Structure,), {"_fields_": [(field, self.ctype(kind)) for kind, field in fields]})

    def function(self, match):
        pairs = [] if match[3].strip() == "void" else [self.declaration(text) for text in match[3].split(",")]
        names = {name for _, name in pairs}
        parameters = tuple(Parameter(name, kind, self.role(kind, name, names)) for kind, name in pairs)
        return Function(match[2], match[1].strip(), parameters)

    def role(self, kind, name, names):
        """What a parameter is for, by its type. A type that is new here needs a role, and with it its misuses."""
        base = re.sub(r"\bconst\b|\*", "", kind).strip()
        if kind in self.callbacks:
            return "callback"
        if "*" not in kind:
            return "scalar"
        if base in self.opaque and kind.count("*") == 1:
            return "handle"
        if base in self.opaque and (kind.endswith("*const *") or f"{name[:-1]}_count" in names):
            return "handles"
        if base in self.structs and f"{name[:-1]}_count" in names:
            return "structs"
        if base in self.structs:
            return "struct" if kind.startswith("const ") else "out struct"
        simple = {"const char *": "text", "const char *const *": "texts"}
        simple |= {"const int64_t *": "array" if name == "dims" else "numbers", "const size_t *": "lengths"}
        simple |= dict.fromkeys(["const uint64_t *", "const uint32_t *", "const float *", "float *"], "numbers")
        simple |= dict.fromkeys(["void *", "const void *", "char *"], "memory")
        if kind in simple:
            return simple[kind]
        if base in self.opaque or kind.count("*") == 2 or base in self.integers and not kind.startswith("const "):
            return "out"
        raise AssertionError(f"what is a parameter of the type {kind} for?")


HEADER = Header((ROOT / "include/pagoda.h").read_text())
FUNCTIONS = HEADER.functions
EXPORTS = (ROOT / "tests/exports.txt").read_text().split()
assert sorted(FUNCTIONS) == sorted(EXPORTS), sorted(set(FUNCTIONS) ^ set(EXPORTS))
globals().update(HEADER.constants)
OK = HEADER.constants["PAGODA_STATUS_OK"]


# ---- the library -------------------------------------------------------------------------------------------------


class Failure(Exception):
    def __init__(self, status, code, message, argument):
        super().__init__(f"{status}: {message}")
        self.status, self.code, self.message, self.argument = status, code, message, argument


class Pagoda:
    """The library. Pointers and handles are plain numbers here, so that any number at all can be passed."""

    def __init__(self):
        self.library = ctypes.CDLL(str(ROOT / "target/release/libpagoda.so"))
        for function in FUNCTIONS.values():
            foreign = getattr(self.library, function.name)
            foreign.argtypes = [HEADER.ctype(parameter.type) for parameter in function.parameters]
            foreign.restype = ctypes.c_char_p if "*" in function.result else HEADER.integers[function.result]

    def raw(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def live(self):
        return self.raw("pagoda_live_objects")

    def take_error(self, status, handle):
        """An error as an exception, and the handle is freed."""
        texts = [self.raw(f"pagoda_error_{part}", handle).decode() for part in ("message", "argument")]
        failure = Failure(status, self.raw("pagoda_error_status", handle), *texts)
        assert self.raw("pagoda_error_free", handle) == OK
        return failure

    def call(self, name, *arguments):
        """Calls a function that hands out errors; raises them."""
        error = ctypes.c_void_p()
        status = self.raw(name, *arguments, ctypes.addressof(error))
        if status != OK:
            raise self.take_error(status, error.value)

    def make(self, name, *arguments):
        """Calls a function whose last output is a handle."""
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.addressof(handle))
        return handle.value

    def free(self, kind, handle):
        assert self.raw(f"{kind}_free", handle) == OK, f"{kind} {handle:#x} could not be freed"

    def open(self, model, threads=1):
        options = good_options(threads)
        return self.make("pagoda_model_open_memory", address(model), len(model), ctypes.addressof(options))

    def borrow(self, array):
        """A tensor over the memory of `array`, which must outlive it."""
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        memory = array.ctypes.data, array.nbytes, None, None
        return self.make("pagoda_tensor_borrow", number_of(array.dtype), address(dims), array.ndim, *memory)

    def read(self, tensor):
        """A copy of a tensor."""
        kind, rank, size = ctypes.c_int32(), ctypes.c_size_t(), ctypes.c_size_t()
        dims, data = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("pagoda_tensor_type", tensor, ctypes.addressof(kind))
        self.call("pagoda_tensor_dims", tensor, ctypes.addressof(dims), ctypes.addressof(rank))
        self.call("pagoda_tensor_data", tensor, ctypes.addressof(data), ctypes.addressof(size))
        shape = (ctypes.c_int64 * rank.value).from_address(dims.value)[:] if rank.value else []
        return np.frombuffer(ctypes.string_at(data.value, size.value), TYPES[kind.value]).reshape(shape)

    def run(self, model, inputs, outputs, cancel=None):
        """Runs `model` and gives new tensors. Inputs by name: tensors or arrays; outputs: tensors, arrays or None."""
        borrowed = []

        def handle(value):
            if isinstance(value, np.ndarray):
                borrowed.append(value := self.borrow(value))
            return value

        try:
            ins = (ctypes.c_void_p * len(inputs))(*map(handle, inputs.values()))
            outs = (ctypes.c_void_p * len(outputs))(*map(handle, outputs.values()))
            names = texts(inputs), texts(outputs)
            given = address(names[0]), address(ins), len(ins), address(names[1]), address(outs), len(outs), cancel
            self.call("pagoda_model_run", model, *given)
            return [made for made, asked in zip(outs, outputs.values()) if asked is None]
        finally:
            for tensor in borrowed:
                self.free("pagoda_tensor", tensor)


def address(memory):
    """Where a ctypes array or bytes lie."""
    return ctypes.cast(memory, ctypes.c_void_p).value if isinstance(memory, bytes) else ctypes.addressof(memory)


def texts(values):
    """A list of C strings."""
    return (ctypes.c_char_p * max(len(values), 1))(*(v.encode() if isinstance(v, str) else v for v in values))


def good_options(threads=1):
    return struct("pagoda_model_options", intra_op_threads=threads, provider=HEADER.constants["PAGODA_PROVIDER_CPU"])


def struct(kind, **fields):
    """A struct of the header, its size set; everything else is 0 unless given."""
    made = HEADER.structs[kind](**fields)
    made.struct_size = ctypes.sizeof(made)
    return made


def initialised(kind, **fields):
    """A struct of the header as its INIT makes it, with the fields given instead."""
    made = struct(kind)
    names = [name for name, _ in made._fields_[1:]]
    for name, value in zip(names, HEADER.inits[kind], strict=True):
        setattr(made, name, fields.get(name, value))
    assert not set(fields) - set(names), f"{kind} has no {set(fields) - set(names)}"
    return made


def structs(kind, elements):
    """An array of them."""
    return (HEADER.structs[kind] * max(len(elements), 1))(*(struct(kind, **fields) for fields in elements))


def until(condition, what):
    """Waits for what another thread does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.001)


def graph(nodes, inputs, outputs):
    """The bytes of a model. Inputs and outputs: name → (ONNX type, dimensions)."""
    values = [[helper.make_tensor_value_info(name, *what) for name, what in side.items()] for side in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.pagoda", 1)]
    made = helper.make_model(helper.make_graph(nodes, "test", *values), opset_imports=opsets, ir_version=10)
    return made.SerializeToString()


def add_model():
    """z = x + y, with a free and a fixed dimension."""
    value = (TensorProto.FLOAT, ["N", 2])
    return graph([helper.make_node("Add", ["x", "y"], ["z"])], {"x": value, "y": value}, {"z": value})


# ---- good calls --------------------------------------------------------------------------------------------------


class World:
    """What good calls are made of: a model, tensors, texts. One for a process."""

    def __init__(self, pagoda, folder):
        self.pagoda, self.root = pagoda, folder
        self.log, self.released, self.finished = [], [], []
        self.owners = 100
        self.done = threading.Event()
        self.on_log = HEADER.callbacks["pagoda_log_callback"](self.logged)
        self.on_release = HEADER.callbacks["pagoda_release_callback"](lambda user_data: self.released.append(user_data))
        self.on_done = HEADER.callbacks["pagoda_run_callback"](self.run_done)
        self.on_ranked = HEADER.callbacks["pagoda_rank_callback"](self.rank_done)
        self.tokens = []
        self.on_token = HEADER.callbacks["pagoda_token_callback"](lambda user_data, token: self.tokens.append(token))
        self.on_generated = HEADER.callbacks["pagoda_generate_callback"](self.generate_done)
        self.bytes = add_model()
        self.path = Path(folder) / "add.onnx"
        self.path.write_bytes(self.bytes)
        self.set_log()
        self.model = self.fresh("pagoda_model")
        self.x, self.y = (self.fresh("pagoda_tensor") for _ in "xy")
        dims, words = (ctypes.c_int64 * 1)(2), texts(["pagoda", "塔"])
        self.strings = pagoda.make("pagoda_tensor_new_strings", address(words), None, 2, address(dims), 1)
        self.table, self.models = write_table(Path(folder)), 0
        self.embedding = self.fresh("pagoda_embeddings")
        self.store = self.fresh("pagoda_store")
        self.cache = self.fresh("pagoda_kv_cache")
        self.engine = self.fresh("pagoda_engine")
        self.generator = self.fresh("pagoda_generator")
        self.stepped = self.fresh("pagoda_generator", driver=HEADER.constants["PAGODA_DRIVER_CALLER"])
        self.response = self.fresh("pagoda_generate_response")
        # What the functions that do not free are called with.
        self.shared = {"pagoda_tensor": self.x, "pagoda_model": self.model}
        self.shared |= {"pagoda_store": self.store, "pagoda_kv_cache": self.cache}
        self.shared |= {"pagoda_embeddings": self.embedding, "pagoda_engine": self.engine}
        self.shared |= {"pagoda_generator": self.generator, "pagoda_generate_response": self.response}

    def logged(self, user_data, level, source, message):
        self.log.append(ctypes.string_at(message).decode())

    def run_done(self, user_data, status, outputs, count, error):
        handles = (ctypes.c_void_p * count).from_address(outputs)[:] if count else []
        self.finished.append((status, handles))
        self.done.set()

    def rank_done(self, user_data, status, scores, count, response, error):
        numbers = (ctypes.c_float * count).from_address(scores)[:] if count else []
        self.finished.append((status, numbers))
        self.done.set()

    def generate_done(self, user_data, status, response, error):
        self.finished.append((status, [response] if response else []))
        self.done.set()

    def set_log(self):
        self.pagoda.call("pagoda_log_set", HEADER.constants["PAGODA_LOG_LEVEL_ERROR"], self.on_log, None)

    def fresh(self, kind, **options):
        """A new handle."""
        pagoda = self.pagoda
        if kind == "pagoda_error":
            error = ctypes.c_void_p()
            pagoda.raw("pagoda_abi_check", 99, ctypes.addressof(error))
            return error.value
        if kind == "pagoda_cancel":
            return pagoda.make("pagoda_cancel_new")
        if kind == "pagoda_tensor":
            dims = (ctypes.c_int64 * 2)(2, 2)
            return pagoda.make("pagoda_tensor_new", 1, address(dims), 2)
        if kind == "pagoda_store":
            path = self.folder()
            return pagoda.make("pagoda_store_open", address(path), None)
        if kind == "pagoda_kv_cache":
            options = kv_options(self.store)
            return pagoda.make("pagoda_kv_cache_open", address(options))
        if kind == "pagoda_kv_lease":
            # Of an owner of its own, so that any number can be held at the same time.
            self.owners += 1
            requests = structs("pagoda_kv_request", [{"owner": self.owners, "tokens": 3, "candidates": 2}])
            return pagoda.make("pagoda_kv_cache_prepare", self.cache, address(requests), 1)
        if kind == "pagoda_embeddings":
            path = ctypes.create_string_buffer(str(self.table).encode())
            return pagoda.make("pagoda_embeddings_open", address(path))
        if kind == "pagoda_engine":
            folder, options = ctypes.create_string_buffer(str(ENGINE).encode()), engine_options()
            return pagoda.make("pagoda_engine_open", address(folder), address(options))
        if kind == "pagoda_generator":
            folder, options = ctypes.create_string_buffer(str(LLAMA).encode()), generator_options(**options)
            return pagoda.make("pagoda_generator_open", address(folder), address(options))
        if kind == "pagoda_generate_response":
            request = generate_request(logprobs=2, prompt_logprobs=2)
            return pagoda.make("pagoda_generator_generate", self.generator, address(request))
        assert kind == "pagoda_model", f"how is a {kind} made?"
        return pagoda.open(self.bytes)

    def new_model(self):
        """The JSON of a model with tables, under a name that no other has."""
        self.models += 1
        table = str(self.table.parent / "t.npy")
        return {**table_model("t"), "sparse_files": [table], "model": f"n{self.models}"}

    def added_model(self):
        """The name of a model that is there."""
        model = self.new_model()
        texts = [ctypes.create_string_buffer(text.encode()) for text in (json.dumps(model), str(self.table.parent))]
        self.pagoda.call("pagoda_embeddings_add", self.embedding, *map(address, texts))
        return ctypes.create_string_buffer(model["model"].encode())

    def folder(self):
        """The path of an empty folder."""
        return ctypes.create_string_buffer(tempfile.mkdtemp(dir=self.root).encode())

    def close(self):
        others = [("pagoda_tensor", self.y), ("pagoda_tensor", self.strings), ("pagoda_generator", self.stepped)]
        for kind, handle in [*self.shared.items(), *others]:
            self.pagoda.free(kind, handle)


def table_model(*tables):
    """The configuration of a model with these tables, each of rows of three numbers."""
    each = len(tables)
    return {
        "model": "m",
        "sparse_files": [f"{table}.npy" for table in tables],
        "embedding_table_names": list(tables),
        "embedding_vecsize_per_table": [3] * each,
        "default_value_for_each_table": [[-1, -2, -3]] * each,
        "gpucacheper": 0.5,
    }


def write_table(folder):
    """A table of 4 rows with the keys 0 to 3; gives the path of a configuration."""
    np.save(folder / "t.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    path = folder / "tables.json"
    path.write_text(json.dumps({"models": [table_model("t")]}))
    return path


VERSIONS = []


def kv_options(store=None, **fields):
    """Options of a small cache, of a version of its own: a second of the same would not be let to the store."""
    shape = {"layers": 2, "heads": 2, "head_size": 4, "page_size": 8, "type": 1, "device_id": -1}
    shape |= {"size_unit": HEADER.constants["PAGODA_KV_SIZE_UNIT_PAGES"], "size": 64}
    # Kept, for copies of the options have only its address.
    VERSIONS.append(ctypes.create_string_buffer(str(len(VERSIONS)).encode()))
    return struct("pagoda_kv_options", store=store, model_version=address(VERSIONS[-1]), **shape | fields)


# Small models, and what requests and options point to: copies of those have only addresses.
ENGINE = ROOT / "tests/data/engine/bag"
LLAMA = ROOT / "tests/data/generate/llama"
POINTED_TO = []


def pointed_to(memory):
    POINTED_TO.append(memory)
    return address(memory)


def engine_options(**fields):
    """Options of an engine on one thread with a few pages."""
    model = pointed_to(good_options())
    limits = {"instances": 1, "max_batch": 4, "max_batch_rows": 100, "queue": 10, "ahead_percent": 12}
    limits |= {"kv_size_unit": HEADER.constants["PAGODA_KV_SIZE_UNIT_PAGES"], "kv_size": 64}
    return struct("pagoda_engine_options", **limits | {"model": model} | fields)


def rank_request(user=1, **fields):
    """A request with two events and three candidates for the model above."""

    def columns(what, keys, count):
        lists = [pointed_to((ctypes.c_int64 * len(keys[name]))(*keys[name])) for name in keys]
        return {
            f"{what}_count": count,
            f"{what}_feature_count": len(keys),
            f"{what}_features": pointed_to(texts(list(keys))),
            f"{what}_keys": pointed_to((ctypes.c_void_p * len(lists))(*lists)),
        }

    made = columns("event", {"item": [3, 7], "genre": [1, 0], "rating": [4, 2]}, 2)
    made |= {"event_times": pointed_to((ctypes.c_int64 * 2)(1_700_000_000, 1_700_001_000))}
    made |= columns("candidate", {"item": [5, 6, 39], "genre": [5, 9, -1]}, 3)
    own = {"user_feature_count": 2, "user_features": pointed_to(texts(["age", "town"]))}
    made |= own | {"user_keys": pointed_to((ctypes.c_int64 * 2)(6, 8))}
    made |= {"start": -1, "has_time": 1, "time": 1_700_002_000}
    return struct("pagoda_rank_request", user=user, **made | fields)


def generator_options(**fields):
    """Options of a generator on one thread with a few pages."""
    limits = {"max_batch": 4, "queue": 10, "model": pointed_to(good_options())}
    limits |= {"kv_size_unit": HEADER.constants["PAGODA_KV_SIZE_UNIT_PAGES"], "kv_size": 64}
    return initialised("pagoda_generator_options", **limits | fields)


def generate_request(tokens=(5, 6), **fields):
    """A request for the two most likely tokens after two others. `tokens` None: the fields have a prompt."""
    made = {"do_sample": 0, "ignore_eos": 1, "max_new_tokens": 2}
    if tokens is not None:
        made |= {"tokens": pointed_to((ctypes.c_uint32 * max(len(tokens), 1))(*tokens)), "token_count": len(tokens)}
    return initialised("pagoda_generate_request", **made | fields)


def sentinels(size):
    return (ctypes.c_uint8 * size)(*[SENTINEL] * size)


# A good value for each scalar, text, array, memory and callback, by type and name, or by function and name where that
# is not enough; `Call` makes the others by role.
GOOD = {
    "pagoda_status status": lambda world: 1,
    "uint32_t header_version": lambda world: HEADER.constants["PAGODA_ABI_VERSION"],
    "pagoda_log_level level": lambda world: HEADER.constants["PAGODA_LOG_LEVEL_ERROR"],
    "pagoda_log_callback callback": lambda world: world.on_log,
    "pagoda_release_callback release": lambda world: world.on_release,
    "pagoda_run_callback callback": lambda world: world.on_done,
    "void * user_data": lambda world: None,
    "char * buffer": lambda world: sentinels(1 << 16),
    "size_t capacity": lambda world: 1 << 16,
    "pagoda_element_type type": lambda world: HEADER.constants["PAGODA_ELEMENT_TYPE_F32"],
    "const int64_t * dims": lambda world: (ctypes.c_int64 * 2)(2, 2),
    "size_t rank": lambda world: 2,
    "void * data": lambda world: (ctypes.c_double * 8)(),
    "size_t bytes": lambda world: 16,
    "const char *const * values": lambda world: texts(["a", "", "塔", "d"]),
    "const size_t * lengths": lambda world: None,
    "size_t count": lambda world: 4,
    "size_t index": lambda world: 0,
    "const char * path": lambda world: ctypes.create_string_buffer(str(world.path).encode()),
    "const void * bytes": lambda world: ctypes.create_string_buffer(world.bytes, len(world.bytes)),
    "size_t size": lambda world: len(world.bytes),
    "const pagoda_model_options * options": lambda world: good_options(),
    "const char *const * input_names": lambda world: texts("xy"),
    "pagoda_tensor *const * inputs": lambda world: (ctypes.c_void_p * 2)(world.x, world.y),
    "size_t input_count": lambda world: 2,
    "const char *const * output_names": lambda world: texts("z"),
    "pagoda_tensor ** outputs": lambda world: (ctypes.c_void_p * 1)(),
    "pagoda_tensor *const * outputs": lambda world: (ctypes.c_void_p * 1)(),
    "size_t output_count": lambda world: 1,
    "const pagoda_store_options * options": lambda world: struct("pagoda_store_options"),
    "const pagoda_kv_options * options": lambda world: kv_options(world.store),
    "int32_t layer": lambda world: 1,
    "const uint64_t * users": lambda world: (ctypes.c_uint64 * 2)(1, 2),
    "size_t user_count": lambda world: 2,
    "const uint64_t * owners": lambda world: (ctypes.c_uint64 * 2)(1, 2),
    "size_t owner_count": lambda world: 2,
    "uint64_t from": lambda world: 1,
    "uint64_t to": lambda world: 2,
    "int32_t tokens": lambda world: 8,
    "pagoda_tiers tiers": lambda world: HEADER.constants["PAGODA_TIERS_ALL"],
    "const pagoda_kv_request * requests": lambda world: structs(
        "pagoda_kv_request", [{"owner": owner, "tokens": 3, "candidates": 2} for owner in (7, 8)]
    ),
    "size_t request_count": lambda world: 2,
    "pagoda_kv_tensor which": lambda world: HEADER.constants["PAGODA_KV_TENSOR_PAGE_IDS"],
    "int32_t wait": lambda world: 1,
    ("pagoda_store_open", "path"): lambda world: world.folder(),
    ("pagoda_embeddings_open", "path"): lambda world: ctypes.create_string_buffer(str(world.table).encode()),
    ("pagoda_embeddings_estimate", "path"): lambda world: ctypes.create_string_buffer(str(world.table).encode()),
    "const char * table": lambda world: ctypes.create_string_buffer(b"m/t"),
    "const char * model": lambda world: ctypes.create_string_buffer(json.dumps(world.new_model()).encode()),
    ("pagoda_embeddings_retire", "model"): lambda world: world.added_model(),
    "const char * folder": lambda world: ctypes.create_string_buffer(str(world.table.parent).encode()),
    "const int64_t * keys": lambda world: (ctypes.c_int64 * 3)(1, -7, 1),
    "size_t key_count": lambda world: 3,
    "const int64_t * offsets": lambda world: (ctypes.c_int64 * 4)(0, 2, 2, 3),
    "size_t offset_count": lambda world: 4,
    "pagoda_combiner combiner": lambda world: HEADER.constants["PAGODA_COMBINER_MEAN"],
    "const pagoda_lookup_options * options": lambda world: struct("pagoda_lookup_options"),
    "float * numbers": lambda world: (ctypes.c_float * 9)(),
    "float * vectors": lambda world: (ctypes.c_float * 9)(),
    "const float * numbers": lambda world: (ctypes.c_float * 9)(),
    "size_t number_count": lambda world: 9,
    "uint64_t version": lambda world: 1,
    "const pagoda_engine_options * options": lambda world: engine_options(),
    "const pagoda_rank_request * request": lambda world: rank_request(),
    "pagoda_rank_callback callback": lambda world: world.on_ranked,
    "float * scores": lambda world: (ctypes.c_float * 6)(),
    "size_t score_count": lambda world: 6,
    ("pagoda_engine_open", "folder"): lambda world: ctypes.create_string_buffer(str(ENGINE).encode()),
    ("pagoda_engine_get_table_stats", "table"): lambda world: ctypes.create_string_buffer(b"items"),
    ("pagoda_engine_swap", "folder"): lambda world: ctypes.create_string_buffer(str(ENGINE).encode()),
    "pagoda_reach reach": lambda world: HEADER.constants["PAGODA_REACH_AT_ONCE"],
    "const pagoda_generator_options * options": lambda world: generator_options(),
    ("pagoda_generator_open", "folder"): lambda world: ctypes.create_string_buffer(str(LLAMA).encode()),
    "const pagoda_generate_request * request": lambda world: generate_request(),
    "pagoda_token_callback token_callback": lambda world: world.on_token,
    "pagoda_generate_callback callback": lambda world: world.on_generated,
    "const uint32_t * tokens": lambda world: (ctypes.c_uint32 * 3)(5, 6, 7),
    "size_t token_count": lambda world: 3,
    "int32_t skip_special": lambda world: 1,
    "int32_t on": lambda world: 1,
    "int32_t clear": lambda world: 0,
    # As many tokens as the 16 bytes of an output have room for.
    ("pagoda_generator_tokenize", "capacity"): lambda world: 4,
    "const char *const * sessions": lambda world: texts(["a", "b"]),
    "size_t session_count": lambda world: 2,
    "int32_t stored": lambda world: 1,
    "size_t choice": lambda world: 0,
}


class Call:
    """A good call of a function, to be made as it is or after something in it was spoilt."""

    def __init__(self, world, function):
        self.world, self.function = world, function
        self.values, self.memory, self.owned = {}, {}, []
        for parameter in function.parameters:
            self.set(parameter.name, self.good(parameter))

    def good(self, parameter):
        if parameter.role == "handle":
            return self.handle(parameter.kind)
        if parameter.role == "out":
            return sentinels(16)
        if parameter.role == "out struct":
            # With room behind it, to see that nothing is written there.
            memory = sentinels(ctypes.sizeof(HEADER.structs[parameter.kind]) + 16)
            ctypes.c_uint32.from_buffer(memory).value = ctypes.sizeof(HEADER.structs[parameter.kind])
            return memory
        here, anywhere = (self.function.name, parameter.name), str(parameter)
        assert anywhere in GOOD, f"{self.function.name}: what is a good `{parameter}`? Add it to GOOD in capi.py"
        return GOOD.get(here, GOOD[anywhere])(self.world)

    def handle(self, kind):
        if kind in self.world.shared and not self.function.name.endswith("_free"):
            others = {"pagoda_tensor_string": self.world.strings, "pagoda_generator_step": self.world.stepped}
            return others.get(self.function.name, self.world.shared[kind])
        return self.own(kind, self.world.fresh(kind))

    def own(self, kind, handle):
        self.owned.append((kind, handle))
        return handle

    def set(self, name, value):
        """Sets an argument to a number, a callback, or the address of some memory."""
        self.memory.pop(name, None)
        if isinstance(value, (ctypes.Array, ctypes.Structure)):
            self.memory[name] = value
            value = ctypes.addressof(value)
        elif value is not None and not isinstance(value, int):
            self.memory[name], value = value, ctypes.cast(value, ctypes.c_void_p).value
        self.values[name] = value

    def make(self):
        return self.world.pagoda.raw(self.function.name, *(self.values[p.name] for p in self.function.parameters))

    def snapshot(self):
        """Everything that the function can reach but for the error."""
        plain = (ctypes.Array, ctypes.Structure)
        return {name: bytes(m) for name, m in self.memory.items() if isinstance(m, plain) and name != "error"}

    def error(self):
        """The error handed out; None if that place was not written to."""
        handle = ctypes.c_uint64.from_buffer(self.memory["error"]).value
        return None if bytes(self.memory["error"]) == bytes(sentinels(16)) else handle

    def clean(self, succeeded):
        """Frees what the call made and what was made for it."""
        pagoda, function = self.world.pagoda, self.function
        if succeeded and function.has("callback") and (function.has("outputs") or function.has("request")):
            assert self.world.done.wait(30), "the callback was not called"
            self.world.done.clear()
            status, made = self.world.finished.pop()
            assert status == OK
            if function.has("outputs"):
                self.owned += [("pagoda_tensor", handle) for handle in made]
            elif function.has("token_callback"):
                assert len(made) == 1 and len(self.world.tokens) == (2 if self.values["token_callback"] else 0)
                self.world.tokens.clear()
                self.owned += [("pagoda_generate_response", handle) for handle in made]
            else:
                assert len(made) == 6 and all(map(math.isfinite, made))
        for parameter in function.parameters if succeeded else ():
            made = parameter.role in ("out", "handles") and parameter.type.endswith("**") and parameter.name != "error"
            if made and parameter.kind in HEADER.opaque:
                self.own(parameter.kind, ctypes.c_uint64.from_buffer(self.memory[parameter.name]).value)
        for kind, handle in self.owned:
            if not (succeeded and function.name == f"{kind}_free"):
                pagoda.free(kind, handle)
