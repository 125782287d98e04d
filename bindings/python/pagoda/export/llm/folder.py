"""Writes the folder of a language model: model.onnx, weights.bin, the tokenizer, the chat template and pagoda.json."""

import json
import math
from dataclasses import replace

from .. import folder, model
from ..error import ExportError
from ..progress import Progress
from . import architectures, functional, graph, tokens
from .architectures import gemma3
from .weights import Weights

KIND = "generate"
CPU_MODEL = "model.cpu.onnx"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
PAGE_SIZE = 32
PAGED, FUNCTIONAL = FORMS = ("paged", "functional")


def write(checkpoint, out, force=False, compute="f32", weights="native", kv="native", max_context=None, form=PAGED):
    """Makes the folder `out` whole or not at all, and returns what pagoda.json says."""
    if checkpoint.config.get("model_type") == "gemma3":
        checkpoint = gemma3.text_part(checkpoint)
    decoder = architectures.describe(checkpoint.config, max_context)
    checkpoint = replace(checkpoint, tokenizer=tokens.fitted(checkpoint, decoder.vocab_size))
    _check(decoder, checkpoint, kv)
    if compute == "f16" and decoder.no_f16:
        raise ExportError(f"--compute f16: {decoder.architecture} can not: {decoder.no_f16}. Use bf16 or f32")
    if form == FUNCTIONAL and kv != "native":
        raise ExportError(f"--kv {kv}: the functional form has native pages alone: leave it out, or export the paged form")

    def fill(made):
        graphs = {}

        def add(initializers):
            graphs.update(_graphs(decoder, checkpoint, initializers, compute, weights, kv, form))
            return graphs

        files = model.write_streamed(made, add)
        text = json.dumps(checkpoint.tokenizer, ensure_ascii=False, separators=(",", ":"))
        (made / TOKENIZER).write_text(text, encoding="utf-8")
        files[TOKENIZER] = folder.described(made / TOKENIZER)
        if checkpoint.chat_template:
            (made / TEMPLATE).write_bytes(_utf8(checkpoint))
            files[TEMPLATE] = folder.described(made / TEMPLATE)
        return _manifest(decoder, checkpoint, compute, weights, kv, form, graphs.get(CPU_MODEL)) | {"files": files}

    return folder.write(out, force, KIND, fill)


def _graphs(decoder, checkpoint, initializers, compute, stored, kv, form):
    """The graph, and the one for the CPU, where an operator of its own multiplies by blocks. Both have the same weights."""
    total = sum(math.prod(shape) for shape in decoder.tensors().values())
    with Progress("Writing weights", total) as progress:
        weights = Weights(checkpoint, initializers, compute, stored, progress)
        if form == FUNCTIONAL:
            return {model.MODEL: functional.build(decoder, weights, compute)}
        graphs = {model.MODEL: graph.build(decoder, weights, compute, kv, PAGE_SIZE)}
    if stored != "native" and compute == "f32":
        graphs[CPU_MODEL] = graph.build(decoder, weights, compute, kv, PAGE_SIZE, for_cpu=True)
    return graphs


def _check(decoder, checkpoint, kv):
    """Refuses weights that are missing, left over, or of other shapes than the configuration says."""
    wanted, found = decoder.tensors(), checkpoint.tensors
    for name, shape in wanted.items():
        if name not in found:
            raise ExportError(
                f"{checkpoint.source}: the weight {name} {list(shape)} is missing, which config.json with model_type "
                f"{decoder.architecture!r} needs"
            )
        if tuple(found[name].shape) != shape:
            raise ExportError(
                f"{checkpoint.source}: {name} has the shape {list(found[name].shape)}, and by config.json it has "
                f"{list(shape)}: the two do not belong together"
            )
    # A tied head is often stored too; older checkpoints have the rotation's frequencies.
    ignored = ("lm_head.weight",) if decoder.head.parts == (decoder.embedding,) else ()
    left = [name for name in found if name not in wanted and name not in ignored and not name.endswith("rotary_emb.inv_freq")]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ExportError(
            f"{checkpoint.source}: the weight {left[0]}{more} has no place in model_type {decoder.architecture!r}: the model is "
            "of another architecture than config.json says, or its configuration lacks something"
        )
    if kv == "int4" and decoder.head_size % 2:
        raise ExportError(f"--kv int4 needs heads of an even size, and they have {decoder.head_size}")


def _utf8(checkpoint):
    try:
        return checkpoint.chat_template.encode()
    except UnicodeEncodeError as error:
        raise ExportError(f"{checkpoint.source}: the chat template is no text that UTF-8 can hold: {error}") from None


def _manifest(decoder, checkpoint, compute, weights, kv, form, for_cpu):
    return {
        "model": model.MODEL,
        **({} if form == PAGED else {"form": form}),
        **({} if for_cpu is None else {"cpu_model": CPU_MODEL}),
        "architecture": decoder.architecture,
        "compute": compute,
        "weights": weights,
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "attention": {
            "layers": len(decoder.layers),
            "heads": decoder.heads,
            "windows": [layer.window for layer in decoder.layers],
        },
        "kv": {
            "layers": len(decoder.layers),
            "heads": decoder.kv_heads,
            "head_size": decoder.head_size,
            "page_size": PAGE_SIZE,
            "type": compute,
            "format": kv,
            "bytes_per_token": graph.bytes_per_token(decoder, compute, kv),
        },
        "limits": {"max_context": decoder.max_context},
        "tokens": tokens.special(checkpoint, decoder.vocab_size),
        "generation": tokens.generation(checkpoint),
        "text": {
            "tokenizer": TOKENIZER,
            "chat_template": TEMPLATE if checkpoint.chat_template else None,
            "template_tokens": tokens.of_template(checkpoint),
        },
        **(_functional_names(decoder) if form == FUNCTIONAL else _paged_names(decoder, kv, for_cpu)),
    }


def _paged_names(decoder, kv, for_cpu):
    layers = range(len(decoder.layers))
    quantised = [graph.scales(layer) for layer in layers] if kv != "native" else []
    pools = [graph.pool(layer) for layer in layers]
    outputs = [] if for_cpu is None else [output.name for output in for_cpu.graph.output]
    return {
        "inputs": {
            **{name: name for name in graph.INDICES},
            "positions": "positions" if decoder.ropes else None,
            "kv_pools": pools,
            "kv_scales": quantised,
        },
        "outputs": {
            "logits": graph.LOGITS,
            **({"logits_max": graph.LOGITS_MAX} if graph.LOGITS_MAX in outputs else {}),
            "kv_pools": [f"{name}_out" for name in pools],
            "kv_scales": [f"{name}_out" for name in quantised],
        },
    }


def _functional_names(decoder):
    layers = range(len(decoder.layers))
    return {
        "inputs": {
            "input_ids": functional.INPUT_IDS,
            "position_ids": functional.POSITIONS,
            "key_slots": functional.KEY_SLOTS,
            "value_slots": functional.VALUE_SLOTS,
            "attention_mask": functional.MASK,
            "kv_pools": [functional.pool(layer) for layer in layers],
        },
        "outputs": {
            "logits": graph.LOGITS,
            "new_keys": [functional.new_key(layer) for layer in layers],
            "new_values": [functional.new_value(layer) for layer in layers],
        },
    }
