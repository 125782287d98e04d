"""No panic leaves the library: each exported function is made to panic. The build that is shipped does not allow it."""

import os

import capi
import pytest
from capi import FUNCTIONS, HEADER, OK, Call
from conftest import trying

C = HEADER.constants
INTERNAL = C["PAGODA_STATUS_INTERNAL"]

# `make test` has checks in its build, `make soak` tests the one that is shipped.
SHIPPED = "SHIPPED" in os.environ
with_checks = pytest.mark.skipif(SHIPPED, reason="the build that is shipped can not be made to panic")

# What functions that return no status of their own return instead of an answer.
FALLBACKS = {
    "pagoda_status_name": b"UNKNOWN",
    "pagoda_element_type_name": b"undefined",
    "pagoda_error_status": C["PAGODA_STATUS_INVALID_HANDLE"],
    "pagoda_error_message": b"",
    "pagoda_error_argument": b"",
    "pagoda_abi_version": 0,
    "pagoda_version": b"",
    "pagoda_version_number": 0,
    "pagoda_live_objects": 0,
}


def panicking(name):
    """Makes the good call while the function panics, and after it. Gives what was returned, and what is wrong."""
    world, pagoda, function = capi.world, capi.pagoda, FUNCTIONS[name]
    trying(f"a panic in {name}")
    live = pagoda.live()
    world.log.clear()
    call = Call(world, function)
    before = call.snapshot()
    os.environ["PAGODA_TEST_PANIC"] = name
    try:
        result = call.make()
    finally:
        del os.environ["PAGODA_TEST_PANIC"]
    wrong = [f"{key} was written to" for key, memory in call.snapshot().items() if memory != before[key]]
    if function.reports:
        told = [pagoda.take_error(result, call.error()).message] if call.error() is not None else []
    else:
        told = list(world.log)
    if not (len(told) == 1 and "forced by PAGODA_TEST_PANIC" in told[0] and name in told[0]):
        wrong.append(f"the panic was told as {told}")
    if world.finished or world.released:
        wrong.append("a callback was called")
    call.clean(False)
    if pagoda.live() != live:
        wrong.append(f"{pagoda.live() - live} objects more than before")
    return result, wrong


def well(name):
    """Makes the good call. Gives what was returned, and how many objects were left behind."""
    live = capi.pagoda.live()
    call = Call(capi.world, FUNCTIONS[name])
    result = call.make()
    call.clean(True)
    capi.world.released.clear()
    return result, capi.pagoda.live() - live


def panicking_when_done(name):
    """An asynchronous call whose thread panics at the end. Gives what was returned, what the callback was told, and how
    many objects were left behind."""
    live = capi.pagoda.live()
    call = Call(capi.world, FUNCTIONS[name])
    os.environ["PAGODA_TEST_PANIC"] = f"{name}, when done"
    try:
        result = call.make()
        assert capi.world.done.wait(30), "the callback was not called"
    finally:
        del os.environ["PAGODA_TEST_PANIC"]
    capi.world.done.clear()
    told = capi.world.finished.pop()
    # The error that the callback was handed is freed just after it returns: the next run comes after that.
    capi.world.tokens.clear()
    well(name)
    call.clean(False)
    return result, told, capi.pagoda.live() - live


def ignored(name):
    os.environ["PAGODA_TEST_PANIC"] = name
    try:
        return well(name)[0]
    finally:
        del os.environ["PAGODA_TEST_PANIC"]


@with_checks
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_panic_becomes_an_error_and_the_next_call_works(process, name):
    result, wrong = process.run(panicking, name)
    assert wrong == []
    assert result == FALLBACKS.get(name, INTERNAL)
    assert name in FALLBACKS or FUNCTIONS[name].result == "pagoda_status", f"{name}: what does it return after a panic?"
    result, left = process.run(well, name)
    assert result != FALLBACKS.get(name, INTERNAL) and (name in FALLBACKS or result == OK)
    assert left == 0


@with_checks
@pytest.mark.parametrize("name", ["pagoda_model_run_async", "pagoda_generator_generate_async"])
def test_a_panic_on_a_thread_of_pagoda_reaches_the_callback(process, name):
    assert process.run(panicking_when_done, name) == (OK, (INTERNAL, []), 0)


@pytest.mark.skipif(not SHIPPED, reason="make soak tests the library that is shipped")
@pytest.mark.parametrize("name", ["pagoda_version", "pagoda_tensor_new", "pagoda_model_run"])
def test_the_library_that_is_shipped_can_not_be_made_to_panic(process, name):
    assert process.run(ignored, name) == (b"0.1.0" if name == "pagoda_version" else OK)
