"""Makes a tiny random model of every architecture that the exporter takes, as Hugging Face folders, and the logits that
transformers gives for them.

    pip install torch transformers safetensors numpy tokenizers        (made with torch 2.15.0, transformers 5.23.0)
    python tests/data/llm/make.py [NAME ...]                           (no name: all of them)

A folder has config.json, the weights (`llama` in two shards), tokenizer.json, tokenizer_config.json,
generation_config.json, and expected.safetensors:

    input_ids.0, input_ids.1      i32 [n]: a prompt longer than every window and than the dynamic rotation's
                                  max_position_embeddings, and a shorter one; both begin with <s>
    logits.0, logits.1            f32 [n, vocab]: of the whole prompt in one call
    logits_stepwise.0, .1         f32 [n, vocab]: token by token with a KV cache; only where it differs by design
                                  (llama-rope-dynamic)
    metadata                      prompt.0, prompt.1: the texts that tokenizer.json turns into the ids; what made it

The numbers are computed from the weights as stored (f32, f16 or bf16) in float64 and rounded to f32 at the end.
transformers casts to f32 inside its norms and for the angles of the rotation, whatever the type of the model: these
steps have f32's precision. For Baichuan, which transformers does not have, a module below does everything in float64.
Weights are drawn by name and seed, so the same folder comes out on every machine.

What transformers 5.23 does, where one could think otherwise:
- A window of w sees w positions, the row's own included (`kv > q - w`).
- linear: divides the frequencies, which is the same as dividing the positions.
- dynamic: `max_position_embeddings` is the original length M, there is no other. While the length s of a call (its
  largest position + 1) is at most M the frequencies are plain; beyond, the base becomes
  base * (factor * s / M - (factor - 1)) ** (D / (D - 2)) for *all rows of this call*. Keys in the cache keep the
  rotation of their own call. So a prompt as a whole and the same prompt token by token have different logits. The
  module also remembers the longest s: after a long call a shorter one is rotated by the longer length, until s < M
  resets it. Each prompt here gets a model of its own, and nothing of that kind happens.
- llama3, yarn: original_max_position_embeddings is taken from rope_scaling; if missing, it is max_position_embeddings.
- yarn: cos and sin are both multiplied by attention_factor (default 0.1 ln(factor) + 1), so scores are multiplied by
  its square. The ramp's ends are rounded outwards (`truncate`, true by default) and clamped to [0, D - 1], not to
  D/2 - 1.
- config.json as published has rope_theta and rope_scaling (`rope_type`, or `type` in old ones); transformers 5 writes
  `rope_parameters` with rope_theta inside. Both are here: the second in llama-rope-yarn and qwen3.
- qwen2 has sliding_window in its config, which means nothing while use_sliding_window is false.
- gemma3: norms multiply by 1 + weight; embeddings are multiplied by sqrt(hidden_size); rope_scaling is for the global
  layers alone; every sliding_window_pattern-th layer is global. query_pre_attn_scalar ** -0.5 is the scale.
- phi3: qkv_proj is q, k, v one after the other; gate_up_proj is gate, then up.
"""

import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

HERE = Path(__file__).parent
SEED = 27
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "o n", "a n", "Ġ a", "Ġ p", "r e", "an d"]
VOCABULARY = len(SPECIAL) + 256 + len(MERGES)
PROMPTS = ["The pagoda on the hill and its bells", "A wind, é"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.3,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


def main(names):
    unknown = set(names) - set(MODELS)
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    check_slopes()
    for name in names or MODELS:
        make(name, MODELS[name])


def config(architecture, kind, **changes):
    made = COMMON | {"architectures": [architecture], "model_type": kind} | changes
    return {key: made[key] for key in sorted(made)}


def without(made, *keys):
    return {key: value for key, value in made.items() if key not in keys}


def llama(**changes):
    return config("LlamaForCausalLM", "llama", attention_bias=False, mlp_bias=False, rope_scaling=None, **changes)


def scaled(length, dtype="float32", **scaling):
    """Heads of 16, so that there are eight frequencies to scale; tied, to be small."""
    changes = {"max_position_embeddings": length, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return llama(tie_word_embeddings=True, torch_dtype=dtype) | changes | {"rope_scaling": scaling}


def new_form(made):
    """The same config as transformers 5 writes it."""
    made = dict(made)
    scaling = made.pop("rope_scaling", None) or {"rope_type": "default"}
    made["rope_parameters"] = {"rope_theta": made.pop("rope_theta")} | scaling
    made["dtype"] = made.pop("torch_dtype")
    return made


def baichuan(**changes):
    auto = {
        "AutoConfig": "configuration_baichuan.BaichuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
    }
    common = {"_from_model_config": True, "auto_map": auto, "model_max_length": 64, "pad_token_id": 0}
    common |= {"rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "z_loss_weight": 0}
    made = config("BaichuanForCausalLM", "baichuan", **(common | changes))
    return without(made, "num_key_value_heads", "rope_theta")


MODELS = {
    "llama": llama(),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-mqa": llama(num_key_value_heads=1, torch_dtype="float16"),
    # `type` and not `rope_type`: the old name.
    "llama-rope-linear": scaled(512, "float16", type="linear", factor=4.0),
    "llama-rope-dynamic": scaled(16, type="dynamic", factor=2.0),
    "llama-rope-llama3": scaled(
        512,
        "float16",
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama-rope-yarn": new_form(scaled(4096, rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "mistral-window": config("MistralForCausalLM", "mistral", sliding_window=8, torch_dtype="float16"),
    "qwen2": config(
        "Qwen2ForCausalLM",
        "qwen2",
        max_window_layers=1,
        rope_theta=1000000.0,
        sliding_window=8,
        torch_dtype="bfloat16",
        use_sliding_window=False,
    ),
    "qwen3": new_form(
        config(
            "Qwen3ForCausalLM",
            "qwen3",
            attention_bias=False,
            head_dim=16,
            max_window_layers=2,
            rope_theta=1000000.0,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
        )
    ),
    "gemma3": without(
        config(
            "Gemma3ForCausalLM",
            "gemma3_text",
            attention_bias=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            head_dim=16,
            hidden_activation="gelu_pytorch_tanh",
            num_attention_heads=2,
            num_hidden_layers=4,
            num_key_value_heads=1,
            pad_token_id=0,
            query_pre_attn_scalar=24,
            rms_norm_eps=1e-6,
            rope_local_base_freq=10000.0,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
            rope_theta=1000000.0,
            sliding_window=8,
            sliding_window_pattern=3,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        ),
        "hidden_act",
    ),
    "phi3": config(
        "Phi3ForCausalLM",
        "phi3",
        attention_bias=False,
        original_max_position_embeddings=512,
        pad_token_id=0,
        rope_scaling=None,
        sliding_window=8,
        torch_dtype="bfloat16",
    ),
    "baichuan2-7b": baichuan(max_position_embeddings=64),
    # Six heads: two of the slopes come from the sequence of eight. No max_position_embeddings, as published.
    "baichuan2-13b": without(baichuan(hidden_size=48, num_attention_heads=6), "max_position_embeddings"),
}

# Settings that have to show in the logits of the long prompt: without them the numbers differ by far more than any
# tolerance, so a test that compares logits finds an exporter that ignores them.
SHOWS = {
    "llama-rope-linear": {"rope_scaling": None},
    "llama-rope-dynamic": {"rope_scaling": None},
    "llama-rope-llama3": {"rope_scaling": None},
    "llama-rope-yarn": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "mistral-window": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "gemma3": {"sliding_window": 64},
}


def make(name, made):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    write_json(folder / "config.json", made, indent=2)
    tokenizer = write_tokenizer(folder, made, own_template_file=name == "qwen3")
    stored = getattr(torch, made.get("torch_dtype") or made["dtype"])
    tensors = {key: value.to(stored) for key, value in weights(name, made)}
    write_weights(folder, tensors, shards=2 if name == "llama" else 1)

    expected = {}
    for at, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt).ids
        logits = run(open_model(folder), ids)
        check(name, at, logits, run(open_model(folder, torch.float32), ids))
        if name == "baichuan2-7b":
            assert relative(run(as_llama(folder), ids), logits) < 1e-6
        expected[f"input_ids.{at}"] = torch.tensor(ids, dtype=torch.int32)
        expected[f"logits.{at}"] = logits.float()
        if name == "llama-rope-dynamic":
            expected[f"logits_stepwise.{at}"] = run_stepwise(open_model(folder), ids).float()
        elif made["model_type"] != "baichuan":
            assert torch.allclose(run_stepwise(open_model(folder), ids), logits, rtol=1e-5, atol=1e-5), name
    if name in SHOWS:
        changed = open_model(folder, **SHOWS[name])
        moved = relative(run(changed, expected["input_ids.0"].tolist()), expected["logits.0"].double())
        assert moved > 0.03, f"{name}: {SHOWS[name]} changes the logits by {moved:.1e} only"
    by = f"torch {torch.__version__.split('+')[0]}, "
    by += "the module in make.py" if made["model_type"] == "baichuan" else f"transformers {transformers.__version__}"
    texts = {f"prompt.{at}": prompt for at, prompt in enumerate(PROMPTS)}
    write_safetensors(folder / "expected.safetensors", expected, texts | {"made_by": by, "computed_in": "float64"})
    print(f"{name:20} {sum(file.stat().st_size for file in folder.iterdir()):7} bytes")


def open_model(folder, dtype=torch.float64, **changes):
    """A fresh model: the dynamic rotation remembers earlier calls. `changes` are to its config."""
    made = json.loads((folder / "config.json").read_text())
    if made["model_type"] == "baichuan":
        return Baichuan(made, load_file(folder / "model.safetensors"), dtype)
    opened = transformers.AutoConfig.for_model(**(made | changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=opened, dtype=dtype)
    return model.eval()


@torch.no_grad()
def run(model, ids):
    return model(torch.tensor([ids])).logits[0]


@torch.no_grad()
def run_stepwise(model, ids):
    cache, rows = transformers.DynamicCache(config=model.config), []
    for token in ids:
        rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, 0])
    return torch.stack(rows)


def relative(got, expected):
    return (torch.linalg.norm(got.double() - expected) / torch.linalg.norm(expected)).item()


def check(name, at, logits, in_f32):
    """The logits are neither flat nor so steep that f32 could not follow."""
    probability = torch.softmax(logits, -1).max(-1).values.mean().item()
    error = relative(in_f32, logits)
    print(f"{name:20} prompt {at}: {len(logits)} tokens, best probability {probability:.2f}, f32 error {error:.1e}")
    assert torch.isfinite(logits).all()
    assert probability > 2 / VOCABULARY
    assert error < 5e-6


def weights(name, made):
    """Every tensor by name, drawn by the seed, the folder's name and its own."""
    if made["model_type"] == "baichuan":
        shapes = Baichuan.shapes(made)
    else:
        opened = transformers.AutoConfig.for_model(**made)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(opened)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        if made["tie_word_embeddings"]:
            shapes.pop("lm_head.weight", None)
    for key, shape in shapes.items():
        random = np.random.RandomState(zlib.crc32(f"{SEED}/{name}/{key}".encode()))
        values = random.standard_normal(shape).astype(np.float32)
        if "norm" in key:
            # Gemma's norms multiply by 1 + weight.
            values = 0.2 * values + (0 if made["model_type"] == "gemma3_text" else 1)
        else:
            values = made["initializer_range"] * values
        yield key, torch.from_numpy(values.astype(np.float32))


def write_weights(folder, tensors, shards):
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    keys = list(tensors)
    files = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in keys[shard * len(keys) // shards : (shard + 1) * len(keys) // shards]}
        save_file(part, folder / file, metadata=metadata)
        files |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_json(folder / "model.safetensors.index.json", index, indent=2)


def write_safetensors(path, tensors, metadata):
    """With the metadata in the order of its keys: save_file has another order in every process."""
    save_file(tensors, path, metadata=metadata)
    written = path.read_bytes()
    body = 8 + int.from_bytes(written[:8], "little")
    header = json.loads(written[8:body])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + written[body:])


def write_tokenizer(folder, made, own_template_file):
    """Byte-level BPE: the special tokens, the 256 bytes, a few merges. `<s>` is put before every text."""
    tokens = SPECIAL + sorted(byte_characters()) + [merge.replace(" ", "") for merge in MERGES]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": at, "content": token} | flags for at, token in enumerate(SPECIAL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }
    write_json(folder / "tokenizer.json", document)
    settings = {
        "add_bos_token": True,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": made.get("max_position_embeddings") or made["model_max_length"],
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if own_template_file:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    else:
        settings["chat_template"] = TEMPLATE
    write_json(folder / "tokenizer_config.json", settings, indent=2)
    generation = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 4], "pad_token_id": 0}
    generation |= {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    write_json(folder / "generation_config.json", generation, indent=2)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def byte_characters():
    """What stands for the 256 bytes in byte-level BPE: a printable byte for itself, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(code) for code in printable] + [chr(256 + at) for at in range(256 - len(printable))]


def write_json(path, value, indent=None):
    separators = (",", ": ") if indent else (",", ":")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    path.write_text(text + "\n", encoding="utf-8")


def as_llama(folder):
    """Baichuan2-7B as the Llama that it is with W_pack split and the head's rows brought to length 1: an independent
    computation to hold the module below against."""
    made = json.loads((folder / "config.json").read_text())
    opened = transformers.LlamaConfig(**(llama() | {key: made[key] for key in COMMON if key in made}))
    opened.num_key_value_heads = opened.num_attention_heads
    model = transformers.LlamaForCausalLM(opened).double().eval()
    tensors = {}
    for key, value in load_file(folder / "model.safetensors").items():
        value = value.double()
        if "W_pack" in key:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                tensors[key.replace("W_pack", f"{part}_proj")] = rows
        else:
            tensors[key] = value / torch.linalg.norm(value, dim=1, keepdim=True) if key == "lm_head.weight" else value
    model.load_state_dict(tensors)
    return model


def check_slopes():
    """The slopes are those of Bloom in transformers, which published them first."""
    for heads in (1, 2, 6, 8, 12, 32, 40):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
        assert torch.allclose(theirs, torch.tensor(alibi_slopes(heads), dtype=torch.float64), rtol=1e-6), heads


class Logits:
    def __init__(self, logits):
        self.logits = logits


class Baichuan:
    """Baichuan 2 by its published structure: W_pack is q, k, v one after the other; the 7B rotates in halves with base
    10000, the 13B adds ALiBi instead; a head whose rows have length 1.

    Which of the two a config means is not written in it: the published code of the 7B has max_position_embeddings, that
    of the 13B has model_max_length alone."""

    def __init__(self, made, tensors, dtype):
        self.made, self.dtype = made, dtype
        self.tensors = {key: value.to(dtype) for key, value in tensors.items()}
        self.head_size = made["hidden_size"] // made["num_attention_heads"]

    @staticmethod
    def shapes(made):
        hidden, inner, vocabulary = made["hidden_size"], made["intermediate_size"], made["vocab_size"]
        shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for layer in range(made["num_hidden_layers"]):
            shapes |= {
                f"model.layers.{layer}.self_attn.W_pack.weight": (3 * hidden, hidden),
                f"model.layers.{layer}.self_attn.o_proj.weight": (hidden, hidden),
                f"model.layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
                f"model.layers.{layer}.mlp.down_proj.weight": (hidden, inner),
                f"model.layers.{layer}.mlp.up_proj.weight": (inner, hidden),
                f"model.layers.{layer}.input_layernorm.weight": (hidden,),
                f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
            }
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}

    def __call__(self, ids):
        x = self.tensors["model.embed_tokens.weight"][ids]
        for layer in range(self.made["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            y = self.norm(f"{name}.post_attention_layernorm", x)
            gate, up = self.linear(f"{name}.mlp.gate_proj", y), self.linear(f"{name}.mlp.up_proj", y)
            x = x + self.linear(f"{name}.mlp.down_proj", functional.silu(gate) * up)
        head = functional.normalize(self.tensors["lm_head.weight"], dim=-1)
        return Logits(self.norm("model.norm", x) @ head.T)

    def attention(self, name, x):
        batch, length, hidden = x.shape
        heads = self.made["num_attention_heads"]
        parts = self.linear(f"{name}.W_pack", x).split(hidden, dim=-1)
        q, k, v = (part.view(batch, length, heads, self.head_size).transpose(1, 2) for part in parts)
        if "max_position_embeddings" in self.made:
            q, k = self.rotated(q), self.rotated(k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)
        row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
        if "max_position_embeddings" not in self.made:
            slopes = torch.tensor(alibi_slopes(heads), dtype=self.dtype)
            scores = scores - slopes[:, None, None] * (row - column)
        scores = scores.masked_fill(column > row, -torch.inf)
        output = torch.softmax(scores, dim=-1) @ v
        return self.linear(f"{name}.o_proj", output.transpose(1, 2).reshape(batch, length, hidden))

    def rotated(self, x):
        half = self.head_size // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=self.dtype) / half)
        angles = torch.arange(x.shape[2], dtype=self.dtype)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def norm(self, name, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.made["rms_norm_eps"])
        return self.tensors[f"{name}.weight"] * (x * scale)

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T


def alibi_slopes(heads):
    """2 ** (-8 i / n), i = 1 .. n, for a power of two n; for other counts the slopes of the power of two below, then
    every other one of the sequence of twice as many, from the first."""
    below = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below) + 1, 2)]


if __name__ == "__main__":
    main(sys.argv[1:])
