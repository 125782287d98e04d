"""GGUF's tokenizer to Hugging Face's tokenizer.json, tokenizer_config.json and generation_config.json.

Two kinds are known: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece BPE with scores (Gemma's too). Ids
are those of the model's own tokenizer with special tokens parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gguf_file import File
from .gguf_pretokenizers import PRE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

# Control tokens that end a turn or a text. GGUF names one or two of them; models stop at all, as in llama.cpp.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
    "<eos>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip

# Defaults for generation that newer files carry.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass
class Made:
    """What a file's tokenizer becomes."""

    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    config: dict[str, Any]
    """The ids that config.json repeats."""


def tokenizer(file: File) -> Made:
    """The tokenizer of an open file."""
    vocabulary = Vocabulary(file)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(vocabulary.kind)
    if build is None:
        raise file.error(
            f"tokenizer.ggml.model is {vocabulary.kind!r}: known are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    parts = build(vocabulary)
    ids = vocabulary.special_ids(sentencepiece=vocabulary.kind == "llama")
    if ids["eos"] is None:
        raise file.error("tokenizer.ggml.eos_token_id is missing: nothing would end a text, convert the model again")
    add_bos = vocabulary.get("add_bos_token", parts.pop("add_bos"))
    add_eos = vocabulary.get("add_eos_token", False)
    if add_bos and ids["bos"] is None:
        raise file.error("tokenizer.ggml.add_bos_token is true, and there is no tokenizer.ggml.bos_token_id: set it")
    around = [ids["bos"] if add_bos else None, ids["eos"] if add_eos else None]
    added = _added_tokens(vocabulary, ids)
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(vocabulary, *around),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    names = {f"{name}_token": vocabulary.tokens[token] for name, token in ids.items() if token is not None}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": bool(add_bos),
        "add_eos_token": bool(add_eos),
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise file.error(f"tokenizer.chat_template is {type(template).__name__}: it has to be a string")
    generation = _generation(vocabulary, ids)
    config = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids[name] is not None}
    return Made(made, tokenizer_config, generation, template, config)


class Vocabulary:
    """The tokens of a file, checked against each other."""

    def __init__(self, file: File) -> None:
        self.file = file
        kind = self.text("model")
        if kind is None:
            raise file.error("tokenizer.ggml.model is missing: the file has no tokenizer, convert the model again")
        self.kind = kind
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise file.error("tokenizer.ggml.tokens is missing: the file has no vocabulary, convert the model again")
        # llama.cpp does so too: a token needs a text of its own.
        self.tokens: list[str] = [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)]
        self.ids = {text: token for token, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(text for token, text in enumerate(self.tokens) if self.ids[text] != token)
            raise file.error(f"tokenizer.ggml.tokens has {twice!r} twice: which id it stands for can not be known")
        self.types = self._for_each("token_type", NORMAL)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the tokenizer, or `default`."""
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string of the tokenizer, or `default`."""
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.file.error(f"tokenizer.ggml.{key} is {value!r}: it has to be a string")
        return value

    def scores(self) -> Sequence[float]:
        """SentencePiece's scores, which order its merges."""
        if self.get("scores") is None:
            raise self.file.error("tokenizer.ggml.scores is missing, which orders the merges: convert the model again")
        values: Sequence[float] = self._for_each("scores", 0.0)
        return values

    def special_ids(self, sentencepiece: bool) -> dict[str, int | None]:
        """Ids of bos, eos, unk and pad, None for what the model does not have."""
        # SentencePiece's own defaults, which llama.cpp takes where the file does not say.
        defaults = {"unk": 0, "bos": 1, "eos": 2} if sentencepiece else {}
        keys = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
        return {name: self.id(key, defaults.get(name)) for name, key in keys.items()}

    def id(self, key: str, default: int | None = None) -> int | None:
        """The id under a key of the metadata."""
        value = self.get(key, default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.file.error(f"tokenizer.ggml.{key} is {value!r}: it has to be an id")
        if not 0 <= value < len(self.tokens):
            raise self.file.error(f"tokenizer.ggml.{key} is {value}, with {len(self.tokens)} tokens: correct it")
        return value

    def _for_each(self, key: str, default: float) -> Any:
        values = self.get(key)
        if values is None:
            return [default] * len(self.tokens)
        if not isinstance(values, (list, np.ndarray)) or len(values) != len(self.tokens):
            count = len(values) if isinstance(values, (list, np.ndarray)) else "no"
            raise self.file.error(f"tokenizer.ggml.{key} has {count} values for {len(self.tokens)} tokens: correct it")
        return values


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.text("pre", "default")
    if name not in PRE:
        raise vocabulary.file.error(
            f"tokenizer.ggml.pre is {name!r}: how it splits text is not known here. Known are {', '.join(sorted(PRE))}"
        )
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise vocabulary.file.error("tokenizer.ggml.merges is missing, which byte-level BPE needs: convert again")
    pre = PRE[name]
    steps = pre.steps
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, _pairs(vocabulary, merges), ignore_merges=pre.ignore_merges),
        "add_bos": pre.add_bos,
    }


def _pairs(vocabulary: Vocabulary, merges: list[Any]) -> list[list[str]]:
    pairs = []
    for number, merge in enumerate(merges):
        # The space that divides a merge is not its first character.
        at = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = merge[: max(at, 0)], merge[at + 1 :]
        if at < 0 or any(text not in vocabulary.ids for text in (left, right, left + right)):
            raise vocabulary.file.error(
                f"tokenizer.ggml.merges[{number}] is {merge!r}: it has to be two tokens that make a third"
            )
        pairs.append([left, right])
    return pairs


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    prefix = vocabulary.get("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.id("unknown_token_id", 0) or 0
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace] if prefix else [replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, _merges(vocabulary), unknown=vocabulary.tokens[unknown], byte_fallback=True),
        "add_bos": True,
    }


def _merges(vocabulary: Vocabulary) -> list[list[str]]:
    """Merges that give SentencePiece's pieces: for each piece all its halves that are pieces, best score first.

    Where two halvings of one piece stand side by side SentencePiece takes the left one; the order here can not say
    that, and needs not: the longer left half is there first.
    """
    scores, ids = vocabulary.scores(), vocabulary.ids
    found: list[tuple[float, int, list[list[str]]]] = []
    for token, text in enumerate(vocabulary.tokens):
        if vocabulary.types[token] != NORMAL or len(text) < 2:
            continue
        halves = ((text[:at], text[at:]) for at in range(len(text) - 1, 0, -1))
        pairs = [[left, right] for left, right in halves if left in ids and right in ids]
        if pairs:
            found.append((-float(scores[token]), token, pairs))
    found.sort(key=lambda each: each[:2])
    return [pair for _, _, pairs in found for pair in pairs]


def _bpe(
    vocabulary: Vocabulary,
    merges: list[list[str]],
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _added_tokens(vocabulary: Vocabulary, ids: dict[str, int | None]) -> list[dict[str, Any]]:
    """Tokens that are found in text before everything else. Control and unknown tokens are special, others are not."""
    special = {token for token in ids.values() if token is not None} if vocabulary.get("token_type") is None else set()
    strips = _strips_right(vocabulary)
    return [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": token in special or vocabulary.types[token] in (CONTROL, UNKNOWN),
        }
        for token, text in enumerate(vocabulary.tokens)
        if token in special or vocabulary.types[token] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _strips_right(vocabulary: Vocabulary) -> bool:
    """Special tokens of Phi-3 take the white space behind them. GGUF does not say; llama.cpp knows them by name."""
    name = str(vocabulary.file.metadata.get("general.name", "")).lower()
    return vocabulary.kind == "llama" and ("phi-3" in name or "phi3" in name)


def _post_processor(vocabulary: Vocabulary, bos: int | None, eos: int | None) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None
    text = vocabulary.tokens

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        middle: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": kind}}]
        first = [] if bos is None else [{"SpecialToken": {"id": text[bos], "type_id": kind}}]
        last = [] if eos is None else [{"SpecialToken": {"id": text[eos], "type_id": kind}}]
        return first + middle + last

    used = {text[token]: token for token in (bos, eos) if token is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]} for name, token in used.items()
        },
    }


def _generation(vocabulary: Vocabulary, ids: dict[str, int | None]) -> dict[str, Any]:
    ends = [ids["eos"], *(vocabulary.id(key) for key in ("eot_token_id", "eom_token_id"))]
    ends += [vocabulary.ids[text] for text in ENDS if text in vocabulary.ids]
    ends = [token for token in dict.fromkeys(ends) if token is not None and _ends(vocabulary, ids, token)]
    made: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if ids[name] is not None}
    made["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for key, name in SAMPLING.items():
        value = vocabulary.file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            made[name] = value
    return made


def _ends(vocabulary: Vocabulary, ids: dict[str, int | None], token: int) -> bool:
    named = {ids["eos"], vocabulary.id("eot_token_id"), vocabulary.id("eom_token_id")}
    return token in named or vocabulary.types[token] == CONTROL
