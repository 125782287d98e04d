"""SmolLM2-135M-Instruct, a real language model: its logits in f32 against transformers, and how near the fast form comes.

tests/data/llm/make_smollm2.py says how the references were made. The folders are made by `make target/models/…`."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from capi import ROOT
from paged import Paged

F32, FAST = ROOT / "target/models/smollm2-f32", ROOT / "target/models/smollm2"
CASES = json.loads((ROOT / "tests/data/llm/smollm2.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model():
    return Paged(F32, pages=80)


@pytest.fixture
def sequence(model):
    yield "a"
    for name in list(model.tables):
        model.drop(name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_logits_and_greedy_tokens_are_those_of_transformers(model, sequence, case):
    """The prompt and all greedy tokens but the last in one run: each row says what comes next."""
    prompt, greedy = case["prompt_ids"], case["greedy32_ids"]
    logits = model.step({sequence: prompt + greedy[:-1]})[sequence]
    for place, listed in {str(len(prompt) - 1): case["top5"], **case.get("logits", {})}.items():
        for token, want in listed:
            assert abs(logits[int(place), token] - want) <= 2e-3
    for row, token, margin in zip(logits[len(prompt) - 1 :], greedy, case["margin"]):
        assert margin <= 0.01 or row.argmax() == token


@pytest.mark.parametrize("case", CASES[:4] + CASES[15:16], ids=lambda case: case["name"])
def test_chunks_and_single_tokens_give_the_same_logits(model, sequence, case):
    tokens = case["prompt_ids"] + case["greedy32_ids"]
    whole = model.step({sequence: tokens})[sequence]
    chunks = [model.step({"chunks": tokens[at : at + 50]})["chunks"] for at in range(0, len(tokens), 50)]
    assert np.abs(np.concatenate(chunks) - whole).max() <= 2e-3
    ahead = max(0, len(tokens) - 40)
    model.step({"single": tokens[:ahead]}, []) if ahead else None
    single = [model.step({"single": tokens[at : at + 1]})["single"] for at in range(ahead, len(tokens))]
    assert np.abs(np.concatenate(single) - whole[ahead:]).max() <= 2e-3


def test_sequences_in_one_batch_give_their_own_logits(model, sequence):
    prompts = {case["name"]: case["prompt_ids"] for case in CASES if len(case["prompt_ids"]) <= 60}
    together = model.step(prompts)
    for case in CASES[:6]:
        alone = model.step({"alone": case["prompt_ids"]})["alone"]
        model.drop("alone")
        assert np.abs(together[case["name"]] - alone).max() <= 2e-3


# ---- the fast form -----------------------------------------------------------------------------------------------

TEXT = np.load(ROOT / "tests/data/llm/smollm2-text.npy").astype(np.int32)
# What smollm2-quality.json has of llama.cpp on the same file, with the method.
QUALITY = json.loads((ROOT / "tests/data/llm/smollm2-quality.json").read_text())


def log_probabilities(model, windows, size):
    """Of each window of the text, which begins with an empty cache."""
    for window in TEXT[: windows * size].reshape(windows, size):
        logits = model.step({"window": window})["window"].astype(np.float64)
        model.drop("window")
        logits -= logits.max(-1, keepdims=True)
        yield window, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_fast_form_is_nearer_to_f32_than_llama_cpp(model, sequence):
    fast = Paged(FAST, pages=80)
    pairs = zip(log_probabilities(model, 3, 256), log_probabilities(fast, 3, 256))
    divergences = [(np.exp(exact) * (exact - near)).sum(-1) for (_, exact), (_, near) in pairs]
    assert np.concatenate(divergences).mean() <= QUALITY["llama_cpp"]["distance"]["kl_mean"]


@pytest.mark.skipif("SHIPPED" not in os.environ, reason="make soak runs it: it takes minutes")
def test_the_perplexity_of_the_fast_form_is_that_of_f32():
    fast = Paged(FAST, pages=80)
    rows = [logs[np.arange(len(window) - 1), window[1:]] for window, logs in log_probabilities(fast, 8, 1024)]
    perplexity = np.exp(-np.concatenate(rows).mean())
    assert abs(perplexity / QUALITY["f32"]["perplexity"] - 1) <= 0.005, perplexity


# ---- the table of quality ----------------------------------------------------------------------------------------


def test_the_table_of_quality_has_a_row_for_each_policy_format_and_length(tmp_path):
    few = ["--tokens", "120", "--facts", "1", "--fact-tokens", "64", "--chunk-size", "16", "--lengths", "32"]
    few += ["--policies", "dense,lastrec,h2o", "--formats", "native,int8", "--text", ROOT / "sdk/docs/generate.md"]
    script, command = ROOT / "samples/chat/quality.py", ROOT / "target/release/pagoda"
    jobs = ["--jobs", str(min(2, len(os.sched_getaffinity(0))))]
    subprocess.run([sys.executable, script, command, FAST, tmp_path, *few, *jobs], check=True)
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    named = {(row["policy"], row["format"], row["cache_length"]): row for row in rows}
    assert len(named) == len(rows) == 6
    # Everything was there to be read; with slots for a third of it something is lost.
    for form in "native", "int8":
        assert named["dense", form, None]["perplexity"] < named["lastrec", form, 32]["perplexity"]
        assert (named["dense", form, None]["found"], named["dense", form, None]["facts"]) == (1, 1)
    assert named["h2o", "native", 32]["bytes"] == 32 * 46080
    assert (tmp_path / "quality.md").read_text().count("\n") == 8
    assert ElementTree.parse(tmp_path / "quality.svg").getroot().tag.endswith("svg")
