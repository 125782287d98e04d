"""Writes tiny GGUF models the way llama.cpp's converter does, and knows the Hugging Face weights they were made of."""

import gguf
import numpy as np

TYPE = gguf.GGMLQuantizationType
HEADS, KV_HEADS, LAYERS = 4, 2, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Tiny:
    """A model of an architecture. Change what is to be different, then `write`."""

    def __init__(self, architecture, kind=TYPE.F32, hidden=64, layers=LAYERS, head_dim=None, tied=False, bias=False):
        self.architecture, self.kind, self.hidden, self.layers = architecture, kind, hidden, layers
        self.heads, self.kv_heads = HEADS, HEADS if architecture == "baichuan" else KV_HEADS
        self.head_dim, self.wide, self.tied = head_dim or hidden // HEADS, 3 * hidden // 2, tied
        self.bias = bias or architecture == "qwen2"
        self.metadata = byte_level() | {
            "block_count": layers,
            "context_length": 128,
            "embedding_length": hidden,
            "feed_forward_length": self.wide,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": np.float32(1e-5),
        }
        if head_dim:
            self.metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        self.random = np.random.default_rng(27)
        self.theirs = self._weights()
        self.kinds, self.dropped, self.more = {}, set(), {}

    def _weights(self):
        """By Hugging Face's names, f32."""
        hidden, dim, kv = self.hidden, self.head_dim, self.kv_heads
        found = {"model.embed_tokens.weight": (self.vocab(), hidden), "model.norm.weight": (hidden,)}
        if not self.tied:
            found["lm_head.weight"] = (self.vocab(), hidden)
        layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if self.architecture == "baichuan":
            layer["self_attn.W_pack.weight"] = (3 * self.heads * dim, hidden)
        elif self.architecture == "phi3":
            layer["self_attn.qkv_proj.weight"] = ((self.heads + 2 * kv) * dim, hidden)
        else:
            for part, rows in (("q", self.heads * dim), ("k", kv * dim), ("v", kv * dim)):
                layer[f"self_attn.{part}_proj.weight"] = (rows, hidden)
                if self.bias:
                    layer[f"self_attn.{part}_proj.bias"] = (rows,)
        layer["self_attn.o_proj.weight"] = (hidden, self.heads * dim)
        if self.architecture in ("qwen3", "gemma3"):
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        if self.architecture == "gemma3":
            layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
        if self.architecture == "phi3":
            layer["mlp.gate_up_proj.weight"] = (2 * self.wide, hidden)
        else:
            layer |= {"mlp.gate_proj.weight": (self.wide, hidden), "mlp.up_proj.weight": (self.wide, hidden)}
        layer["mlp.down_proj.weight"] = (hidden, self.wide)
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return {name: self.random.standard_normal(shape).astype(np.float32) for name, shape in found.items()}

    def vocab(self):
        return len(self.metadata["tokenizer.ggml.tokens"])

    def tensors(self):
        """By GGUF's names, as the converter writes them, before they are quantised."""
        names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        gemma = self.architecture == "gemma3"
        parts = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        for number in range(self.layers):
            names |= {f"model.layers.{number}.{theirs}": f"blk.{number}.{ours}" for theirs, ours in parts.items()}
        made = {}
        for name, weight in self.theirs.items():
            stem, _, ending = name.rpartition(".")
            if stem.endswith("W_pack"):
                block = "blk." + stem.split(".")[2]
                q, k, v = np.split(weight, 3)
                made[f"{block}.attn_q.weight"], made[f"{block}.attn_k.weight"] = self.rotated(q), self.rotated(k)
                made[f"{block}.attn_v.weight"] = v
                continue
            if self.architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
                weight = self.rotated(weight)
            if gemma and stem.endswith("norm"):
                weight = weight + np.float32(1)
            made[f"{names[stem]}.{ending}"] = weight
        return made

    def rotated(self, weight):
        """Rows i and i + dim/2 of each head next to each other."""
        out, half = np.empty_like(weight), self.head_dim // 2
        for head in range(len(weight) // self.head_dim):
            first = head * self.head_dim
            for i in range(half):
                out[first + 2 * i], out[first + 2 * i + 1] = weight[first + i], weight[first + half + i]
        return out

    def write(self, path, **options):
        writer = gguf.GGUFWriter(path, self.architecture, **options)
        for key, value in self.metadata.items():
            known = key.startswith(("tokenizer.", "general.", "split."))
            _add(writer, key if known else f"{self.architecture}.{key}", value)
        for name, weight in (self.tensors() | self.more).items():
            if name in self.dropped:
                continue
            kind = self.kinds.get(name, self.kind if weight.ndim == 2 else TYPE.F32)
            if weight.dtype == np.uint8 or kind == TYPE.F32:
                data = weight
            else:
                data = gguf.quants.quantize(weight, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer, key, value):
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, (list, tuple)):
        writer.add_array(key, list(value))
    elif isinstance(value, (float, np.floating)):
        writer.add_float32(key, float(value))
    else:
        writer.add_uint32(key, value)


def byte_alphabet():
    """GPT-2's: printable bytes stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(0x100 + number) for number in range(len(rest))]


def byte_level():
    """A byte-level BPE with four merges, bos, eos and a token that users defined."""
    tokens = ["<|begin|>", "<|end|>", "<tool>", *byte_alphabet(), "he", "ll", "hell", "hello", "\u0120hello"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "\u0120 hello"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece():
    """A SentencePiece BPE: bytes, letters and pieces whose scores say in which order they are made."""
    pieces = ["\u2581", *"helowrd", "he", "ll", "hell", "hello", "\u2581hello", "\u2581w", "or", "ld", "\u2581wor"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<mark>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    scores = [0.0] * 259 + [-1000.0] * 8 + [-float(rank) for rank in range(len(pieces) - 8)] + [-1000.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
