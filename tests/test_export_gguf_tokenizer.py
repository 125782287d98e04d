"""The tokenizer.json that is made of a GGUF file gives the ids of the model's own tokenizer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

from pagoda.export import ExportError  # noqa: E402
from pagoda.export.readers.gguf import open_gguf  # noqa: E402
from pagoda.export.readers.gguf_pretokenizers import PRE  # noqa: E402
from tiny_gguf import CONTROL, Tiny, sentencepiece  # noqa: E402

HERE = Path(__file__).parent
SMOLLM2 = Path(os.environ.get("PAGODA_SMOLLM2", HERE.parent / "target/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
WITH_SMOLLM2 = pytest.mark.skipif(
    not SMOLLM2.is_file(), reason=f"{SMOLLM2} is not there: `make model-smollm2`, or set PAGODA_SMOLLM2"
)
IDS = HERE / "data/llm/tokenizer-smollm2.json"


def tiny(metadata, architecture="llama"):
    """A model with other tokenizer metadata, its vocabulary's rows as many as its tokens."""
    made = Tiny(architecture, layers=1)
    made.metadata |= metadata
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made.theirs[name] = np.zeros((made.vocab(), 64), np.float32)
    return made


@pytest.fixture
def read(tmp_path):
    def read(metadata=(), architecture="llama"):
        return open_gguf(tiny(dict(metadata), architecture).write(tmp_path / "tiny.gguf"))

    return read


@pytest.fixture(scope="module")
def smollm2():
    return open_gguf(SMOLLM2)


def encoder(checkpoint):
    return tokenizers.Tokenizer.from_str(json.dumps(checkpoint.tokenizer))


def test_byte_level_merges_in_order(read):
    made = encoder(read())
    pieces = ["hello", "\u0120hello", "\u0120", "he", "\u0120", "ll", "a", "m", "a"]
    assert made.encode("hello hello he llama").tokens == pieces
    text = "hello w\u00f6rld \u4f60\n\t\U0001f600"
    assert made.decode(made.encode(text).ids) == text


def test_added_tokens_are_found_first_and_control_tokens_are_special(read):
    made = encoder(read())
    ids = made.encode("hello<|end|><tool> hello").ids
    assert [made.id_to_token(token) for token in ids] == ["hello", "<|end|>", "<tool>", "\u0120hello"]
    assert made.decode(ids) == "hello<tool> hello"
    assert made.decode(ids, skip_special_tokens=False) == "hello<|end|><tool> hello"


def test_bos_and_eos_are_added_where_the_file_says_so(read):
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    checkpoint = read(flags)
    assert encoder(checkpoint).encode("hello").tokens == ["<|begin|>", "hello", "<|end|>"]
    pair = ["<|begin|>", "hello", "<|end|>", "<|begin|>", "he", "<|end|>"]
    assert encoder(checkpoint).encode("hello", "he").tokens == pair
    assert encoder(checkpoint).encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert checkpoint.tokenizer_config["add_bos_token"] is True
    # Llama 3's are known to begin with it where the file does not say.
    assert encoder(read({"tokenizer.ggml.pre": "llama-bpe"})).encode("he").tokens == ["<|begin|>", "he"]
    assert encoder(read()).encode("he").tokens == ["he"]


def test_sentencepiece_merges_by_score(read):
    made = encoder(read(sentencepiece()))
    assert made.encode("hello world").tokens == ["<s>", "\u2581hello", "\u2581wor", "ld"]
    assert made.encode("hello", add_special_tokens=False).tokens == ["\u2581hello"]
    assert made.decode(made.encode("hello world").ids) == "hello world"


def test_sentencepiece_falls_back_to_bytes(read):
    made = encoder(read(sentencepiece()))
    assert made.encode("\u00e9\n", add_special_tokens=False).tokens == ["\u2581", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert made.decode(made.encode("w \u4f60\U0001f600\n").ids) == "w \u4f60\U0001f600\n"


def test_sentencepiece_begins_every_piece_of_text_with_a_space(read):
    made = encoder(read(sentencepiece()))
    assert made.encode("hello<mark>hello").tokens == ["<s>", "\u2581hello", "<mark>", "\u2581hello"]
    bare = encoder(read(sentencepiece() | {"tokenizer.ggml.add_space_prefix": False}))
    assert bare.encode("hello<mark> hello").tokens == ["<s>", "hello", "<mark>", "\u2581hello"]
    assert bare.decode(bare.encode(" hello").ids) == " hello"


def test_special_tokens_of_phi_3_take_the_white_space_behind_them(read):
    def pieces(name):
        made = encoder(read(sentencepiece() | {"general.name": name}, "phi3"))
        return [made.id_to_token(token) for token in made.encode("</s> hello").ids]

    assert pieces("Phi-3 Mini") == ["<s>", "</s>", "\u2581hello"]
    assert pieces("another") == ["<s>", "</s>", "\u2581", "\u2581hello"]


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["it", "'s", "\u0120", "\u012012", "\u012011234", "!?", "\u010a", "\u010a", "A", "'", "S"]),
        ("smollm", ["it", "'s", "\u0120\u0120", "1", "2"]),
        ("llama-bpe", ["it", "'s", "\u0120", "\u0120", "123", "4", "\u0120a", "!?\u010a\u010a", "A", "'S"]),
        ("qwen2", ["it", "'s", "\u0120", "\u0120", "1", "2"]),
        ("tekken", ["Camel", "Case", "/\u010a"]),
        ("gpt-4o", ["Camel", "Case's", "\u0120", "123", "4"]),
        ("deepseek-coder", ["it", "'", "s", "\u0120", "\u0120a", "\u010a", "\u010a"]),
        ("deepseek-v3", ["123", "4", "\u0120a", "'s"]),
        ("default", ["it", "'", "s", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, pieces):
    texts = {
        "gpt-2": "it's  12 11234!?\n\nA'S",
        "smollm": "it's  12",
        "llama-bpe": "it's  1234 a!?\n\nA'S",
        "qwen2": "it's  12",
        "tekken": "CamelCase/\n",
        "gpt-4o": "CamelCase's 1234",
        "deepseek-coder": "it's  a\n\n",
        "deepseek-v3": "1234 a's",
        "default": "it's1234",
    }
    steps = {"type": "Sequence", "pretokenizers": PRE[pre].steps}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], "pre_tokenizer": steps, "model": model}
    splitter = tokenizers.Tokenizer.from_str(json.dumps(shell)).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(texts[pre])] == pieces


def test_qwens_text_is_composed_first(read):
    made = encoder(read({"tokenizer.ggml.pre": "qwen2"}))
    assert made.encode("e\u0301").ids == made.encode("\u00e9").ids


def test_ends_of_turns_end_generation(read):
    base = tiny({}).metadata
    tokens = [*base["tokenizer.ggml.tokens"], "<|eot_id|>", "<|im_end|>", "<end_of_turn>"]
    types = [*base["tokenizer.ggml.token_type"], CONTROL, CONTROL, 1]
    checkpoint = read({
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.padding_token_id": 2,
        "general.sampling.temp": 0.5,
        "tokenizer.chat_template": "{{ messages }}",
    })
    count = len(tokens)
    # "<|end|>" is its eos; "<end_of_turn>" is no control token here.
    assert checkpoint.generation_config == {
        "bos_token_id": 0, "pad_token_id": 2, "eos_token_id": [1, count - 3, count - 2], "temperature": 0.5,
    }  # fmt: skip
    assert checkpoint.chat_template == "{{ messages }}"
    names = checkpoint.tokenizer_config
    assert (names["eos_token"], names["pad_token"]) == ("<|end|>", "<tool>")
    assert read().generation_config == {"bos_token_id": 0, "eos_token_id": 1} and read().chat_template is None


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert': known are gpt2 .* and llama"),
        ({"pre": "no-such"}, "tokenizer.ggml.pre is 'no-such': how it splits text is not known"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["h e", "h x"]}, r"tokenizer.ggml.merges\[1\] is 'h x': it has to be two tokens that make a third"),
        ({"merges": ["he"]}, r"tokenizer.ggml.merges\[0\] is 'he'"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 values for"),
        ({"eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999, with 26"),
        ({"bos_token_id": None, "add_bos_token": True}, "there is no tokenizer.ggml.bos_token_id"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_tokenizers_that_do_not_fit_are_refused(metadata, words, read):
    with pytest.raises(ExportError, match=words):
        read({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def test_a_file_without_tokens_is_refused(tmp_path):
    made = Tiny("llama", layers=1)
    made.metadata["tokenizer.ggml.tokens"] = None
    with pytest.raises(ExportError, match="tokenizer.ggml.tokens is missing"):
        open_gguf(made.write(tmp_path / "tiny.gguf"))


def test_a_token_that_is_there_twice_is_refused(read):
    tokens = [*tiny({}).metadata["tokenizer.ggml.tokens"]]
    tokens[-1] = "he"
    with pytest.raises(ExportError, match="has 'he' twice"):
        read({"tokenizer.ggml.tokens": tokens})


@WITH_SMOLLM2
def test_smollm2_gives_the_reference_ids_for_a_thousand_strings(smollm2):
    made = encoder(smollm2)
    expected = json.loads(IDS.read_text())
    assert len(expected["strings"]) == len(expected["ids"]) == 1000
    for text, ids in zip(expected["strings"], expected["ids"]):
        assert made.encode(text).ids == ids, repr(text)


@WITH_SMOLLM2
def test_smollm2_is_read(smollm2):
    read = smollm2
    config = read.config
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    assert (config["rope_theta"], config["vocab_size"], config["tie_word_embeddings"]) == (100000.0, 49152, True)
    kinds = [tensor.type for tensor in read.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"q4_1": 210, "q8_0": 1, "f32": 61}
    assert read.chat_template.startswith("{% for message in messages %}")
    assert read.generation_config["eos_token_id"] == [2, 0]
