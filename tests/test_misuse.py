"""Nothing that a caller can pass crashes the library: every exported function, every way to misuse each of its
parameters, in the build with checks and in the one that is shipped."""

import ctypes
import subprocess
import sys

import capi
import numpy as np
import pytest
from capi import FUNCTIONS, HEADER, OK, Call, address, sentinels, texts
from conftest import trying

C = HEADER.constants
INVALID_ARGUMENT, INVALID_HANDLE = C["PAGODA_INVALID_ARGUMENT"], C["PAGODA_INVALID_HANDLE"]
SIZE_MAX, INT_MIN, INT_MAX = 2**64 - 1, -(2**31), 2**31 - 1
NOT_UTF8 = b"caf\xe9"

# What may be NULL; the handles of _free too.
NULL_IS_FINE = {"options", "user_data", "release", "error"}
NULL_IS_FINE_IN = {
    ("pagoda_model_run", "cancel"),
    ("pagoda_model_run_async", "cancel"),
    ("pagoda_log_set", "callback"),
    ("pagoda_tensor_new_strings", "lengths"),
}

# Functions without an error, and what they return for a handle that is not one.
ODD_RESULTS = {"pagoda_error_code": INVALID_HANDLE, "pagoda_error_message": b"", "pagoda_error_argument": b""}
ODD_RESULTS["pagoda_type_name"] = b"undefined"


class Case:
    def __init__(self, what, spoil, status=INVALID_ARGUMENT, argument=None):
        self.what, self.spoil, self.status, self.argument = what, spoil, status, argument


def fine(function, parameter):
    freed = parameter.role == "handle" and function.name.endswith("_free")
    named = parameter.role != "handle" and parameter.name in NULL_IS_FINE
    return freed or named or (function.name, parameter.name) in NULL_IS_FINE_IN


def setting(parameter, value):
    return lambda call: call.set(parameter.name, value)


def element(name, index, value):
    """Puts another element into a list."""

    def spoil(call):
        call.memory[name][index] = value

    return spoil


def field(name, field, value):
    """Sets a field of a struct; memory that it points to lives as long as the call."""

    def spoil(call):
        struct = call.memory[name]
        if isinstance(value, bytes):
            call.memory[f"{name}.{field}"] = text = ctypes.create_string_buffer(value)
            setattr(struct, field, address(text))
        elif isinstance(struct, ctypes.Structure):
            setattr(struct, field, value)
        else:
            ctypes.c_uint32.from_buffer(struct).value = value

    return spoil


# ---- what can be wrong with a parameter, by its role -------------------------------------------------------------


def bad_handles(world, kind):
    """Numbers that are not handles of `kind`, each with why."""
    freed = world.fresh(kind)
    world.pagoda.free(kind, freed)
    yield "freed", freed
    live = world.keep(kind)
    for bit in [*range(8), 31, *range(32, 64)]:  # Another bit of the place in the table may make another good handle.
        yield f"bit {bit} flipped", live ^ 1 << bit
    for other in sorted(HEADER.opaque - {kind}):
        yield f"a {other}", world.keep(other)
    for forged in (1, 8, 0xDEADBEEF, SIZE_MAX):
        yield f"forged {forged:#x}", forged
    yield "an address", ctypes.addressof(world.heap)


def by_role(world, function, p):
    if p.role == "handle":
        for what, handle in bad_handles(world, p.kind):
            yield Case(what, setting(p, handle), INVALID_HANDLE)
        if not fine(function, p):
            yield Case("NULL", setting(p, None), INVALID_HANDLE)
    elif p.role == "scalar":
        assert str(p) in SCALARS or (function.name, p.name) in SCALARS, f"{function.name}: how can `{p}` be misused?"
        for value, status, *argument in SCALARS.get((function.name, p.name)) or SCALARS[str(p)]:
            yield Case(str(value), setting(p, value), status, *argument)
    elif not fine(function, p):
        yield Case("NULL", setting(p, None))
    if p.role == "handles":
        count = 2 if p.name == "inputs" else 1
        for index in range(count):
            for what, handle in bad_handles(world, "pagoda_tensor"):
                yield Case(f"[{index}] {what}", element(p.name, index, handle), INVALID_HANDLE, f"{p.name}[{index}]")
            for what, handle in world.unfit.items():
                yield Case(f"[{index}] {what}", element(p.name, index, handle), argument=f"{p.name}[{index}]")
        if p.name == "inputs":
            yield Case("[1] NULL", element(p.name, 1, None), INVALID_HANDLE, "inputs[1]")
    elif p.role == "texts":
        for what, text in ("NULL", None), ("not UTF-8", NOT_UTF8):
            yield Case(f"[0] {what}", element(p.name, 0, text), argument=f"{p.name}[0]")
        if p.name.endswith("_names"):
            not_found = C["PAGODA_NOT_FOUND"]
            yield Case("[0] unknown", element(p.name, 0, b"nothing"), not_found, f"{p.name}[0]")
            yield Case("[0] empty", element(p.name, 0, b""), not_found, f"{p.name}[0]")
        if p.name == "input_names":
            yield Case("twice", element(p.name, 1, b"x"), argument="input_names[1]")
    elif p.role == "text":
        yield Case("not UTF-8", setting(p, ctypes.create_string_buffer(NOT_UTF8)))
    elif p.role == "array":
        yield from bad_dims(function, p)
    elif p.role == "lengths":
        for what, lengths, at in ("too long", [SIZE_MAX, 0, 3, 1], 0), ("cuts a character", [1, 0, 2, 1], 2):
            yield Case(what, setting(p, (ctypes.c_size_t * 4)(*lengths)), argument=f"values[{at}]")
    elif p.role in ("struct", "out struct"):
        size = ctypes.sizeof(HEADER.structs[p.kind])
        for wrong in (0, 4, size - 1, 4097, 0xA5A5A5A5, 2**32 - 1):
            yield Case(f"size {wrong}", field(p.name, "struct_size", wrong), argument=f"{p.name}.struct_size")


def bad_dims(function, p):
    shapes = [[-1, 2], [2, -1], [-(2**63), 1], [-2, -2], [2**62, 4], [2**40, 2**40], [2**62, 4, 0], [0, 2**40, 2**40]]
    for shape in shapes:

        def spoil(call, shape=shape):
            call.set(p.name, (ctypes.c_int64 * len(shape))(*shape))
            call.set("rank", len(shape))

        axis = next((axis for axis, dim in enumerate(shape) if dim < 0), None)
        yield Case(str(shape), spoil, argument="dims" if axis is None else f"dims[{axis}]")


# Scalars that can not be used: value, status, and the argument named where that is another one.
FIRST = INVALID_ARGUMENT
SCALARS = {
    "uint32_t header_version": [(v, C["PAGODA_UNSUPPORTED"]) for v in (0, 2, 2**32 - 1)],
    "pagoda_log_level level": [(v, FIRST) for v in (-1, 6, INT_MIN, INT_MAX)],
    "pagoda_type type": [(v, FIRST) for v in (-1, 0, 27, 1000, INT_MIN)],
    "size_t capacity": [(v, C["PAGODA_CAPACITY"]) for v in (0, 1, 10)],
    "size_t rank": [(v, FIRST) for v in (65, 2**32, 2**63, SIZE_MAX)],
    "size_t bytes": [(v, FIRST) for v in (0, 15)],
    "size_t count": [(v, FIRST) for v in (0, 3, 5, SIZE_MAX)],
    "size_t index": [(v, FIRST) for v in (2, 1000, 2**63, SIZE_MAX)],
    "size_t size": [(0, FIRST, "bytes"), (SIZE_MAX, FIRST, "bytes"), (20, C["PAGODA_MODEL"], "bytes")],
    "size_t input_count": [(v, FIRST) for v in (65537, 2**63, SIZE_MAX)] + [(v, FIRST, "input_names") for v in (0, 1)],
    "size_t output_count": [(v, FIRST) for v in (65537, 2**63, SIZE_MAX)] + [(0, FIRST, "output_names")],
    "pagoda_status status": [],  # Every number has a name; see below.
}


def by_name(world, function, p):
    """What only this parameter can have wrong."""
    if p.kind == "pagoda_model_options":
        wrong = {"provider": (-1, 3, INT_MIN), "optimization": (-1, 4, INT_MAX), "device_id": (-1, INT_MIN)}
        wrong |= {"sleep_when_idle": (2, -1), "intra_op_threads": (-1, INT_MIN, 1025, INT_MAX)}
        wrong |= dict.fromkeys(["onnxruntime_path", "profile_path"], (NOT_UTF8,))
        for name, values in wrong.items():
            for value in values:
                yield Case(f"{name} {value}", field(p.name, name, value), argument=f"options.{name}")
        for name in "onnxruntime_path", "profile_path":  # Another ONNX Runtime than before, and no place to write to.
            yield Case(f"{name} nowhere", field(p.name, name, b"/nowhere/file"), argument=f"options.{name}")

        def later(call):  # A later version of the struct, with a field that this library does not know.
            size = ctypes.sizeof(call.memory["options"])
            longer = (ctypes.c_uint8 * (size + 8))(*bytes(call.memory["options"]), *[1] * 8)
            ctypes.c_uint32.from_buffer(longer).value = size + 8
            call.set("options", longer)

        yield Case("a field unknown here", later, C["PAGODA_UNSUPPORTED"], "options")
    if str(p) == "pagoda_type type" and function.has("data"):
        yield Case("strings", setting(p, C["PAGODA_TYPE_STRING"]))
    if str(p) == "void * data":
        for offset, kind in (1, "F32"), (2, "F32"), (1, "BF16"), (4, "F64"):

            def misaligned(call, offset=offset, kind=kind):
                call.set("bytes", 32)
                call.set("type", C[f"PAGODA_TYPE_{kind}"])
                call.values["data"] += offset

            yield Case(f"{kind} at an address + {offset}", misaligned)
    if str(p) == "const char * path":
        files = {"a folder": (world.path.parent, FIRST), "not there": ("/nowhere/m.onnx", C["PAGODA_NOT_FOUND"])}
        files |= {"empty": ("", C["PAGODA_INVALID_ARGUMENT"]), "not a model": (__file__, C["PAGODA_MODEL"])}
        files |= {"an empty file": ("/dev/null", C["PAGODA_MODEL"])}
        for what, (path, status) in files.items():
            yield Case(what, setting(p, ctypes.create_string_buffer(str(path).encode())), status)
    if str(p) == "const void * bytes":

        def graphless(call):  # Well-formed, but a version number is all there is.
            call.set("bytes", ctypes.create_string_buffer(b"\x08\x0a"))
            call.set("size", 2)

        yield Case("no graph", graphless, C["PAGODA_MODEL"])
    if function.name == "pagoda_tensor_string" and p.name == "tensor":
        yield Case("of numbers", setting(p, world.x))
    if function.name == "pagoda_tensor_data" and p.name == "tensor":
        yield Case("of strings", setting(p, world.strings), C["PAGODA_UNSUPPORTED"])


# ---- trying them, in the other process ---------------------------------------------------------------------------


def world():
    """The world of this process, with what misuse needs besides."""
    world = capi.world
    if not hasattr(world, "unfit"):
        world.heap = ctypes.create_string_buffer(64)
        world.kept = {kind: world.fresh(kind) for kind in sorted(HEADER.opaque)}
        world.keep = world.kept.__getitem__
        # Tensors that neither an input nor the output of the model can be.
        unfit = {"wrong type": (6, [2, 2]), "wrong shape": (1, [2, 3]), "wrong rank": (1, [2]), "of f64": (11, [2, 2])}
        unfit |= {"a scalar": (1, []), "of strings": (8, [2, 2])}
        world.unfit = {}
        for what, (kind, shape) in unfit.items():
            dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
            world.unfit[what] = world.pagoda.make("pagoda_tensor_new", kind, address(dims), len(shape))
    return world


def refused(case, function, parameter):
    """Makes a spoilt call and says what is not as it should be."""
    here, pagoda = capi.world, capi.pagoda
    live, argument = pagoda.live(), case.argument or parameter.name
    call = Call(here, function)
    case.spoil(call)
    before, of_error = call.snapshot(), bytes(call.memory["error"])
    status = call.make()
    if status == OK:
        call.clean(True)
        return "it was not refused"
    wrong = [f"{name} was written to" for name, memory in call.snapshot().items() if memory != before[name]]
    if bytes(call.memory["error"])[8:] != of_error[8:] or call.error() is None:
        return f"status {status}, and no proper error"
    failure = pagoda.take_error(status, call.error())
    if (status, failure.code) != (case.status, status):
        wrong.append(f"status {status}, code {failure.code}, expected {case.status}")
    if failure.argument != argument:
        wrong.append(f"argument {failure.argument!r}, expected {argument!r}")
    if not failure.message.startswith(argument) or len(failure.message) < len(argument) + 5:
        wrong.append(f"message {failure.message!r}")
    call.set("error", None)
    if (again := call.make()) != status:
        wrong.append(f"without a place for the error the status is {again}, with one {status}")
    call.clean(False)
    if here.released or here.finished:
        wrong.append("a callback was called")
        here.released.clear(), here.finished.clear()
    if pagoda.live() != live:
        wrong.append(f"{pagoda.live() - live} objects more than before")
    return "; ".join(wrong)


def misuse(name):
    function, here, failures, count = FUNCTIONS[name], world(), [], 0
    for parameter in function.parameters:
        if str(parameter) == "pagoda_error ** error":
            continue
        for case in [*by_role(here, function, parameter), *by_name(here, function, parameter)]:
            trying(f"{name}: {parameter.name}: {case.what}")
            count += 1
            wrong = refused(case, function, parameter) if function.reports else odd(case, function, parameter)
            if wrong:
                failures.append(f"{parameter.name}: {case.what}: {wrong}")
    return failures, count


def odd(case, function, parameter):
    """The same for a function without an error."""
    here, live = capi.world, capi.pagoda.live()
    here.log.clear()
    call = Call(here, function)
    case.spoil(call)
    result = call.make()
    call.clean(False)
    if capi.pagoda.live() != live:
        return f"{capi.pagoda.live() - live} objects more than before"
    if not function.name.endswith("_free"):
        return "" if result == ODD_RESULTS[function.name] else f"{result} was returned"
    told = len(here.log) == 1 and here.log[0].startswith(f"{function.name}: {parameter.name}: ")
    return "" if result == case.status and told else f"status {result}, log {here.log}"


def good(name):
    """The call as it should be, and with everything NULL that may be."""
    function, here, failures = FUNCTIONS[name], world(), []
    may_be_null = [p.name for p in function.parameters if p.role != "scalar" and fine(function, p)]
    frees = name.endswith("_free")
    for null in [None, *may_be_null]:
        trying(f"{name}: {null} NULL")
        live = capi.pagoda.live()
        call = Call(here, function)
        if null:
            call.set(null, None)
        result, written = call.make(), call.snapshot()
        if function.result == "pagoda_status" and name not in ODD_RESULTS and result != OK:
            failures.append(f"with {null} NULL: status {result}")
        if function.reports and null != "error" and call.error() is not None:
            failures.append("the error was written to although all went well")
        for p in function.parameters:
            if p.role == "out" and p.name in written and p.name != "error" and written[p.name] == bytes(sentinels(16)):
                failures.append(f"{p.name} was not written")
        # _free(NULL) leaves what was made for the call.
        call.clean(not (frees and null))
        if capi.pagoda.live() != live:
            failures.append(f"with {null} NULL: {capi.pagoda.live() - live} objects more than before")
        here.released.clear()
    here.set_log()
    return failures


def still_well():
    """After all that: a run works, a lent buffer came back once, and nothing was left behind."""
    here, pagoda = world(), capi.pagoda
    x = np.array([[1, 2]], np.float32)
    (z,) = pagoda.run(here.model, {"x": x, "y": x}, {"z": None})
    right = pagoda.read(z).tolist() == [[2, 4]]
    pagoda.free("pagoda_tensor", z)
    call = Call(here, FUNCTIONS["pagoda_tensor_borrow"])
    call.set("user_data", 42)
    assert call.make() == OK
    before = list(here.released)
    call.clean(True)
    after = list(here.released)
    here.close()
    for kind, handle in here.kept.items():
        pagoda.free(kind, handle)
    for handle in here.unfit.values():
        pagoda.free("pagoda_tensor", handle)
    pagoda.call("pagoda_log_set", 0, None, None)
    return right, before, after, pagoda.live() - capi.at_start


# ---- the tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["debug", "release"])
def process(request):
    return request.getfixturevalue(f"{request.param}_process")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_good_call_works(process, name):
    assert process.run(good, name) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_misuse_is_refused(process, name):
    failures, count = process.run(misuse, name)
    assert failures == []
    takes = [p for p in FUNCTIONS[name].parameters if p.name not in ("error", "status", *NULL_IS_FINE)]
    assert count >= len(takes), "too little misuse was tried"


def test_a_status_without_a_name_is_unknown(process):
    for number, name in [(0, b"OK"), (10, b"INTERNAL"), (11, b"BUSY"), (12, b"UNKNOWN"), (-1, b"UNKNOWN"), (INT_MIN, b"UNKNOWN")]:
        assert process.run(raw, "pagoda_status_name", number) == name


def raw(name, *arguments):
    return capi.pagoda.raw(name, *arguments)


def set_within_the_callback():
    """What pagoda_log_set says within a log callback, and how many lines come of a failing call there."""
    pagoda, seen = capi.pagoda, []

    @HEADER.callbacks["pagoda_log_callback"]
    def callback(user_data, level, source, message):
        pagoda.raw("pagoda_tensor_free", 1)  # Would log a line, which would come here, and so on without end.
        seen.append(pagoda.raw("pagoda_log_set", C["PAGODA_LOG_OFF"], None, None, None))

    pagoda.call("pagoda_log_set", C["PAGODA_LOG_ERROR"], callback, None)
    pagoda.raw("pagoda_tensor_free", 1)
    pagoda.raw("pagoda_tensor_free", 1)
    capi.world.set_log()
    return seen


def test_a_log_callback_that_logs_or_changes_the_log_does_not_hang(process):
    assert process.run(set_within_the_callback) == [C["PAGODA_UNSUPPORTED"]] * 2


def later_structs():
    """Structs of a later header, longer than this library knows them: zeros are fine, and nothing is written there."""
    here, statuses, tails = capi.world, [], []
    for name, struct in ("pagoda_model_open", "options"), ("pagoda_model_input", "info"):
        call = Call(here, FUNCTIONS[name])
        known = ctypes.c_uint32.from_buffer(call.memory[struct]).value
        longer = (ctypes.c_uint8 * (known + 16))(*bytes(call.memory[struct])[:known])
        ctypes.c_uint32.from_buffer(longer).value = known + 16
        call.set(struct, longer)
        statuses.append(call.make())
        tails.append(bytes(longer)[known:])
        call.clean(True)
    return statuses, tails


def test_a_later_struct_is_fine(process):
    assert process.run(later_structs) == ([OK, OK], [bytes(16)] * 2)


def run_into_another_size():
    """A run whose output is bound to a tensor that the model allows but this run does not."""
    pagoda, x, z = capi.pagoda, np.ones([2, 2], np.float32), np.full([3, 2], 7, np.float32)
    live = pagoda.live()
    with pytest.raises(capi.Failure) as failure:
        pagoda.run(capi.world.model, {"x": x, "y": x}, {"z": z})
    return failure.value.status, bool((z == 7).all()), pagoda.live() - live


def test_a_bound_output_of_another_size_is_refused_and_left_alone(process):
    assert process.run(run_into_another_size) == (INVALID_ARGUMENT, True, 0)


def test_after_all_misuse_a_run_works_and_nothing_is_left(process):
    right, before, after, left = process.run(still_well)
    assert right
    assert (before, after) == ([], [42])
    assert left == 0


HUGE = """
import ctypes, sys
sys.path.insert(0, {tests!r})
import capi
pagoda, dims = capi.Pagoda({profile!r}), (ctypes.c_int64 * 1)({count})
try:
    pagoda.make("pagoda_tensor_new", {kind}, ctypes.addressof(dims), 1)
except capi.Failure as failure:
    print(failure.status, failure.argument)
"""


@pytest.mark.parametrize("profile", ["debug", "release"])
@pytest.mark.parametrize("kind, count", [("F32", 2**48), ("U8", 2**50), ("STRING", 2**40), ("STRING", 2**62)])
def test_memory_that_there_is_not_is_refused(profile, kind, count):
    script = HUGE.format(tests=str(capi.ROOT / "tests"), profile=profile, count=count, kind=C[f"PAGODA_TYPE_{kind}"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"the process died: {done.stderr.splitlines()[:1]}"
    # Either the machine has too little memory, or no machine could have as much.
    assert done.stdout.split() in [[str(status), "dims"] for status in (C["PAGODA_CAPACITY"], INVALID_ARGUMENT)]
