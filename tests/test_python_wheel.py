"""The wheel of `make wheel`: its tag, what is in it, and that it works where nothing else is installed, as its README and
the documents say."""

import os
import re
import subprocess
import sys
import zipfile

import pagoda
import pytest
from capi import LLAMA, ROOT
from pagoda.export import export
from test_movielens import HERE

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PAGODA_", "PYTHON", "LD_"))}


def call(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=CLEAN, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def example(path, number=0):
    """A Python example of a document."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / path).read_text(), re.M | re.S)[number]


@pytest.fixture(scope="module")
def wheel():
    (found,) = (ROOT / "target/wheel").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an empty virtual environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    # That of the tests has no pip.
    outside = sys._base_executable
    call(outside, "-m", "venv", "--without-pip", folder)
    quiet = ["-q", "--disable-pip-version-check", "--no-index", "--find-links", ROOT / "target/wheelhouse"]
    call(outside, "-m", "pip", "--python", folder / "bin/python", "install", *quiet, f"{wheel}[cpu]")
    return folder / "bin/python"


def test_the_tag_is_that_of_auditwheel(wheel):
    tag = re.fullmatch(rf"pagoda-{pagoda.__version__}-py3-none-(manylinux_2_\d+_\w+)\.whl", wheel.name)[1]
    told = call(ROOT / "target/venv-packaging/bin/auditwheel", "show", wheel).replace("\n", " ")
    assert f'is consistent with the following platform tag: "{tag}"' in told


def test_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        info = next(name for name in names if name.endswith("/METADATA"))
        metadata = packed.read(info).decode()
    libraries = {name for name in names if ".so" in name}
    assert libraries == {f"pagoda/lib/libpagoda{name}.so" for name in ("", "_ops", "_python")}
    assert {"pagoda/py.typed", "pagoda/export/__main__.py"} <= set(names)
    assert any(name.endswith("licenses/NOTICES.rust") for name in names)
    needs = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.M)
    assert sorted(needs) == ["cffi", "numpy"], "the exporter's packages are extras"


def test_the_lines_of_the_readme(python, tmp_path):
    (tmp_path / "model").symlink_to(LLAMA)
    code = example("bindings/python/README.md") + "assert pagoda.live_objects() == 0"
    printed = call(python, "-c", code, cwd=tmp_path)
    # The answer, why it ended, and the streamed one.
    assert re.search(r" (STOP|LENGTH)\n.+\n", printed, re.S)


def test_the_example_of_the_documents(python, tmp_path):
    export(HERE / "weights.safetensors", HERE / "config.json", tmp_path / "model")
    code = example("sdk/docs/python.md", 5)
    assert "engine.rank" in code
    # As the README says of all languages.
    assert call(python, "-c", f"import pagoda\n{code}", cwd=tmp_path) == "0.7695\n0.9216\n0.5465\n"


def test_the_examples_of_generating(python, tmp_path):
    """Open, generate, stream, asyncio and cancel, one after the other."""
    (tmp_path / "model").symlink_to(LLAMA)
    parts = [example("sdk/docs/python.md", number) for number in range(5)]
    assert "pagoda.Cancel" in parts[4]
    code = parts[0].split("\nwith ")[0] + "\ngenerator = pagoda.Generator('model')\n" + "\n".join(parts[1:])
    assert call(
        python, "-c", f"{code}\nimport asyncio\nasyncio.run(tell(generator))\nprint(pagoda.__version__)", cwd=tmp_path
    )


def test_the_exporter_without_its_packages_says_what_to_install(python):
    done = subprocess.run([python.with_name("pagoda-export"), "--help"], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 1 and "pip install 'pagoda[export]'" in done.stderr


def test_the_operators(python):
    call(python, "-c", "import onnxruntime, pagoda; pagoda.ops.register(onnxruntime.SessionOptions())")
