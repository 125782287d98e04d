"""Reads a GGUF file as a checkpoint with Hugging Face's names, shapes, layout, configuration and tokenizer."""

from . import gguf_config, gguf_names, gguf_tokenizer
from .checkpoint import Checkpoint
from .gguf_file import open_file
from .gguf_tensors import GgufTensor, StackedTensor, unrotated

# Read into the configuration, or left over from converters of 2023 and never read by llama.cpp.
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LEFT_OVER = (".attn_rot_embd.weight", ".attention.rotary_emb.inv_freq")


def open_gguf(path):
    """A GGUF file, or the first of a model in several, as a `Checkpoint`. No weight is read yet.

    - Query and key rows of llama and baichuan files come in Hugging Face's order.
    - Baichuan's query, key and value come as the one tensor W_pack, as Hugging Face has it.
    - Gemma's norms come less 1, as Hugging Face has them; adding 1 in f32 gives what llama.cpp multiplies by.
    - For keys of the configuration that Hugging Face does not know, see gguf_config.
    """
    file = open_file(path)
    config = gguf_config.config(file)
    tensors = _tensors(file, config)
    made = gguf_tokenizer.tokenizer(file)
    config.update(made.config)
    return Checkpoint(
        source=str(file.path),
        config=config,
        tensors=tensors,
        tokenizer=made.tokenizer,
        tokenizer_config=made.tokenizer_config,
        generation_config=made.generation_config,
        chat_template=made.chat_template,
    )


def _tensors(file, config):
    architecture = file.metadata["general.architecture"]
    found, used = {}, set(NOT_WEIGHTS)
    for name, place in gguf_names.places(architecture, config).items():
        missing = [part for part in place.parts if part not in file.entries]
        if missing and not place.required:
            continue
        if missing:
            raise file.error(
                f"there is no tensor {missing[0]} (for {name}), which {architecture} models have: the file is not "
                "complete, convert the model again"
            )
        used.update(place.parts)
        found[name] = _tensor(file, config, name, place)
    left = sorted(name for name in file.entries if name not in used and not name.endswith(LEFT_OVER))
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise file.error(f"{architecture} models have no such tensors: {shown}. The exporter would leave them out")
    return found


def _tensor(file, config, name, place):
    parts = []
    for number, part in enumerate(place.parts):
        entry, heads = file.entries[part], place.heads[number] if place.heads else 0
        shape = (place.shape[0] // len(place.parts), *place.shape[1:])
        if entry.shape != shape:
            raise file.error(
                f"{part} has shape {list(entry.shape)}, the metadata call for {list(shape)}: the file is damaged"
            )
        order = unrotated(heads, config["head_dim"]) if heads else None
        parts.append(GgufTensor(file, name, entry, order, place.minus_one))
    return parts[0] if len(parts) == 1 else StackedTensor(name, parts)
