"""What the Python tests share: other processes, for calls that may crash."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

# A shell's background job ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent.parent / "bindings/python"))
# The library of the package `pagoda`, which a wheel has inside.
os.environ["PAGODA_LIBRARY"] = str(Path(__file__).parent.parent / "target/release/libpagoda.so")

# Longer than any test takes on a busy machine: a longer one hangs.
HANGS = 300


# These take longest. They begin first, so that none of them is alone at the end, while the other cores wait. test_install is not among
# the first ones, because it runs Maven, which tests the Java binding at that time.
LONG = ["test_smollm2", "test_past_present", "test_movielens", "test_functional", "test_samples", "test_generate"]
LONG += ["test_install", "test_misuse", "test_export_llm", "test_panics", "test_export_fused", "test_cli_generate"]


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


class Apart:
    """Another process with a libpagoda.so of its own. If it crashes, one test fails, with the last thing that was
    tried, instead of pytest coming to an end without a word; the next call starts a new process."""

    def __init__(self, folder):
        self.folder, self.pool = folder, None

    def run(self, function, *arguments):
        if self.pool is None:
            # spawn: a fork would take over locks of threads that it does not have.
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(1, spawn, initializer=begin, initargs=(str(self.folder),))
        try:
            well, result = self.pool.submit(guarded, function, *arguments).result(timeout=HANGS)
        except BrokenProcessPool:
            self.fail("the process crashed at")
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            self.fail(f"the process was still busy after {HANGS} s with")
        if not well:
            pytest.fail(result, pytrace=False)
        return result

    def fail(self, what):
        self.pool = None
        tried = self.folder / "trying"
        last = tried.read_text() if tried.exists() else "starting"
        pytest.fail(f"{what}: {last} (its stderr is below)", pytrace=False)

    def close(self):
        if self.pool is not None:
            self.pool.shutdown()


def begin(folder):
    """In the other process: `capi.world` is there for what is run."""
    import capi

    faulthandler.enable()
    capi.folder = folder
    capi.pagoda = capi.Pagoda()
    capi.at_start = capi.pagoda.live()
    capi.world = capi.World(capi.pagoda, folder)


def guarded(function, *arguments):
    """In the other process: exceptions go back as text, for not every one can be sent."""
    try:
        return True, function(*arguments)
    except BaseException:
        return False, traceback.format_exc()


def trying(what):
    """Notes what is about to be tried, for the case that the process does not survive it."""
    import capi

    with open(f"{capi.folder}/trying", "w", encoding="utf-8") as file:
        file.write(what)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    apart = Apart(tmp_path_factory.mktemp("process"))
    yield apart
    apart.close()


@pytest.fixture(scope="module")
def pagoda():
    """The library, in this process; a module's tests leave nothing behind in it."""
    import capi

    pagoda = capi.Pagoda()
    before = pagoda.live()
    yield pagoda
    assert pagoda.live() == before


@pytest.fixture
def nothing_left():
    """A test of the package `pagoda` leaves no object of the library behind, and nothing that waits for a callback."""
    import gc

    import pagoda
    from pagoda._native import _kept

    def left():
        return pagoda.live_objects(), len(_kept)

    before = left()
    yield
    # A request that was cancelled ends a moment later, on a thread of the library.
    deadline = time.monotonic() + 10
    while left() != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert left() == before
