"""GGUF metadata to Hugging Face's config.json.

Keys are those that Hugging Face's configurations have, with three things that it does not know:
- rope_scaling {"rope_type": "factors", "factors": [...]}: each inverse frequency is divided by its factor. llama.cpp's
  converter stores Llama 3's scaling that way (the tensor rope_freqs.weight), and not the numbers it comes from.
- position_embedding, Baichuan only: "rope" or "alibi". GGUF does not say; as in llama.cpp, 40 layers (13B) have ALiBi.
- sliding_window of Phi-3 is what the file says; llama.cpp itself attends to everything there.
"""

# GGUF's architecture: Hugging Face's model_type, architectures, activation.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM", "silu"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", "silu"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "silu"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", "gelu_pytorch_tanh"),
    "phi3": ("phi3", "Phi3ForCausalLM", "silu"),
    "baichuan": ("baichuan", "BaichuanForCausalLM", "silu"),
}

# Keys behind the architecture's name that are read below, or that change nothing in what the model computes.
READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count",
    "rope.dimension_count_swa", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
READ_OF_GEMMA = {"attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping"}
IGNORED = {"tensor_data_layout", "rope.scaling.finetuned", "expert_used_count", "mm.tokens_per_image"}


class Metadata:
    """The keys of the file's architecture, with errors that name them."""

    def __init__(self, file):
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise file.error("there is no general.architecture: this is no model of llama.cpp's, or is damaged")
        if self.architecture not in ARCHITECTURES:
            raise file.error(
                f"general.architecture is {self.architecture!r}: the exporter knows {', '.join(ARCHITECTURES)}"
            )

    def get(self, key, kind=None, default=None):
        """A value, or `default` where there is none. One value for each layer has to be the same for all."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return default
        if kind in (int, float) and not isinstance(value, (int, float, str, bool)):
            values = set(value)
            if len(values) != 1:
                raise self.error(key, f"is {_short(value)}: layers that differ are not supported")
            value = values.pop()
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if kind is not None and (not isinstance(value, kind) or isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is {_short(value)}: it has to be {'an integer' if kind is int else kind.__name__}")
        return value

    def size(self, key, default=None):
        """A positive integer that has to be there, unless there is a default."""
        value = self.get(key, int, default)
        if value is None:
            raise self.error(key, "is missing: the file is not complete, convert the model again")
        if value <= 0:
            raise self.error(key, f"is {value}: it has to be positive")
        return value

    def error(self, key, message):
        """An ExportError that names the file and the key."""
        return self.file.error(f"{self.architecture}.{key} {message}")


def config(file):
    """Hugging Face's config.json. What depends on tensors being there is asked of `file.entries`."""
    data = Metadata(file)
    _refuse_unknown(data)
    architecture = data.architecture
    model_type, class_name, activation = ARCHITECTURES[architecture]
    heads, hidden = data.size("attention.head_count"), data.size("embedding_length")
    kv_heads = data.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise data.error("attention.head_count", f"is {heads}, which is no multiple of the {kv_heads} key-value heads")
    head_dim = data.size("attention.key_length", hidden // heads)
    if data.size("attention.value_length", head_dim) != head_dim:
        raise data.error("attention.value_length", f"differs from key_length, {head_dim}: they have to be the same")
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        if data.size(key, head_dim) != head_dim:
            raise data.error(key, f"differs from key_length, {head_dim}: layers with a window have to have the same")
    epsilon = data.get("attention.layer_norm_rms_epsilon", float)
    if epsilon is None:
        raise data.error("attention.layer_norm_rms_epsilon", "is missing: convert the model again")
    made = {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_act": activation,
        "hidden_size": hidden,
        "intermediate_size": data.size("feed_forward_length"),
        "num_hidden_layers": data.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": data.size("context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": data.get("rope.freq_base", float, 10000.0),
        "vocab_size": _vocab_size(data),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "attention_bias": "blk.0.attn_q.bias" in file.entries,
        "mlp_bias": "blk.0.ffn_up.bias" in file.entries,
    }
    _rotation(data, made)
    window = data.get("attention.sliding_window", int, 0) or None
    {"gemma3": _gemma3, "baichuan": _baichuan}.get(architecture, _plain)(data, made, window)
    return made


def _refuse_unknown(data):
    """Refuses keys that nothing reads: most often they are a part of the arithmetic."""
    prefix = data.architecture + "."
    for key, value in data.file.metadata.items():
        name = key.removeprefix(prefix)
        if key == name or name in READ or name in IGNORED:
            continue
        if data.architecture == "gemma3" and name in READ_OF_GEMMA:
            continue
        if isinstance(value, (int, float)) and not value or name == "attention.causal" and value is True:
            continue
        raise data.error(name, f"is {_short(value)}: the exporter does not know what it does, and would leave it out")


def _vocab_size(data):
    entry = data.file.entries.get("token_embd.weight")
    if entry is None:
        raise data.file.error("there is no tensor token_embd.weight: the file is not complete, convert the model again")
    rows = entry.shape[0]
    for key, value in (
        (f"{data.architecture}.vocab_size", data.get("vocab_size", int)),
        ("the number of tokenizer.ggml.tokens", len(data.file.metadata.get("tokenizer.ggml.tokens", ())) or None),
    ):
        if value is not None and value != rows:
            raise data.file.error(f"{key} is {value}, and token_embd.weight has {rows} rows: they have to be the same")
    return rows


def _rotation(data, made):
    rotated = data.size("rope.dimension_count", made["head_dim"])
    if rotated > made["head_dim"] or rotated % 2:
        raise data.error("rope.dimension_count", f"is {rotated}, heads have {made['head_dim']}: it has to be even, "
                         "and no larger")  # fmt: skip
    if rotated != made["head_dim"]:
        if data.architecture != "phi3":
            raise data.error("rope.dimension_count", f"is {rotated}, heads have {made['head_dim']}: they have to agree")
        made["partial_rotary_factor"] = rotated / made["head_dim"]
    scaling = _scaling(data, made, rotated)
    if scaling:
        made["rope_scaling"] = scaling


def _scaling(data, made, rotated):
    factor = data.get("rope.scaling.factor", float) or data.get("rope.scale_linear", float) or 1.0
    # llama.cpp takes a factor without a type as linear.
    kind = data.get("rope.scaling.type", str, "linear")
    original = data.get("rope.scaling.original_context_length", int)
    factors = _factors(data, "rope_freqs.weight", rotated)
    if factors is not None:
        if kind not in ("none", "linear") or factor != 1.0:
            raise data.error("rope.scaling.type", f"is {kind!r} and there is rope_freqs.weight too: one can hold")
        return {"rope_type": "factors", "factors": factors}
    long, short = (_factors(data, f"rope_factors_{name}.weight", rotated) for name in ("long", "short"))
    if long is not None or short is not None:
        if long is None or short is None or original is None:
            raise data.file.error(
                "of rope_factors_long.weight, rope_factors_short.weight and rope.scaling.original_context_length one "
                "is missing: they come together, convert the model again"
            )
        made["original_max_position_embeddings"] = original
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention = data.get("rope.scaling.attn_factor", float)
        return scaling if attention is None else {**scaling, "attention_factor": attention}
    if data.get("rope.scaling.attn_factor", float, 1.0) != 1.0:
        raise data.error("rope.scaling.attn_factor", "is known with factors for long contexts alone: there are none")
    if kind == "yarn":
        return _yarn(data, made, factor, original)
    if kind not in ("none", "linear"):
        raise data.error("rope.scaling.type", f"is {kind!r}: none, linear, yarn or longrope with its tensors is read")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None


def _yarn(data, made, factor, original):
    if data.get("rope.scaling.yarn_ext_factor", float, 1.0) != 1.0:
        raise data.error("rope.scaling.yarn_ext_factor", "is not 1: YaRN is known with 1 alone")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or made["max_position_embeddings"],
    }
    for key, name in (("yarn_attn_factor", "attention_factor"), ("yarn_beta_fast", "beta_fast"),
                      ("yarn_beta_slow", "beta_slow")):  # fmt: skip
        value = data.get(f"rope.scaling.{key}", float)
        if value is not None:
            scaling[name] = value
    return scaling


def _factors(data, name, rotated):
    entry = data.file.entries.get(name)
    if entry is None:
        return None
    if entry.kind.name != "F32" or entry.shape != (rotated // 2,):
        raise data.file.error(
            f"{name} is {entry.kind.name}, shape {list(entry.shape)}: it has to be F32, [{rotated // 2}], a factor for "
            "each pair of rotated numbers"
        )
    return [float(str(value)) for value in entry.data]


def _plain(data, made, window):
    if data.architecture == "llama":
        if window is not None:
            made.update(model_type="mistral", architectures=["MistralForCausalLM"])
        made["sliding_window"] = window
    elif data.architecture == "phi3":
        made["sliding_window"] = window
        made.setdefault("original_max_position_embeddings", data.get("rope.scaling.original_context_length", int)
                        or made["max_position_embeddings"])  # fmt: skip
    elif window is not None:
        made.update(sliding_window=window, use_sliding_window=True, max_window_layers=0)
    if data.architecture in ("qwen2", "qwen3"):
        made.setdefault("use_sliding_window", False)


def _gemma3(data, made, window):
    pattern, layers = data.get("attention.sliding_window_pattern"), made["num_hidden_layers"]
    if window is None:
        local = [False] * layers
    elif pattern is None or isinstance(pattern, int) and not isinstance(pattern, bool):
        # llama.cpp takes 6 where the file does not say: five local layers, then a global one.
        period = 6 if pattern is None else pattern
        local = [period == 0 or layer % period < period - 1 for layer in range(layers)]
    else:
        local = [bool(value) for value in pattern]
    if len(local) != layers:
        raise data.error("attention.sliding_window_pattern", f"has {len(local)} values for {layers} layers")
    made["sliding_window"] = window
    made["layer_types"] = ["sliding_attention" if here else "full_attention" for here in local]
    made["rope_local_base_freq"] = data.get("rope.freq_base_swa", float, 10000.0)
    made["final_logit_softcapping"] = data.get("final_logit_softcapping", float) or None
    made["attn_logit_softcapping"] = None
    made["hidden_activation"] = made.pop("hidden_act")
    # The 27B model alone scales by its width and not by its heads; GGUF does not say, llama.cpp knows it by its layers.
    wide = layers == 62
    made["query_pre_attn_scalar"] = made["hidden_size"] // made["num_attention_heads"] if wide else made["head_dim"]


def _baichuan(data, made, window):
    if made["num_key_value_heads"] != made["num_attention_heads"]:
        raise data.error("attention.head_count_kv", "differs from head_count: Baichuan has as many of both")
    made["position_embedding"] = "alibi" if made["num_hidden_layers"] == 40 else "rope"
    if made["position_embedding"] == "alibi":
        # Hugging Face's 13B models have this key, and the 7B ones the other.
        made["model_max_length"] = made.pop("max_position_embeddings")
    if window is not None:
        raise data.error("attention.sliding_window", f"is {window}: Baichuan has none")


def _short(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
