"""SmolLM2 in every form that a generator runs: the same greedy tokens. Graphs of real exporters are in tests/generate/decoders.rs."""

import json
import os

import pytest
from capi import ROOT
from past_present import rewrite
from test_functional import SMOLLM2, SMOLLM2_PAGED
from test_generate import Generator

CASES = json.loads((ROOT / "tests/data/llm/smollm2.json").read_text())["cases"]
# `make soak` takes 200.
STEPS = int(os.environ.get("PAGODA_FUNCTIONAL_STEPS", "16"))
PROMPTS = [case["prompt_ids"] for case in CASES[:10]]
# Likelihoods that are closer may come out in another order where a product is summed up otherwise.
MARGIN = 1e-3


@pytest.fixture(scope="module")
def expected(pagoda):
    """The tokens of the paged form, and how far the likeliest one was from the second in each place."""
    with Generator(pagoda, SMOLLM2_PAGED) as generator:
        return [answers(generator, [prompt])[0] for prompt in PROMPTS]


def answers(generator, prompts):
    """Tokens with their margins, of prompts that run together."""
    streams = [generator.stream(prompt, max_new_tokens=STEPS, logprobs=2) for prompt in prompts]
    read = [stream.response() for stream in streams]
    margin = [[of.top[0][1] - of.top[1][1] for of in response.choices[0].logprobs] for response in read]
    return [(response.tokens, margins) for response, margins in zip(read, margin)]


@pytest.mark.parametrize("form", ["functional", "past-present", "group-query", "past-present, rewritten", "group-query, rewritten"])
def test_smollm2_gives_the_same_tokens_in_every_form(pagoda, expected, form, tmp_path, monkeypatch):
    folder, form, rewritten = SMOLLM2, *(form.split(", ") + [""])[:2]
    monkeypatch.setenv("PAGODA_REWRITTEN", str(int(bool(rewritten))))
    if form != "functional":
        folder = tmp_path / form
        rewrite(SMOLLM2, folder, form == "group-query")
    with Generator(pagoda, folder) as generator:
        alone = [answers(generator, [prompt])[0] for prompt in PROMPTS[:2]]
        together = answers(generator, PROMPTS)
    for found, wanted in [*zip(alone, expected), *zip(together, expected)]:
        same(found, wanted)


def same(found, expected):
    """Up to a place where two tokens were as likely as each other."""
    (tokens, _), (wanted, margins) = found, expected
    assert len(tokens) == STEPS
    different = next((at for at, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), STEPS)
    assert different == STEPS or margins[different] < MARGIN, (different, margins[different])
