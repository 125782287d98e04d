"""samples/serve: what it asks is answered, and what its dashboard shows is counted."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from capi import ROOT
from serving import HANGS, LLAMA, Server

SAMPLES = ROOT / "samples/serve"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-sample\n")
    with Server(f"tiny={LLAMA}", "--provider", "cpu", "--host-cache", "16MiB", "--keys-file", keys) as server:
        yield server


def run(command, **variables):
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=HANGS, env=environment)


def test_curl_and_python_are_answered(server):
    done = run([SAMPLES / "ask.sh"], URL=server.url, KEY="sk-sample")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"ready"' in done.stdout and "data: [DONE]" in done.stdout and "text_output" in done.stdout
    assert run([SAMPLES / "ask.sh"], URL=server.url, KEY="sk-wrong").returncode != 0
    done = run([sys.executable, SAMPLES / "ask.py", server.url], PAGODA_KEY="sk-sample")
    assert done.returncode == 0 and len(done.stdout) > 1, done.stderr


def test_the_dashboard_shows_what_is_counted(server):
    # A dashboard of nothing would pass: a request makes every name appear.
    headers = {"Authorization": "Bearer sk-sample"}
    server.post("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 2}, headers)
    counted = server.get("/metrics", headers)[2].decode()
    panels = json.loads((SAMPLES / "grafana.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expression in shown for name in re.findall(r"pagoda_\w+", expression)}
    assert len(names) >= 6
    for name in names:
        assert re.search(rf"^{name}[{{ ]", counted, re.MULTILINE), name


def test_the_configuration_is_one(tmp_path):
    text = (SAMPLES / "serve.toml").read_text()
    models = tomllib.loads(text)["model"]
    assert [model["name"] for model in models] == ["chat", "movies"]
    for model in models:
        text = text.replace(model["path"], str(LLAMA))
    (tmp_path / "serve.toml").write_text(text)
    with Server("--config", tmp_path / "serve.toml") as server:
        assert "chat (generate), movies (generate)" in server.line
