"""Failures in Python: an exception of its own for each status, raised by a call that really fails so; the log and the
metrics; and that type checkers see what is wrong before it runs."""

import logging
import os
import re
import subprocess
import sys

import numpy as np
import pagoda
import pytest
from capi import ENGINE, LLAMA, ROOT, add_model, graph
from onnx import TensorProto, helper
from pagoda import error
from test_panics import with_checks

pytestmark = pytest.mark.usefixtures("nothing_left")

ONE = pagoda.ModelOptions(intra_op_threads=1, provider=pagoda.Provider.CPU)
X = np.zeros((3, 2), np.float32)


def invalid_argument(folder):
    with pagoda.Model(add_model(), ONE) as model:
        model.run({"x": X, "y": X.astype(np.int32)})


def invalid_handle(folder):
    model = pagoda.Model(add_model(), ONE)
    model.close()
    model.run({"x": X, "y": X})


def not_found(folder):
    pagoda.Engine(folder / "nowhere")


def unsupported(folder):
    with pagoda.Generator(LLAMA, pagoda.GeneratorOptions(model=ONE)) as generator:
        generator.step()


def capacity(folder):
    shape = {"layers": 1, "heads": 1, "head_size": 8, "size": 1, "size_unit": pagoda.KvSizeUnit.PAGES}
    with pagoda.KvCache(pagoda.KvOptions(**shape)) as cache:
        cache.prepare([pagoda.KvRequest(owner=1, tokens=100)])


def cancelled(folder):
    with pagoda.Model(add_model(), ONE) as model, pagoda.Cancel() as cancel:
        cancel.trigger()
        model.run({"x": X, "y": X}, cancel=cancel)


def model(folder):
    pagoda.Model(b"not a model", ONE)


def runtime(folder):
    """A shape that the number of elements does not have."""
    sides = {"x": (TensorProto.FLOAT, ["N"]), "s": (TensorProto.INT64, [1])}, {"y": (TensorProto.FLOAT, ["M"])}
    with pagoda.Model(graph([helper.make_node("Reshape", ["x", "s"], ["y"])], *sides), ONE) as model:
        model.run({"x": X[0], "s": np.array([99])})


def io(folder):
    (folder / "file").write_text("not a folder")
    pagoda.Store(folder / "file" / "store")


def busy(folder):
    with pagoda.Store(folder / "store"):
        pagoda.Store(folder / "store")


CASES = {
    "INVALID_ARGUMENT": (invalid_argument, "inputs[1]"),
    "INVALID_HANDLE": (invalid_handle, "model"),
    "NOT_FOUND": (not_found, "folder"),
    "UNSUPPORTED": (unsupported, "options.driver"),
    "CAPACITY": (capacity, "requests"),
    "CANCELLED": (cancelled, ""),
    "MODEL": (model, "bytes"),
    "RUNTIME": (runtime, ""),
    "IO": (io, "path"),
    "BUSY": (busy, "path"),
}


@pytest.mark.parametrize("status", CASES)
def test_each_status_has_its_exception(tmp_path, status):
    fail, argument = CASES[status]
    expected = error.BY_STATUS[pagoda.Status[status]]
    with pytest.raises(pagoda.PagodaError) as failure:
        fail(tmp_path)
    assert type(failure.value) is expected and failure.value.status == pagoda.Status[status]
    assert failure.value.argument == argument, failure.value.argument
    assert failure.value.message == str(failure.value) and len(failure.value.message) > 10


@with_checks
def test_a_panic_is_an_exception(monkeypatch):
    with pagoda.Model(add_model(), ONE) as model:
        monkeypatch.setenv("PAGODA_TEST_PANIC", "pagoda_model_run")
        with pytest.raises(pagoda.InternalError, match="forced by PAGODA_TEST_PANIC"):
            model.run({"x": X, "y": X})


def test_no_status_is_without_an_exception():
    kinds = {status: error.BY_STATUS[status] for status in pagoda.Status if status != pagoda.Status.OK}
    assert len(set(kinds.values())) == len(kinds) == len(pagoda.Status) - 1
    # One of a later version of the library.
    later = error.from_status(99, "something new")
    assert (type(later), later.status) == (pagoda.PagodaError, 99)


def test_a_context_manager_closes_after_an_error():
    with pytest.raises(ZeroDivisionError), pagoda.Engine(ENGINE) as engine:
        1 / 0
    assert engine.closed and repr(engine) == "<pagoda.Engine (closed)>"


def test_the_log_and_the_metrics(caplog):
    lines = []
    pagoda.set_log(pagoda.LogLevel.DEBUG, lambda *line: lines.append(line))
    with pytest.raises(pagoda.ModelError):
        pagoda.Model(b"not a model", ONE)
    assert any(level <= pagoda.LogLevel.DEBUG and source and "bytes: " in message for level, source, message in lines)
    count = len(lines)
    pagoda.set_log(pagoda.LogLevel.DEBUG)
    with caplog.at_level(logging.DEBUG, "pagoda"), pytest.raises(pagoda.ModelError):
        pagoda.Model(b"not a model", ONE)
    assert len(lines) == count and any(record.name.startswith("pagoda.") for record in caplog.records)
    pagoda.set_log(pagoda.LogLevel.OFF)
    assert pagoda.metrics().endswith("# EOF\n") and "pagoda_" in pagoda.metrics()
    assert pagoda.version() == pagoda.HEADER_VERSION == pagoda.__version__
    assert pagoda.version_number() == 1000 and pagoda.abi_version() == 1


def test_without_the_library_there_is_advice_and_the_exporter():
    code = "import pagoda, pagoda.export\ntry:\n    pagoda.version()\nexcept pagoda.NotFoundError as e:\n    print(e)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings/python"), "PAGODA_LIBRARY": "/nowhere.so"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "/nowhere.so" in done.stdout and "PAGODA_LIBRARY" in done.stdout, done


# ---- types -------------------------------------------------------------------------------------------------------

USE = """
import pagoda

async def use(generator: pagoda.Generator, engine: pagoda.Engine) -> list[str]:
    reveal_type(generator.generate("x", max_new_tokens=3).text)
    reveal_type(engine.rank(pagoda.RankRequest(user=1, candidates={"movie": [1]})).scores)
    reveal_type(await generator.generate_async(tokens=[1, 2]))
    async for token in generator.stream("x"):
        reveal_type(token)
    generator.generate("x", beams=4)
    generator.generate("x", max_new_tokens="3")
    engine.rank(candidates={})
    pagoda.GeneratorOptions(max_bath=1)
    return [token.text for token in generator.stream("x")]
"""


def test_mypy_finds_what_is_wrong_and_nothing_else(tmp_path):
    (tmp_path / "use.py").write_text(USE)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        ROOT / "target/mypy",
        "-p",
        "pagoda",
        "-m",
        "use",
    ]
    # It says which modules of the exporter have annotations.
    command += ["--config-file", ROOT / "bindings/python/pyproject.toml"]
    environment = {**os.environ, "MYPYPATH": f"{ROOT / 'bindings/python'}:{tmp_path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert re.findall(r'Revealed type is "(?:.*\W)?(\w+)\W*"', done.stdout) == [
        "str",
        "_32Bit",
        "GenerateResponse",
        "Token",
    ]
    lines, wrong = USE.splitlines(), re.findall(r"^(.*):(\d+): error", done.stdout, re.M)
    found = [lines[int(line) - 1].strip() if file == "use.py" else f"{file}:{line}" for file, line in wrong]
    expected = ["beams=4", 'max_new_tokens="3"', "engine.rank(candidates", "max_bath"]
    assert sorted(set(found)) == sorted(line.strip() for line in lines if any(part in line for part in expected)), (
        done.stdout
    )
