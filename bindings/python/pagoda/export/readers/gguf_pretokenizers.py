r"""How `tokenizer.ggml.pre` splits text before byte-level BPE, as parts of tokenizer.json.

The expressions are those of the models' own tokenizer.json, where they are known; llama.cpp has them rewritten for its
engine. Seen with SmolLM2's vocabulary and the thousand strings of tests/data/llm: ids are llama.cpp's under every name
here, Qwen's on composed text. deepseek-coder differs in 7 strings, next to white space that is not ASCII: llama.cpp
replaces it before it looks for the range U+0800 to U+9FA5, which holds it.
"""

from typing import Any, TypeAlias

Step: TypeAlias = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf""" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}""",
)
# What llama.cpp does for files that do not say: no model's own.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _splits(*expressions: str) -> list[Step]:
    split: list[Step] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in expressions
    ]
    return [*split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]


def _gpt2(*before: Step) -> list[Step]:
    return [*before, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]


_DIGITS = {"type": "Digits", "individual_digits": True}


class Pre:
    """A pre-tokenizer, and what else models with it have in common."""

    def __init__(
        self, steps: list[Step], ignore_merges: bool = False, add_bos: bool = False, normalizer: Step | None = None
    ) -> None:
        self.steps, self.ignore_merges, self.add_bos, self.normalizer = steps, ignore_merges, add_bos, normalizer


_llama3 = Pre(_splits(_LLAMA3), ignore_merges=True, add_bos=True)
# Qwen's own tokenizer.json composes text (NFC) first; llama.cpp leaves that out.
_qwen2 = Pre(_splits(_QWEN2), normalizer={"type": "NFC"})
_digits = Pre(_gpt2(_DIGITS))

PRE = {
    "default": Pre(_splits(*_DEFAULT)),
    "gpt-2": Pre(_gpt2()),
    "phi-2": Pre(_gpt2()),
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "codeshell": _digits,
    "minerva-7b": _digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "smaug-bpe": Pre(_splits(_LLAMA3)),
    "dbrx": Pre(_splits(_LLAMA3)),
    "qwen2": _qwen2,
    "deepseek-r1-qwen": Pre(_splits(_QWEN2)),
    "megrez": Pre(_splits(_QWEN2)),
    "stablelm2": Pre(_splits(_QWEN2)),
    "tekken": Pre(_splits(_TEKKEN), ignore_merges=True, add_bos=True),
    "gpt-4o": Pre(_splits(_GPT4O)),
    "deepseek-coder": Pre(_splits(*_DEEPSEEK_CODER)),
    "deepseek-v3": Pre(_splits(*_DEEPSEEK_V3)),
}
