"""Special tokens and the defaults of generation, out of the four files in which a checkpoint may say them."""

from ..error import ExportError

# Defaults of a request that generation_config.json may set, with their types, the least and the most that they may be.
WHOLE, REAL = 2**31 - 1, 1e38
GENERATION = {
    "do_sample": (bool, False, True),
    "temperature": (float, 0, REAL),
    "top_k": (int, 0, WHOLE),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    # Logits are divided by it.
    "repetition_penalty": (float, 1e-6, REAL),
    "no_repeat_ngram_size": (int, 0, WHOLE),
    "max_new_tokens": (int, 1, WHOLE),
    "min_new_tokens": (int, 0, WHOLE),
}


def special(checkpoint, vocab_size):
    """The ids of special tokens: bos, eos (there may be several), pad, unk; None: the model has none."""
    eos = _id(checkpoint, "eos")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    # The token that ends a turn of the chat may be one that config.json does not call eos.
    turn = _by_text(checkpoint, "eos")
    eos += [turn] if turn is not None and turn not in eos else []
    # Old checkpoints of Llama have -1 where there is none.
    pad = _id(checkpoint, "pad")
    pad = None if pad == -1 else pad
    ids = {"bos": _id(checkpoint, "bos"), "eos": eos, "pad": pad, "unk": _by_text(checkpoint, "unk")}
    for name, value in ids.items():
        for token in value if name == "eos" else [value]:
            if token is not None and not (type(token) is int and 0 <= token < vocab_size):
                raise ExportError(
                    f"{checkpoint.source}: the {name} token is {token!r}: it has to be a number below vocab_size "
                    f"{vocab_size}"
                )
    return ids | {"add_bos": ids["bos"] is not None and _add_bos(checkpoint, ids["bos"])}


def generation(checkpoint):
    """What generation_config.json says of how to draw tokens."""
    found = {}
    for name, (kind, least, most) in GENERATION.items():
        value = checkpoint.generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float)):
            raise ExportError(f"generation_config.json: {name} is {value!r}: it has to be of type {kind.__name__}")
        # Not a number is not between them either.
        if not least <= value <= most or kind(value) != value:
            what = "a whole number" if kind is int else "a number"
            raise ExportError(
                f"generation_config.json: {name} is {value!r}: it has to be {what} from {least} to {most}"
            )
        found[name] = kind(value)
    least, most = found.get("min_new_tokens", 0), found.get("max_new_tokens", WHOLE)
    if least > most:
        raise ExportError(
            f"generation_config.json: min_new_tokens is {least}: it has to be at most max_new_tokens, {most}"
        )
    return found


def _id(checkpoint, name):
    for config in (checkpoint.generation_config, checkpoint.config):
        value = config.get(f"{name}_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else value
    return _by_text(checkpoint, name)


def of_template(checkpoint):
    """The texts of special tokens, by the names that chat templates have for them."""
    texts = {f"{name}_token": _text(checkpoint, name) for name in ("bos", "eos", "pad", "unk")}
    return {name: text for name, text in texts.items() if text is not None}


def _by_text(checkpoint, name):
    """The id of the token whose text tokenizer_config.json gives."""
    text = _text(checkpoint, name)
    return None if text is None else vocabulary(checkpoint).get(text)


def _text(checkpoint, name):
    text = checkpoint.tokenizer_config.get(f"{name}_token")
    text = text.get("content") if isinstance(text, dict) else text
    if text is not None and not isinstance(text, str):
        raise ExportError(f"{checkpoint.source}: tokenizer_config.json: {name}_token is {text!r}: it has to be a text")
    return text


def _add_bos(checkpoint, bos):
    """Whether the tokenizer puts the bos token before a text; its post-processor in tokenizer.json does it."""
    given = checkpoint.tokenizer_config.get("add_bos_token")
    if isinstance(given, bool):
        return given
    processor = checkpoint.tokenizer.get("post_processor") or {}
    if not isinstance(processor, dict):
        raise ExportError(f"{checkpoint.source}: tokenizer.json: post_processor has to be an object")
    for step in processor.get("processors") or [processor]:
        # There are templates that add the eos token alone.
        first = (step.get("single") or [{}])[0].get("SpecialToken")
        if first and step.get("type") == "TemplateProcessing":
            return bos in (step.get("special_tokens") or {}).get(first.get("id"), {}).get("ids", [])
    return False


def fitted(checkpoint, vocab_size):
    """The tokenizer.json, without added tokens that the model has no logits for. Tokenizers of models with images are shared with
    their text models, and have a token for them."""
    ids = vocabulary(checkpoint)
    added = checkpoint.tokenizer.get("added_tokens") or []
    beyond = {token["content"] for token in added if token["id"] >= vocab_size}
    most = max((id for text, id in ids.items() if text not in beyond), default=0)
    if most >= vocab_size:
        raise ExportError(
            f"{checkpoint.source}: tokenizer.json has the token {most}, and config.json has vocab_size {vocab_size}: the two do "
            "not belong together"
        )
    return checkpoint.tokenizer | {"added_tokens": [token for token in added if token["content"] not in beyond]}


def vocabulary(checkpoint):
    """The ids of all tokens of the tokenizer.json."""

    def wrong(what):
        return ExportError(f"{checkpoint.source}: tokenizer.json: {what}: it is damaged, or of another library")

    model, added = checkpoint.tokenizer.get("model"), checkpoint.tokenizer.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not vocab or not isinstance(vocab, (dict, list)):
        raise wrong("there is no vocabulary under model.vocab")
    if isinstance(vocab, list):
        # Unigram has a list of [text, score].
        if not all(isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocab):
            raise wrong("model.vocab is no list of texts with scores")
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    if not all(type(id) is int and id >= 0 for id in vocab.values()):
        raise wrong("model.vocab has an id that is no number")
    for token in added if isinstance(added, list) else [None]:
        if not (isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str)):
            raise wrong("an entry of added_tokens has no id or no content")
    return vocab | {token["content"]: token["id"] for token in added}
