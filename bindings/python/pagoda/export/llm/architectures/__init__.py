"""Architectures by the model_type of config.json. A new one is one file with `describe`, and one line here."""

from ...error import ExportError
from ...section import Lenient
from . import baichuan, gemma3, llama, mistral, phi3, qwen2, qwen3

BY_TYPE = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "baichuan": baichuan,
}


def describe(config, max_context=None):
    """The Decoder that a config.json describes. `max_context` is the length to serve, if it is not the model's own."""
    section = Lenient("config.json", config)
    known = ", ".join(BY_TYPE)
    kind = section.text("model_type", None)
    if kind is None:
        raise ExportError(f"config.json has no model_type: it has to be one of {known}")
    if kind not in BY_TYPE:
        raise ExportError(
            f"config.json: model_type {kind!r} is not known. The exporter has {known}. Another architecture needs a file "
            "in pagoda/export/llm/architectures that describes it"
        )
    quantised = section.section("quantization_config", None)
    if quantised is not None:
        method = quantised.text("quant_method", "unknown")
        raise ExportError(
            f"config.json: the weights are quantised by {method!r}. The exporter takes f32, f16 and bf16, and GGUF files: "
            "export the original model with --weights int4 or int8"
        )
    return BY_TYPE[kind].describe(section, max_context)
