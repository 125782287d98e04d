"""Nothing that a caller can pass crashes the library: every exported function, every way to misuse each of its
parameters, in the build with checks and in the one that is shipped."""

import ctypes
import subprocess
import sys

import capi
import numpy as np
import pytest
from capi import FUNCTIONS, HEADER, OK, Call, address, sentinels
from conftest import trying
from misuse import C, INT_MIN, INVALID_ARGUMENT, NULL_IS_FINE, by_name, by_role, fine

# Functions without an error, and what they return for a handle that is not one.
ODD_RESULTS = {"pagoda_error_status": C["PAGODA_STATUS_INVALID_HANDLE"], "pagoda_element_type_name": b"undefined"}
ODD_RESULTS |= {"pagoda_error_message": b"", "pagoda_error_argument": b""}


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
    if hasattr(here, "busy"):
        pagoda.free("pagoda_store", here.busy)
    pagoda.call("pagoda_log_set", 0, None, None)
    return right, before, after, pagoda.live() - capi.at_start


# ---- the tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_good_call_works(process, name):
    assert process.run(good, name) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_misuse_is_refused(process, name):
    failures, count = process.run(misuse, name)
    assert failures == []
    takes = [p for p in FUNCTIONS[name].parameters if p.name not in ("error", "status", *NULL_IS_FINE)]
    assert count >= len(takes), "too little misuse was tried"


NAMES = [(0, b"OK"), (10, b"INTERNAL"), (11, b"BUSY"), (12, b"UNKNOWN"), (-1, b"UNKNOWN"), (INT_MIN, b"UNKNOWN")]


def test_a_status_without_a_name_is_unknown(process):
    for number, name in NAMES:
        assert process.run(raw, "pagoda_status_name", number) == name


def raw(name, *arguments):
    return capi.pagoda.raw(name, *arguments)


def set_within_the_callback():
    """What pagoda_log_set says within a log callback, and how many lines come of a failing call there."""
    pagoda, seen = capi.pagoda, []

    @HEADER.callbacks["pagoda_log_callback"]
    def callback(user_data, level, source, message):
        pagoda.raw("pagoda_tensor_free", 1)  # Would log a line, which would come here, and so on without end.
        seen.append(pagoda.raw("pagoda_log_set", C["PAGODA_LOG_LEVEL_OFF"], None, None, None))

    pagoda.call("pagoda_log_set", C["PAGODA_LOG_LEVEL_ERROR"], callback, None)
    pagoda.raw("pagoda_tensor_free", 1)
    pagoda.raw("pagoda_tensor_free", 1)
    capi.world.set_log()
    return seen


def test_a_log_callback_that_logs_or_changes_the_log_does_not_hang(process):
    assert process.run(set_within_the_callback) == [C["PAGODA_STATUS_UNSUPPORTED"]] * 2


LATER = [("pagoda_model_open", "options"), ("pagoda_model_input", "info"), ("pagoda_store_open", "options")]
LATER += [("pagoda_kv_cache_open", "options"), ("pagoda_kv_cache_get_stats", "stats")]
LATER += [("pagoda_kv_lease_owner", "owner"), ("pagoda_engine_rank", "response")]
LATER += [("pagoda_generator_open", "options"), ("pagoda_generator_generate", "request")]
LATER += [("pagoda_generate_response_choice", "choice"), ("pagoda_generator_get_stats", "stats")]


def later_structs():
    """Structs of a later header, longer than this library knows them: zeros are fine, and nothing is written there."""
    here, statuses, tails = capi.world, [], []
    for name, struct in LATER:
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
    assert process.run(later_structs) == ([OK] * len(LATER), [bytes(16)] * len(LATER))


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
pagoda, dims = capi.Pagoda(), (ctypes.c_int64 * 1)({count})
try:
    pagoda.make("pagoda_tensor_new", {kind}, ctypes.addressof(dims), 1)
except capi.Failure as failure:
    print(failure.status, failure.argument)
"""


@pytest.mark.parametrize("kind, count", [("F32", 2**48), ("U8", 2**50), ("STRING", 2**40), ("STRING", 2**62)])
def test_memory_that_there_is_not_is_refused(kind, count):
    script = HUGE.format(tests=str(capi.ROOT / "tests"), count=count, kind=C[f"PAGODA_ELEMENT_TYPE_{kind}"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"the process died: {done.stderr.splitlines()[:1]}"
    # Either the machine has too little memory, or no machine could have as much.
    assert done.stdout.split() in [[str(status), "dims"] for status in (C["PAGODA_STATUS_CAPACITY"], INVALID_ARGUMENT)]
