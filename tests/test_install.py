"""What `make install` installs, after it was moved elsewhere: programs in every language build against it as the samples
say, run without anything of this repository, and print the same to the byte. The data is made up, the model MovieLens'."""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from capi import EXPORTS, LLAMA, ROOT
from exported import Oracle
from pagoda.export import export
from safetensors.numpy import load_file
from test_generate import C, Generator
from test_movielens import CONFIG, HERE, dataset, made_up, prepare

# What is in the repository is tested: a language that is missing from the machine is a failure, not a test less.
LANGUAGES = [name for name in ("go", "java") if (ROOT / "samples" / name).is_dir()]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
# make hands its own settings down to what it starts. The way in which nvcc compiles stays: another one would compile
# everything anew, and once more for the tests behind these.
SETTINGS = ("MAKE", "MFLAGS", "PAGODA_", "BUILT")
QUICK = "PAGODA_NVCC_QUICK"
BUILD = {name: value for name, value in os.environ.items() if name == QUICK or not name.startswith(SETTINGS)}


def call(*command, code=0, env=None, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8", env=env, **options)
    assert done.returncode == code, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def build(*command, **environment):
    return call(*command, env=BUILD | {name: str(value) for name, value in environment.items()}).stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="module")
def prefix(here):
    """Installed by way of DESTDIR, as packages are made, and then moved."""
    targets = ["install", "install-java"] if "java" in LANGUAGES else ["install"]
    build("make", "-s", "-C", ROOT, *targets, f"DESTDIR={here}/root", "PREFIX=/opt/pagoda")
    return (here / "root/opt/pagoda").rename(here / "moved")


@pytest.fixture(scope="module")
def folder(here):
    """What the samples read."""
    data, out = made_up(here / "data"), here / "movielens"
    users = dataset.read_events(data)
    trained = here / "trained.json"
    trained.write_text(json.dumps({"split": {"time": dataset.split_time(users), "seed": 3, "others": 4}}))
    prepare.prepare(data, out, trained)
    export(HERE / "weights.safetensors", HERE / "config.json", out / "model")
    return out


# ---- the programs ------------------------------------------------------------------------------------------------


class Programs:
    """Each is built when it is first asked for: a command, and what it needs in its environment to run."""

    def __init__(self, prefix, here):
        self.prefix, self.here, self.made = prefix, here, {}

    def __call__(self, name):
        if name not in self.made:
            place = self.here / name
            place.mkdir()
            self.made[name] = getattr(self, name.replace("-", "_"))(place)
        return self.made[name]

    def flags(self, *options):
        return build("pkg-config", *options, "pagoda", PKG_CONFIG_PATH=self.prefix / "lib/pkgconfig").split()

    def c(self, place):
        rpath = f"-Wl,-rpath,{self.flags('--variable=libdir')[0]}"
        flags = [*WARNINGS, *self.flags("--cflags", "--libs"), rpath]
        build("cc", "-std=c11", ROOT / "samples/c/rank.c", "-o", place / "rank", *flags)
        return [place / "rank"], {}

    def c_static(self, place):
        libraries = [flag.replace("-lpagoda", "-l:libpagoda.a") for flag in self.flags("--static", "--libs")]
        build("cc", "-std=c11", ROOT / "samples/c/rank.c", "-o", place / "rank", *self.flags("--cflags"), *libraries)
        assert "libpagoda" not in build("readelf", "-d", place / "rank")
        return [place / "rank"], self.onnxruntime()

    def gxx(self, place):
        return self.cmake(place, ROOT / "samples/cpp", "g++"), {}

    def clang(self, place):
        return self.cmake(place, ROOT / "samples/cpp", "clang++"), {}

    def cmake_static(self, place):
        text = (ROOT / "samples/cpp/CMakeLists.txt").read_text().replace("pagoda::pagoda", "pagoda::static")
        for name in "rank.cpp", "chat.cpp":
            shutil.copy(ROOT / "samples/cpp" / name, place)
        (place / "CMakeLists.txt").write_text(text)
        return self.cmake(place / "build", place, "g++"), self.onnxruntime()

    def cmake(self, place, source, compiler):
        settings = [f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCMAKE_CXX_COMPILER={compiler}"]
        build("cmake", "-S", source, "-B", place, *settings, f"-DCMAKE_CXX_FLAGS={' '.join(WARNINGS)}")
        build("cmake", "--build", place)
        return [place / "rank"]

    def rust(self, place):
        # `make test` has built them.
        for name in "rank", "chat":
            shutil.copy(ROOT / "target/release/examples" / name, place)
        return [place / "rank"], self.onnxruntime()

    def go(self, place):
        # As it was installed, with the binding that its go.mod names.
        for folder in ["samples/go", "bindings/go"]:
            shutil.copytree(self.prefix / "share/doc/pagoda" / folder, place / folder)
        self.go_build(place / "samples/go", place / "rank")
        self.go_build(place / "samples/go/chat", place / "chat")
        return [place / "rank"], {}

    def go_build(self, place, program):
        paths = {"PKG_CONFIG_PATH": self.prefix / "lib/pkgconfig", "CGO_LDFLAGS": f"-Wl,-rpath,{self.prefix}/lib"}
        build(os.environ.get("GO", "go"), "-C", place, "build", "-o", program, ".", **paths)

    def java(self, place):
        jar = self.prefix / "share/java/pagoda.jar"
        build("javac", "-Xlint:all", "-Werror", "-cp", jar, "-d", place, *(ROOT / "samples/java").rglob("*.java"))
        return [shutil.which("java"), "-cp", f"{jar}:{place}", "Rank"], {}

    def chat(self, name):
        """The program that talks, which was built with the one that ranks."""
        (*before, last), environment = self(name)
        return [*before, "Chat" if name == "java" else last.with_stem("chat")], environment

    def python(self, place):
        # The package that was not made into a wheel takes the library that is installed.
        paths = {"PYTHONPATH": ROOT / "bindings/python", "PAGODA_LIBRARY": self.prefix / "lib/libpagoda.so.1"}
        sample = self.prefix / "share/doc/pagoda/samples/python/rank.py"
        return [sys.executable, "-B", sample], {name: str(path) for name, path in paths.items()} | self.onnxruntime()

    def onnxruntime(self):
        """Programs that have Pagoda inside look for ONNX Runtime beside themselves, and Python for its package, not in the
        prefix."""
        return {"PAGODA_ONNXRUNTIME": str(self.prefix / "lib/pagoda/libonnxruntime.so.1")}


ALL = ["c", "c-static", "gxx", "clang", "cmake-static", "python", "rust", *LANGUAGES]


@pytest.fixture(scope="module")
def programs(prefix, here):
    return Programs(prefix, here)


def run(program, *arguments, code=0, **more):
    command, environment = program
    return call(*command, *arguments, code=code, env=environment | more, cwd="/")


def test_the_ranking_is_right(programs, folder):
    """Of the C sample, by the formulas in float64; all others have to print the same."""
    lines = (folder / "visits.txt").read_text(encoding="utf-8").splitlines()
    begins = [at for at, line in enumerate(lines) if re.match("visit|candidates", line)]
    visits = [lines[begin + 1 : end] for begin, end in zip(begins, begins[1:])]
    candidates = [line.split(" ", 1) for line in lines[begins[-1] + 1 :]]
    expected, known = ["U" + lines[0][1:]], 0
    for number, visit in enumerate(visits, 1):
        expected.append(f"  visit {number}: {len(visit)} new events, {known} rows remembered, {len(visit)} computed")
        known += len(visit)
    expected.append(f"Top ten of {len(candidates)} movies:")
    pairs = [map(int, line.split()) for visit in visits for line in visit]
    events = [{"movie": movie, "rating": rating, "time": 0} for movie, rating in pairs]
    asked = {"keys": {}, "events": events, "candidates": [{"movie": int(movie)} for movie, _ in candidates], "now": 0}
    scores = Oracle(CONFIG, load_file(HERE / "weights.safetensors")).scores([asked])[:, 0]
    printed = run(programs("c"), folder).stdout.splitlines()
    assert printed[: len(expected)] == expected and len(printed) == len(expected) + 10
    for place, (at, line) in enumerate(zip(np.argsort(-scores, kind="stable"), printed[len(expected) :]), 1):
        number, score, title = re.fullmatch(r"  ([ \d]\d)\. (0\.\d{6})  (.*)", line).groups()
        assert (int(number), title) == (place, candidates[at][1]) and abs(float(score) - scores[at]) < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_every_language_prints_the_same(programs, folder, name):
    done = run(programs(name), folder)
    assert done.stdout == run(programs("c"), folder).stdout and done.stderr == ""


@pytest.mark.parametrize("name", ALL)
def test_what_fails_is_said(programs, here, folder, name):
    wrong = run(programs(name), code=2)
    assert wrong.stdout == "" and "usage: " in wrong.stderr.lower()
    nowhere = run(programs(name), "/nowhere", code=1)
    assert nowhere.stdout == "" and "/nowhere" in nowhere.stderr
    half = here / f"half-{name}"
    half.mkdir()
    shutil.copy(folder / "visits.txt", half)
    no_model = run(programs(name), half, code=1)
    assert no_model.stdout == "" and str(half / "model") in no_model.stderr
    (half / "visits.txt").write_text("user 1\nvisit 2\n5 5\n")
    cut = run(programs(name), half, code=1)
    assert cut.stdout == "" and "visits.txt" in cut.stderr
    lost = run(programs(name), folder, code=1, PAGODA_ONNXRUNTIME="/nowhere.so")
    assert lost.stdout == "" and "/nowhere.so" in lost.stderr and "PAGODA_ONNXRUNTIME" in lost.stderr


CHATS = ["gxx", "clang", "cmake-static", "python", "rust", *LANGUAGES]
SAID = ['Hello "you" \\\\ 狐', "Who are you?"]


def talked(pagoda, seed):
    """What a chat prints, by the calls of pagoda.h."""
    names = {C[f"PAGODA_FINISH_REASON_{name}"]: name.lower() for name in ("STOP", "LENGTH")}
    asked = {"do_sample": -1, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "has_seed": 1, "seed": seed}
    asked |= {"ignore_eos": 0, "max_new_tokens": 200, "session": "chat", "context_end": C["PAGODA_CONTEXT_END_STOP"]}
    printed, messages = "", []
    with Generator(pagoda) as generator:
        for said in SAID:
            messages.append({"role": "user", "content": said})
            answer = generator.answer(messages=json.dumps(messages), **asked)
            printed += f"{answer.text}\n[{len(answer.tokens)} tokens; {answer.cached} of the prompt's "
            printed += f"{len(answer.prompt_tokens)} were cached; {names[answer.finish_reason]}]\n"
            messages.append({"role": "assistant", "content": answer.text})
    return printed


@pytest.mark.parametrize("name", CHATS)
def test_every_language_talks_the_same(programs, pagoda, name):
    command, environment = programs.chat(name)
    for seed in 7, 2**64 - 1:
        given = "".join(f"{line}\n" for line in SAID).encode()
        done = subprocess.run([*command, LLAMA, str(seed)], input=given, capture_output=True, env=environment, cwd="/")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode() == talked(pagoda, seed)


@pytest.mark.parametrize("name", CHATS)
def test_what_fails_in_a_talk_is_said(programs, name):
    for arguments in [], [LLAMA, "-3"], [LLAMA, "x"], [LLAMA, "1", "2"]:
        wrong = run(programs.chat(name), *arguments, code=2)
        assert wrong.stdout == "" and "usage: " in wrong.stderr.lower()
    nowhere = run(programs.chat(name), "/nowhere", code=1)
    assert nowhere.stdout == "" and "/nowhere" in nowhere.stderr


# ---- the examples of the documents -------------------------------------------------------------------------------

# What a program has around the lines of an example. Where there is a count of live objects, it has to be 0 at the end.
AROUND = {
    "c": (
        "main.c",
        "#include <pagoda.h>\n#include <semaphore.h>\n#include <stdio.h>\nOUTSIDE"
        "int main(void) {\nINSIDEreturn (int)pagoda_live_objects();\n}\n",
    ),
    "cpp": (
        "main.cpp",
        "#include <cstdio>\n#include <pagoda.hpp>\n"
        "int main() {\n{\nINSIDE}\nreturn static_cast<int>(pagoda::live_objects());\n}\n",
    ),
    "go": (
        "main.go",
        'package main\nimport ("context"; "errors"; "fmt"; "pagoda")\nvar _ = errors.Is\n'
        "func run(ctx context.Context) error {\nINSIDEreturn nil\n}\n"
        "func main() {\nif err := run(context.Background()); err != nil { panic(err) }\n"
        "if left := pagoda.LiveObjects(); left != 0 { panic(left) }\n}\n",
    ),
    "java": (
        "Main.java",
        "import ai.pagoda.*;\nimport java.nio.file.Path;\nimport java.util.Locale;\n"
        "import java.util.concurrent.CompletableFuture;\n"
        "public class Main {\npublic static void main(String[] arguments) {\nINSIDE"
        "if (Pagoda.liveObjects() != 0) throw new AssertionError(Pagoda.liveObjects());\n}\n}\n",
    ),
    "rust": ("main.rs", "fn main() -> pagoda::Result<()> {\nINSIDEOk(())\n}\n"),
}


def present(languages):
    return [name for name in languages if name not in ("go", "java") or name in LANGUAGES]


def examples(language, page):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def built(language, blocks, place, programs):
    """Examples with what a program has around them, built; what runs it."""
    name, around = AROUND[language]
    # The callbacks of C are functions of their own.
    outside = [block for block in blocks if re.match(r"(struct \w+|static .*) {", block)]
    inside = [block for block in blocks if block not in outside]
    (place / name).write_text(around.replace("OUTSIDE", "\n".join(outside)).replace("INSIDE", "\n".join(inside)))
    prefix, program = programs.prefix, place / "main"
    flags = [*programs.flags("--cflags", "--libs"), f"-Wl,-rpath,{prefix}/lib"]
    if language == "c":
        build("cc", "-std=c11", *WARNINGS, place / name, "-o", program, *flags)
    elif language == "cpp":
        build("c++", "-std=c++17", *WARNINGS, place / name, "-o", program, *flags)
    elif language == "go":
        binding = f"require pagoda v0.0.0\nreplace pagoda => {ROOT}/bindings/go\n"
        (place / "go.mod").write_text(f"module m\ngo 1.24\n{binding}")
        programs.go_build(place, program)
    elif language == "java":
        jar = prefix / "share/java/pagoda.jar"
        build("javac", "-Xlint:all", "-Werror", "-cp", jar, "-d", place, place / name)
        return [shutil.which("java"), "-cp", f"{jar}:{place}", "Main"], {}
    else:
        crate = ROOT / "target/release"
        found = ["--extern", f"pagoda={crate}/libpagoda.rlib", "-L", f"dependency={crate}/deps"]
        build("rustc", "--edition=2024", "-Dwarnings", place / name, "-o", program, *found)
        return [program], programs.onnxruntime()
    return [program], {}


def scores_of_the_example():
    events = [{"movie": 17, "rating": 5, "time": 0}, {"movie": 4, "rating": 3, "time": 0}]
    asked = {"keys": {}, "events": events, "candidates": [{"movie": movie} for movie in (8, 15, 16)], "now": 0}
    return Oracle(CONFIG, load_file(HERE / "weights.safetensors")).scores([asked])[:, 0]


@pytest.mark.parametrize("language", ["c", "rust"])
def test_the_example_of_the_readme_ranks(programs, folder, tmp_path, language):
    (block,) = examples(language, "README.md")
    if language == "rust":
        block = f"use pagoda::engine::{{Columns, Engine, EngineOptions, Events, RankRequest}};\n{block}"
    command, environment = built(language, [block], tmp_path, programs)
    done = call(*command, env=environment, cwd=folder)
    scores = [float(line) for line in done.stdout.split()]
    assert np.allclose(scores, scores_of_the_example(), atol=1e-4) and done.stderr == ""


@pytest.mark.parametrize("language", present(AROUND))
def test_the_page_of_a_language_is_a_program(programs, pagoda, folder, tmp_path, language):
    """It opens, ranks, generates, streams, cancels and closes, and leaves nothing open."""
    # The feature `futures` is not in the library as it is installed: the crate's reference has that example too, as a test.
    blocks = [block for block in examples(language, f"sdk/docs/{language}.md") if "futures_core" not in block]
    command, environment = built(language, blocks, tmp_path, programs)
    (tmp_path / "ranker").symlink_to(folder / "model")
    (tmp_path / "model").symlink_to(LLAMA)
    # Java prints what the locale can.
    environment |= {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    *scores, rest = done.stdout.decode().split("\n", 3)
    assert np.allclose([float(score) for score in scores], scores_of_the_example(), atol=1e-4)
    asked = {"do_sample": -1, "temperature": 0, "ignore_eos": 0, "max_new_tokens": 32}
    with Generator(pagoda) as generator:
        answer = generator.answer("The capital of France is", **asked).text + "\n"
    assert rest.startswith(2 * answer)
    assert int(re.fullmatch(r"(\d+) tokens until then\n", rest[2 * len(answer) :])[1]) <= 32


# ---- what is installed -------------------------------------------------------------------------------------------


def symbols(*arguments):
    lines = call("nm", "--format=posix", *arguments).stdout.splitlines()
    return sorted(line.split()[0] for line in lines if " " in line)


def test_the_libraries_have_the_names_of_the_list_and_no_other(prefix):
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    lib = prefix / "lib"
    assert os.readlink(lib / "libpagoda.so") == "libpagoda.so.1"
    assert os.readlink(lib / "libpagoda.so.1") == f"libpagoda.so.1.{version}"
    assert "[libpagoda.so.1]" in call("readelf", "-d", lib / "libpagoda.so").stdout
    assert symbols("-D", "--defined-only", lib / "libpagoda.so") == EXPORTS
    assert symbols("--extern-only", "--defined-only", lib / "libpagoda.a") == EXPORTS


def test_nothing_leads_back_to_where_it_was_built_or_installed(prefix, here):
    texts = [path for end in ("*.pc", "*.cmake") for path in prefix.rglob(end)]
    assert len(texts) == 3
    for path in texts:
        text = path.read_text()
        assert str(ROOT) not in text and "/opt/pagoda" not in text and "@" not in text, path
    for path in (prefix / "lib").glob("*.so"):
        assert "PATH" not in re.sub(r"\[\$ORIGIN\]|.*\$ORIGIN.*", "", call("readelf", "-d", path).stdout), path
    assert not [path for path in prefix.rglob("*") if path.is_symlink() and not path.exists()]


def test_the_command_finds_onnx_runtime(prefix, folder):
    line = json.dumps({"user": 1, "events": {"movie": [5], "rating": [4]}, "candidates": [7, 8]})
    for environment, command in [({}, prefix / "bin/pagoda"), ({"PATH": str(prefix / "bin")}, "pagoda")]:
        found = shutil.which(command, path=environment.get("PATH"))
        asked = [command, "rank", folder / "model", "--json"]
        done = subprocess.run(asked, executable=found, env=environment, input=line, text=True, capture_output=True)
        assert done.returncode == 0 and json.loads(done.stdout)["computed_rows"] == 1, done.stderr


def test_another_onnx_runtime_in_lib_is_left_alone(programs, prefix, here, folder):
    assert not list((prefix / "lib").glob("libonnxruntime*"))
    shared = here / "shared"
    shutil.copytree(prefix / "lib", shared / "lib", copy_function=os.link, symlinks=True)
    (shared / "lib/libonnxruntime.so.1").write_text("another package's, and older")
    run(programs("c"), folder, LD_LIBRARY_PATH=str(shared / "lib"))


def test_a_missing_onnx_runtime_is_told(programs, prefix, here, folder):
    bare = here / "bare"
    shutil.copytree(prefix / "lib", bare / "lib", copy_function=os.link, symlinks=True)
    shutil.rmtree(bare / "lib/pagoda")
    # Which the loader looks at before the program's own RUNPATH.
    done = run(programs("c"), folder, code=1, LD_LIBRARY_PATH=str(bare / "lib"))
    assert "ONNX Runtime can not be loaded" in done.stderr and f"beside {bare}/lib/libpagoda.so.1." in done.stderr
    alone, _ = programs("c-static")
    done = run((alone, {}), folder, code=1)
    assert "ONNX Runtime can not be loaded" in done.stderr and f"beside {alone[0]}" in done.stderr


VERSIONS = [("", True), ("0.1", True), ("0.1.0 EXACT", True), ("0.1.1", False), ("0.2", False), ("1.0", False)]


@pytest.mark.parametrize("asked, found", VERSIONS)
def test_cmake_takes_a_version_that_fits(prefix, tmp_path, asked, found):
    begin = "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n"
    (tmp_path / "CMakeLists.txt").write_text(f"{begin}find_package(Pagoda {asked})\nmessage(found=${{Pagoda_FOUND}})\n")
    done = call("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}", env=BUILD)
    assert f"found={int(found)}" in done.stderr


def test_licences_are_passed_on(prefix):
    doc = prefix / "share/doc/pagoda"
    assert "Apache License" in (doc / "LICENSE").read_text() and "MIT" in (doc / "LICENSE.onnxruntime").read_text()
    notices = (doc / "NOTICES.rust").read_text()
    for crate in "sled", "ring", "clap", "redis":
        assert re.search(rf"^{crate} \d+\.\d+\.\d+: ", notices, re.MULTILINE), crate
    # A dependency of tests alone.
    assert "cbindgen" not in notices


def test_shells_complete_the_command(prefix):
    share = prefix / "share"
    bash = share / "bash-completion/completions/pagoda"
    for path in bash, share / "zsh/site-functions/_pagoda", share / "fish/vendor_completions.d/pagoda.fish":
        assert "completions" in path.read_text()
    call("bash", "-n", bash)


def test_uninstall_leaves_no_file(here, prefix):
    shutil.copytree(prefix, here / "other/p", copy_function=os.link, symlinks=True)
    build("make", "-s", "-C", ROOT, "uninstall", f"DESTDIR={here}/other", "PREFIX=/p")
    assert [path for path in (here / "other").rglob("*") if not path.is_dir()] == []


def test_dist_is_what_is_installed(prefix, tmp_path):
    """To the byte, though it was put together another time; and with nothing of who did it and when."""
    build("make", "-s", "-C", ROOT, "dist", "COMPRESS=gzip -n1")
    (path,) = (ROOT / "target/dist").glob("*.tar.gz")
    top, time = path.name.removesuffix(".tar.gz"), int(build("git", "-C", ROOT, "log", "-1", "--format=%ct"))
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path, filter="data")
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, time)}
    assert {member.name.split("/")[0] for member in members} == {top}
    for file in [file for file in (tmp_path / top).rglob("*") if file.is_file()]:
        assert filecmp.cmp(file, prefix / file.relative_to(tmp_path / top), shallow=False), file
