"""The programs that users copy from: they build without a warning (`make build` does that), do what they say, and
neither leak nor touch memory that is not theirs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target/release"
HELLO, MODEL = ROOT / "target/demo/hello.onnx", ROOT / "target/demo/model.onnx"
PROGRAMS = {"hello-c": [HELLO], "demo-c": [MODEL], "demo-cpp": [MODEL], "pagoda_hpp": [HELLO, MODEL]}
VALGRIND = ["valgrind", "-q", "--leak-check=full", "--show-leak-kinds=definite,indirect"]
VALGRIND += ["--errors-for-leak-kinds=definite,indirect", "--error-exitcode=9"]
VALGRIND += [f"--suppressions={ROOT}/tests/valgrind.supp"]


def run(program, *before, **options):
    command = [*before, RELEASE / program, *PROGRAMS[program]]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_sample_runs(program):
    result = run(program)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_demo_tells_the_story():
    text = run("demo-c").stdout
    told = ["input   item_ids", "rows computed", "recomputed", "remembered", "The scores agree", "0 objects are left"]
    for words in told:
        assert words in text, f"{words!r} is missing in:\n{text}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_valgrind_has_nothing_to_say(program):
    result = run(program, *VALGRIND)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_model_is_told():
    result = subprocess.run([RELEASE / "demo-c", "/nowhere.onnx"], capture_output=True, text=True)
    assert result.returncode == 1 and "path: /nowhere.onnx" in result.stderr


def test_a_missing_onnx_runtime_is_told():
    result = run("hello-c", env={**os.environ, "PAGODA_ONNXRUNTIME": "/nowhere.so"})
    assert result.returncode == 1 and "/nowhere.so: cannot open shared object file" in result.stderr


def test_onnx_runtime_reports_to_no_one(tmp_path):
    # It keeps quiet by itself where it takes itself to be in CI.
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    result = run("hello-c", env={**environment, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
    assert result.returncode == 0
    assert list(tmp_path.rglob("*")) == []


def test_the_readme_shows_the_sample():
    readme = (ROOT / "README.md").read_text()
    code = (ROOT / "samples/c/hello.c").read_text()
    assert f"```c\n{code}```" in readme, "README.md and samples/c/hello.c differ"
