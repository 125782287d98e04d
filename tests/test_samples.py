"""The programs that users copy from: they build without a warning (`make build` does that), do what they say, and
neither leak nor touch memory that is not theirs."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target/release"
HELLO, MODEL = ROOT / "target/demo/hello.onnx", ROOT / "target/demo/model.onnx"
PROGRAMS = {"hello-c": [HELLO], "demo-c": [MODEL], "demo-cpp": [MODEL]}
PROGRAMS["pagoda_hpp"] = [HELLO, MODEL, ROOT / "tests/data/engine/bag"]
PROGRAMS["generator_hpp"] = [ROOT / "tests/data/generate/llama"]
PROGRAMS["remember-c"] = [MODEL]  # and a folder
# Minutes together: in `make soak`. The others call the functions of the samples too, and those of C++ are compiled with
# AddressSanitizer otherwise.
SOAK = ["hello-c", "demo-c", "demo-cpp", "pagoda_hpp", "generator_hpp"]
VALGRIND = ["valgrind", "-q", "--leak-check=full", "--show-leak-kinds=definite,indirect"]
VALGRIND += ["--errors-for-leak-kinds=definite,indirect", "--error-exitcode=9"]
VALGRIND += [f"--suppressions={ROOT}/tests/valgrind.supp"]
# sled's threads spin until the thread that starts them is done with the last. valgrind runs one thread at a time, and by
# default lets a spinning one have the next turn too: that has taken ten minutes.
VALGRIND += ["--fair-sched=yes"]


def run(program, *before, after=(), **options):
    if program == "remember-c" and not after:
        with tempfile.TemporaryDirectory() as folder:
            return run(program, *before, after=[folder], **options)
    command = [*before, RELEASE / program, *PROGRAMS[program], *after]
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


def test_a_user_is_remembered_from_one_run_to_the_next(tmp_path):
    texts = [run("remember-c", after=[tmp_path / "store"]).stdout for _ in range(3)]
    told = [re.fullmatch(r"(\d+) items remembered, (\d+) computed, score (-?\d+\.\d+)\n", text) for text in texts]
    assert [match.group(1, 2) for match in told] == [("0", "500"), ("500", "3"), ("503", "3")]
    # The items go on where they ended, so the history makes a difference; a first run again gives the first score.
    assert len({match[3] for match in told}) == 3
    assert run("remember-c").stdout == texts[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_valgrind_finds_nothing(program):
    if program in SOAK and "SHIPPED" not in os.environ:
        pytest.skip("make soak runs it: it takes a minute")
    result = run(program, *VALGRIND)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_model_is_told():
    result = subprocess.run([RELEASE / "demo-c", "/nowhere.onnx"], capture_output=True, text=True)
    assert result.returncode == 1 and "path: /nowhere.onnx" in result.stderr


def test_a_missing_onnx_runtime_is_told():
    result = run("hello-c", env={**os.environ, "PAGODA_ONNXRUNTIME": "/nowhere.so"})
    assert result.returncode == 1 and "/nowhere.so: cannot open shared object file" in result.stderr


def test_onnx_runtime_sends_no_telemetry(tmp_path):
    # It is off by itself in what looks like CI.
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    result = run("hello-c", env={**environment, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
    assert result.returncode == 0
    assert list(tmp_path.rglob("*")) == []


def test_the_tour_of_the_header_compiles():
    tour = re.search(r"A tour:.*?\n((?: \*(?:     .*)?\n)+)", (ROOT / "include/pagoda.h").read_text())[1]
    code = "\n".join(line[2:] for line in tour.splitlines())
    assert "pagoda_engine_open" in code and "pagoda_engine_free" in code
    program = f"#include <pagoda.h>\n#include <stdio.h>\nint main(void) {{\n{code}\n}}\n"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT}/include", "-xc", "-"]
    result = subprocess.run(command, input=program, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name, page", [("hello.c", "sdk/docs/models.md"), ("remember.c", "sdk/docs/kv.md")])
def test_the_page_shows_the_sample(name, page):
    code = (ROOT / "samples/c" / name).read_text()
    assert f"```c\n{code}```" in (ROOT / page).read_text(), f"{page} and samples/c/{name} differ"
