"""Which tensors a GGUF file of an architecture holds, under which of Hugging Face's names, in which shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Place:
    """Where a tensor of the model is in the file."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """GGUF's names: one, or those that lie one below the other in Hugging Face's tensor."""
    heads: tuple[int, ...] = ()
    """For each part: heads whose rows llama.cpp's converter permuted, 0 for none."""
    minus_one: bool = False
    required: bool = True


def places(architecture: str, config: Mapping[str, Any]) -> dict[str, Place]:
    """Every tensor that the configuration calls for, by Hugging Face's name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shift = architecture == "gemma3"
    found = {
        "model.embed_tokens.weight": Place((vocab, hidden), ("token_embd.weight",)),
        "model.norm.weight": Place((hidden,), ("output_norm.weight",), minus_one=shift),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = Place((vocab, hidden), ("output.weight",))
    for layer in range(config["num_hidden_layers"]):
        for name, place in _layer(architecture, config, shift).items():
            place.parts = tuple(f"blk.{layer}.{part}" for part in place.parts)
            found[f"model.layers.{layer}.{name}"] = place
    return found


def _layer(architecture: str, config: Mapping[str, Any], shift: bool) -> dict[str, Place]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    found = {"input_layernorm.weight": Place((hidden,), ("attn_norm.weight",), minus_one=shift)}
    if shift:
        found["post_attention_layernorm.weight"] = Place((hidden,), ("post_attention_norm.weight",), minus_one=True)
        found["pre_feedforward_layernorm.weight"] = Place((hidden,), ("ffn_norm.weight",), minus_one=True)
        found["post_feedforward_layernorm.weight"] = Place((hidden,), ("post_ffw_norm.weight",), minus_one=True)
    else:
        found["post_attention_layernorm.weight"] = Place((hidden,), ("ffn_norm.weight",))
    found.update(_attention(architecture, config, shift))
    if architecture == "phi3":
        found["mlp.gate_up_proj.weight"] = Place((2 * wide, hidden), ("ffn_up.weight",))
    else:
        found.update(_linear("mlp.gate_proj", "ffn_gate", wide, hidden, config["mlp_bias"]))
        found.update(_linear("mlp.up_proj", "ffn_up", wide, hidden, config["mlp_bias"]))
    found.update(_linear("mlp.down_proj", "ffn_down", hidden, wide, config["mlp_bias"]))
    return found


def _attention(architecture: str, config: Mapping[str, Any], shift: bool) -> dict[str, Place]:
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    kv_heads, bias = config["num_key_value_heads"], config["attention_bias"]
    permuted = architecture in ("llama", "baichuan")
    if architecture == "baichuan":
        found = {
            "self_attn.W_pack.weight": Place(
                (3 * heads * dim, hidden), ("attn_q.weight", "attn_k.weight", "attn_v.weight"), (heads, heads, 0)
            )
        }
    elif architecture == "phi3":
        found = {"self_attn.qkv_proj.weight": Place(((heads + 2 * kv_heads) * dim, hidden), ("attn_qkv.weight",))}
    else:
        found = {
            **_linear("self_attn.q_proj", "attn_q", heads * dim, hidden, bias, heads if permuted else 0),
            **_linear("self_attn.k_proj", "attn_k", kv_heads * dim, hidden, bias, kv_heads if permuted else 0),
            **_linear("self_attn.v_proj", "attn_v", kv_heads * dim, hidden, bias),
        }
    if architecture in ("qwen3", "gemma3"):
        found["self_attn.q_norm.weight"] = Place((dim,), ("attn_q_norm.weight",), minus_one=shift)
        found["self_attn.k_norm.weight"] = Place((dim,), ("attn_k_norm.weight",), minus_one=shift)
    found["self_attn.o_proj.weight"] = Place((hidden, heads * dim), ("attn_output.weight",))
    if bias and architecture == "llama":
        # Hugging Face's Llama has all four or none; other models with these tensors have three.
        found["self_attn.o_proj.bias"] = Place((hidden,), ("attn_output.bias",), required=False)
    return found


def _linear(name: str, part: str, rows: int, columns: int, bias: bool, heads: int = 0) -> dict[str, Place]:
    order = (heads,) if heads else ()
    found = {f"{name}.weight": Place((rows, columns), (f"{part}.weight",), order)}
    if bias:
        found[f"{name}.bias"] = Place((rows,), (f"{part}.bias",), order)
    return found
