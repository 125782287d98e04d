"""What the exporter makes of a checkpoint's special tokens and its defaults for generation."""

import re

import pytest
from pagoda.export import ExportError
from pagoda.export.llm import tokens
from pagoda.export.readers.checkpoint import Checkpoint

VOCABULARY = {"model": {"vocab": {"<unk>": 0, "<s>": 1, "</s>": 2}}}


def checkpoint(config=None, post_processor=None, **other):
    return Checkpoint("a folder", config or {}, {}, VOCABULARY | {"post_processor": post_processor}, **other)


def refused(make, *arguments):
    with pytest.raises(ExportError) as caught:
        make(*arguments)
    return str(caught.value)


def template(text, token):
    """A post-processor of tokenizer.json that puts one token before a text."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "special_tokens": {text: {"id": text, "ids": [token]}}}


def test_defaults_are_taken_as_their_types():
    given = {"do_sample": True, "temperature": 1, "top_k": 50.0, "top_p": 0, "max_new_tokens": 9, "max_length": 8}
    found = tokens.generation(checkpoint(generation_config=given))
    assert found == {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.0, "max_new_tokens": 9}
    assert isinstance(found["temperature"], float) and isinstance(found["top_k"], int)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"top_k": 0.5}, "top_k is 0.5: it has to be a whole number from 0 to 2147483647"),
        ({"top_k": float("inf")}, "top_k is inf: it has to be a whole number"),
        ({"temperature": float("nan")}, "temperature is nan: it has to be a number from 0 to"),
        ({"temperature": -1}, "temperature is -1: it has to be a number from 0 to"),
        ({"top_p": 1.5}, "top_p is 1.5: it has to be a number from 0 to 1"),
        ({"top_p": True}, "top_p is True: it has to be of type float"),
        ({"do_sample": 1}, "do_sample is 1: it has to be of type bool"),
        ({"min_p": "0.1"}, "min_p is '0.1': it has to be of type float"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it has to be a number from"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: it has to be a whole number from 1 to"),
        ({"min_new_tokens": 5, "max_new_tokens": 2}, "min_new_tokens is 5: it has to be at most max_new_tokens, 2"),
    ],
)
def test_defaults_that_can_not_be_are_refused(given, why):
    assert f"generation_config.json: {why}" in refused(tokens.generation, checkpoint(generation_config=given))


@pytest.mark.parametrize(
    ("processor", "added"),
    [
        (None, False),
        ({"type": "ByteLevel"}, False),
        (template("<s>", 1), True),
        (template("</s>", 2), False),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<s>", 1)]}, True),
    ],
)
def test_bos_is_added_if_the_tokenizer_does_it(processor, added):
    config = {"bos_token_id": 1, "eos_token_id": [2]}
    found = tokens.special(checkpoint(config, processor), 3)
    assert found == {"bos": 1, "eos": [2], "pad": None, "unk": None, "add_bos": added}
    given = {"add_bos_token": not added}
    assert tokens.special(checkpoint(config, processor, tokenizer_config=given), 3)["add_bos"] is not added
    # Where there is no such token none is added, whatever the files say.
    assert tokens.special(checkpoint({}, processor, tokenizer_config=given), 3)["add_bos"] is False


def test_no_padding_may_be_minus_one():
    assert tokens.special(checkpoint({"pad_token_id": -1}), 3)["pad"] is None


@pytest.mark.parametrize(("name", "value"), [("bos", [1]), ("eos", [2, 3]), ("eos", True), ("pad", -2)])
def test_tokens_that_can_not_be_are_refused(name, value):
    message = refused(tokens.special, checkpoint({f"{name}_token_id": value}), 3)
    assert re.search(rf"the {name} token is .*: it has to be a number below vocab_size 3", message), message
