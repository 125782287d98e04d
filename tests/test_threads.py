"""One model, many threads: results, callbacks, cancels, frees and the log, concurrently."""

import ctypes
import threading
import time

import capi
import numpy as np
import pytest
from capi import HEADER, OK, PATIENCE, address, graph, texts, until
from onnx import TensorProto, helper

C = HEADER.constants
THREADS, RUNS = 8, 1000


def together(*bodies):
    """Runs the bodies in threads that start at once; raises what any of them raises."""
    start, failures = threading.Barrier(len(bodies)), []

    def guarded(body):
        start.wait()
        try:
            body()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=[body], daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def chain_model(length):
    """x → begun = x + x → matrix products, one after the other → y. `begun` shows outside that a run has begun."""
    square = (TensorProto.FLOAT, [256, 256])
    nodes = [helper.make_node("Add", ["x", "x"], ["begun"]), helper.make_node("MatMul", ["begun", "x"], ["m0"])]
    nodes += [helper.make_node("MatMul", [f"m{i}", "x"], [f"m{i + 1}"]) for i in range(length)]
    nodes += [helper.make_node("Identity", [f"m{length}"], ["y"])]
    return graph(nodes, {"x": square}, {"begun": square, "y": square})


class LongRun:
    """A run in a thread of its own that has begun and not ended."""

    def __init__(self, length, cancel=None, x=None):
        self.pagoda, self.failure = capi.pagoda, None
        self.model = self.pagoda.open(chain_model(length))
        self.x, self.begun = np.eye(256, dtype=np.float32) if x is None else x, np.zeros([256, 256], np.float32)
        self.y = np.zeros([256, 256], np.float32)
        self.thread = threading.Thread(target=self.run, args=[cancel], daemon=True)
        self.thread.start()
        until(lambda: self.begun[0, 0] == 2, "the first node has run")

    def run(self, cancel):
        try:
            self.pagoda.run(self.model, {"x": self.x}, {"begun": self.begun, "y": self.y}, cancel)
        except capi.Failure as failure:
            self.failure = failure

    def join(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the run hangs"


def runner(model, number):
    """Runs `model` over and over with numbers that no other thread has, and checks every result."""
    pagoda = capi.pagoda

    def body():
        x, y = np.full([3, 2], number, np.float32), np.zeros([3, 2], np.float32)
        z = np.zeros([3, 2], np.float32)
        tensors = [pagoda.borrow(array) for array in (x, y, z)]
        for turn in range(RUNS):
            y[:] = turn
            if turn % 2:
                pagoda.run(model, {"x": tensors[0], "y": tensors[1]}, {"z": tensors[2]})
                result = z
            else:
                (made,) = pagoda.run(model, {"x": tensors[0], "y": tensors[1]}, {"z": None})
                result = pagoda.read(made)
                pagoda.free("pagoda_tensor", made)
            assert (result == number + turn).all(), f"{number} + {turn} is not {result}"
        for tensor in tensors:
            pagoda.free("pagoda_tensor", tensor)

    return body


# ---- in the other process ----------------------------------------------------------------------------------------


def runs_of_many_threads():
    together(*(runner(capi.world.model, 10_000 * thread) for thread in range(THREADS)))


def runs_while_the_log_changes():
    """Some threads run and fail on purpose (each failure is a line of the log) while another changes the callback."""
    pagoda, world = capi.pagoda, capi.world
    callback_type, lines, stale, over = HEADER.callbacks["pagoda_log_callback"], [0], [], threading.Event()
    dead = set()

    @callback_type
    def callback(user_data, level, source, message):
        lines[0] += 1
        if user_data in dead:
            stale.append(user_data)

    def change():
        number = 0
        while not over.is_set():
            number += 1
            pagoda.call("pagoda_log_set", C["PAGODA_LOG_LEVEL_TRACE"], callback, number)
            pagoda.call("pagoda_log_set", C["PAGODA_LOG_LEVEL_OFF"], None, None)
            dead.add(number)
        assert number > 1

    def fail():
        # Until the log has had lines, so that the two surely met.
        turn, deadline = 0, time.monotonic() + PATIENCE
        while turn < RUNS or lines[0] < 100:
            turn += 1
            with pytest.raises(capi.Failure):
                pagoda.call("pagoda_tensor_type", 1, None)
            assert time.monotonic() < deadline, f"{lines[0]} lines came"

    def working(*bodies):
        try:
            together(*bodies)
        finally:
            over.set()

    together(change, lambda: working(fail, fail, runner(world.model, 5), runner(world.model, 7)))
    world.set_log()
    return lines[0], stale


def asynchronous_runs():
    """Runs handed in by several threads, each with its own numbers; the callback reads and frees the results."""
    pagoda, world, each = capi.pagoda, capi.world, 500
    seen, wrong, all_seen = {}, [], threading.Event()
    lock = threading.Lock()

    @HEADER.callbacks["pagoda_run_callback"]
    def callback(user_data, status, outputs, count, error):
        (handle,) = (ctypes.c_void_p * 1).from_address(outputs) if status == OK else [None]
        if status != OK or count != 1 or error or not (pagoda.read(handle) == 2 * user_data).all():
            wrong.append((user_data, status))
        if handle:
            pagoda.free("pagoda_tensor", handle)
        with lock:
            seen[user_data] = seen.get(user_data, 0) + 1
            if len(seen) == THREADS * each:
                all_seen.set()

    def submit(first):
        names, none = (texts("xy"), texts("z")), (ctypes.c_void_p * 1)()
        for number in range(first, first + each):
            dims, place, size = (ctypes.c_int64 * 2)(1, 2), ctypes.c_void_p(), ctypes.c_size_t()
            x = pagoda.make("pagoda_tensor_new", C["PAGODA_ELEMENT_TYPE_F32"], address(dims), 2)
            pagoda.call("pagoda_tensor_data", x, address(place), address(size))
            (ctypes.c_float * 2).from_address(place.value)[:] = [number, number]
            inputs = (ctypes.c_void_p * 2)(x, x)
            given = address(names[0]), address(inputs), 2, address(names[1]), address(none), 1, None, callback, number
            pagoda.call("pagoda_model_run_async", world.model, *given)
            pagoda.free("pagoda_tensor", x)  # As the header allows: the run keeps a reference.

    together(*(lambda first=thread * each + 1: submit(first) for thread in range(THREADS)))
    assert all_seen.wait(PATIENCE), f"{len(seen)} of {THREADS * each} callbacks came"
    return len(seen), max(seen.values()), wrong


def more_runs_than_may_wait():
    """Callbacks that do not return block the runs behind them until the queue is full."""
    pagoda, world, limit = capi.pagoda, capi.world, 100_000
    go_on, ended, statuses = threading.Event(), threading.Semaphore(0), set()
    result = np.zeros([2, 2], np.float32)
    z = pagoda.borrow(result)

    @HEADER.callbacks["pagoda_run_callback"]
    def callback(user_data, status, outputs, count, error):
        go_on.wait(PATIENCE)
        statuses.add(status)
        ended.release()

    names = texts("xy"), texts("z")
    inputs, outputs = (ctypes.c_void_p * 2)(world.x, world.y), (ctypes.c_void_p * 1)(z)
    given = address(names[0]), address(inputs), 2, address(names[1]), address(outputs), 1, None, callback, None
    taken, refused = 0, None
    while refused is None and taken < limit:
        try:
            pagoda.call("pagoda_model_run_async", world.model, *given)
            taken += 1
        except capi.Failure as failure:
            refused = failure.status
    go_on.set()
    came = sum(ended.acquire(timeout=PATIENCE) for _ in range(taken))
    pagoda.free("pagoda_tensor", z)
    return refused, taken - came, ended.acquire(blocking=False), statuses


def a_cancel_from_another_thread():
    """A run that would take seconds is stopped after it has begun."""
    cancel = capi.pagoda.make("pagoda_cancel_new")
    run = LongRun(10_000, cancel)
    together(
        lambda: capi.pagoda.call("pagoda_cancel_trigger", cancel),
        lambda: capi.pagoda.free("pagoda_model", run.model),
    )
    run.join()
    capi.pagoda.free("pagoda_cancel", cancel)
    return run.failure and run.failure.status


def a_model_freed_during_a_run():
    run = LongRun(3000)
    under_way = run.thread.is_alive()
    capi.pagoda.free("pagoda_model", run.model)
    with pytest.raises(capi.Failure) as refused:
        capi.pagoda.run(run.model, {"x": run.x}, {"y": None})
    run.join()
    # x is the identity: every product is `begun`, twice the identity.
    return under_way, run.failure, bool((run.y == run.begun).all() and run.y[0, 0] == 2), refused.value.status


def lent_memory_freed_during_a_run():
    """The run has it until its end, whatever was freed meanwhile; then it comes back once."""
    pagoda, released, array = capi.pagoda, [], np.eye(256, dtype=np.float32)
    release = HEADER.callbacks["pagoda_release_callback"](released.append)
    dims, where, number = (ctypes.c_int64 * 2)(256, 256), array.ctypes.data, C["PAGODA_ELEMENT_TYPE_F32"]
    x = pagoda.make("pagoda_tensor_borrow", number, address(dims), 2, where, array.nbytes, release, 42)
    run = LongRun(3000, x=x)
    pagoda.free("pagoda_tensor", x)
    during, under_way = list(released), run.thread.is_alive()
    run.join()
    pagoda.free("pagoda_model", run.model)
    return under_way, during, released, run.failure


def many_threads_free_one_model():
    """Of several threads that free one handle, while others run it, one succeeds; the others' runs work or are told."""
    pagoda = capi.pagoda
    model, statuses, codes = pagoda.open(capi.world.bytes), [], set()
    half = threading.Event()

    def use():
        x = np.ones([1, 2], np.float32)
        turn, deadline = 0, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                (z,) = pagoda.run(model, {"x": x, "y": x}, {"z": None})
            except capi.Failure as failure:
                codes.add(failure.status)
                return
            assert (pagoda.read(z) == 2).all()
            pagoda.free("pagoda_tensor", z)
            turn += 1
            if turn == 100:
                half.set()

    def free():
        assert half.wait(PATIENCE)
        statuses.append(pagoda.raw("pagoda_model_free", model))

    together(use, use, free, free, free)
    return sorted(statuses), codes


def counted(function):
    """What a function gives, and how many objects it left."""
    live = capi.pagoda.live()
    result = globals()[function]()
    # Handles of borrowed inputs and of outputs are all freed by then; nothing happens in the background any more.
    return result, capi.pagoda.live() - live


# ---- the tests ---------------------------------------------------------------------------------------------------


def left_nothing(process, function):
    result, left = process.run(counted, function.__name__)
    assert left == 0, f"{left} objects were left"
    return result


def test_runs_of_many_threads_do_not_mix(process):
    left_nothing(process, runs_of_many_threads)


def test_the_log_may_change_meanwhile(process):
    lines, stale = left_nothing(process, runs_while_the_log_changes)
    assert lines >= 100
    assert stale == [], "a callback was called after it had been replaced"


def test_each_asynchronous_run_calls_back_once(process):
    assert left_nothing(process, asynchronous_runs) == (THREADS * 500, 1, [])


def test_a_full_queue_is_said_and_empties(process):
    refused, missing, too_many, statuses = left_nothing(process, more_runs_than_may_wait)
    assert (refused, missing, too_many, statuses) == (C["PAGODA_STATUS_CAPACITY"], 0, False, {OK})


def test_a_cancel_from_another_thread_stops_a_run(process):
    assert left_nothing(process, a_cancel_from_another_thread) == C["PAGODA_STATUS_CANCELLED"]


def test_a_model_freed_during_a_run_lets_it_end_well(process):
    invalid = C["PAGODA_STATUS_INVALID_HANDLE"]
    assert left_nothing(process, a_model_freed_during_a_run) == (True, None, True, invalid)


def test_memory_lent_to_a_run_comes_back_after_it(process):
    assert left_nothing(process, lent_memory_freed_during_a_run) == (True, [], [42], None)


def test_one_of_many_frees_succeeds(process):
    invalid = C["PAGODA_STATUS_INVALID_HANDLE"]
    statuses, codes = left_nothing(process, many_threads_free_one_model)
    assert statuses == [OK, invalid, invalid]
    assert codes == {invalid}
