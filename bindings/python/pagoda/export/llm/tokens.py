"""Special tokens and the defaults of generation, out of the four files in which a checkpoint may say them."""

from ..error import ExportError

# Defaults of a request that generation_config.json may set, with their types.
GENERATION = {
    "do_sample": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "no_repeat_ngram_size": int,
    "max_new_tokens": int,
    "min_new_tokens": int,
}


def special(checkpoint, vocab_size):
    """The ids of special tokens: bos, eos (there may be several), pad, unk; None: the model has none."""
    eos = _id(checkpoint, "eos")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    # The token that ends a turn of the chat may be one that config.json does not call eos.
    turn = _by_text(checkpoint, "eos")
    eos += [turn] if turn is not None and turn not in eos else []
    ids = {"bos": _id(checkpoint, "bos"), "eos": eos, "pad": _id(checkpoint, "pad"), "unk": _by_text(checkpoint, "unk")}
    for name, value in ids.items():
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (isinstance(token, int) and 0 <= token < vocab_size):
                raise ExportError(
                    f"{checkpoint.source}: the {name} token is {token!r}: it has to be a number below vocab_size {vocab_size}"
                )
    return ids | {"add_bos": _add_bos(checkpoint)}


def generation(checkpoint):
    """What generation_config.json says of how to draw tokens."""
    found = {}
    for name, kind in GENERATION.items():
        value = checkpoint.generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float)):
            raise ExportError(f"generation_config.json: {name} is {value!r}: it has to be of type {kind.__name__}")
        found[name] = kind(value)
    return found


def _id(checkpoint, name):
    for config in (checkpoint.generation_config, checkpoint.config):
        value = config.get(f"{name}_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else value
    return _by_text(checkpoint, name)


def _by_text(checkpoint, name):
    """The id of the token whose text tokenizer_config.json gives."""
    text = checkpoint.tokenizer_config.get(f"{name}_token")
    text = text.get("content") if isinstance(text, dict) else text
    return None if text is None else vocabulary(checkpoint.tokenizer).get(text)


def _add_bos(checkpoint):
    """Whether the tokenizer puts the bos token before a text; its post-processor in tokenizer.json does it."""
    given = checkpoint.tokenizer_config.get("add_bos_token")
    if isinstance(given, bool):
        return given
    return "TemplateProcessing" in str(checkpoint.tokenizer.get("post_processor"))


def vocabulary(tokenizer):
    """The ids of all tokens of a tokenizer.json."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    # Unigram has a list of [text, score].
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
