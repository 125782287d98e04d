"""Makes tiny random decoders, lets exporters that people use write them as ONNX, and computes what they have to give.

    python -m venv target/exporters/a && target/exporters/a/bin/pip install optimum-onnx==0.1.0 optimum==2.1.0 \\
        transformers==4.57.6 torch==2.15.0 onnx==1.23.2 onnxruntime==1.31.1 onnxscript==0.7.2
    python -m venv target/exporters/b && target/exporters/b/bin/pip install onnxruntime-genai==0.18.0 \\
        transformers==5.23.0 torch==2.15.0 onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.31.1
    target/exporters/a/bin/python tests/data/decoders/make.py models
    target/exporters/a/bin/python tests/data/decoders/make.py optimum
    target/exporters/b/bin/python tests/data/decoders/make.py genai

optimum-onnx needs transformers 4, and the builder of onnxruntime-genai needs transformers 5: hence two environments. README.md says
what came out. `models` writes Hugging Face folders into target/exporters/models, and expected.json here; the others read those
folders, and write a folder here for each export. Weights are drawn from a seed, and exports of the same folder are equal to the
number; the bytes of the graphs may differ, by the names that torch gives to nodes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
MODELS = ROOT / "target/exporters/models"
# A tokenizer of 272 tokens: bytes and a few merges.
TOKENIZER = ROOT / "tests/data/llm/llama"
SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Heads are wider than hidden_size / heads, as Qwen3's and Gemma's are. Qwen2 has a bias on queries, keys and values, and here a
# window in its second layer; Gemma 3 has one in its first.
KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    # The merged graph has everything twice.
    "llama-1": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 1000.0,
        },
    ),
}
TEXTS = ["<s>a", "<s>the man and the rain", "<s>In the beginning there was a plain, and on it one horse."]
STEPS = 24


def models():
    import torch
    import transformers

    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, f32 on the CPU"}
    for name, (config, kind, changes) in KINDS.items():
        torch.manual_seed(31)
        config = getattr(transformers, config)(**SIZES | changes)
        model = getattr(transformers, kind)(config).float().eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                # Norms and biases as in trained models: not all 1, not all 0.
                if key.endswith("norm.weight") or key.endswith("bias"):
                    value += 0.2 * torch.randn_like(value)
        folder = MODELS / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, folder)
        # What transformers itself loads, so that no number is lost between here and the file.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        expected[name] = [case(model, tokenizer(text, add_special_tokens=False).input_ids, text) for text in TEXTS]
    (HERE / "expected.json").write_text(json.dumps(expected, separators=(",", ":")).replace('{"text"', '\n{"text"') + "\n")


def case(model, prompt, text):
    """The logits of the prompt's last token, the likeliest token after each one, and STEPS tokens by argmax; an end token does not
    stop it. `margin` is the least distance of a likeliest logit to the second, of all that are here."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
        tokens = list(prompt)
        for _ in range(STEPS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        best = model(torch.tensor([tokens])).logits[0].topk(2).values
    return {
        "text": text,
        "prompt_ids": prompt,
        "logits": [float(f"{value:.7g}") for value in logits[-1].tolist()],
        "argmax": logits.argmax(-1).tolist(),
        "greedy_ids": tokens[len(prompt) :],
        "margin": float(f"{(best[:, 0] - best[:, 1]).min().item():.3g}"),
    }


def optimum():
    from optimum.exporters.onnx import main_export

    for name in ("llama", "qwen2", "gemma3"):
        out = fresh(f"{name}-optimum")
        main_export(str(MODELS / name), out, task="text-generation-with-past", do_validation=False, device="cpu")
        keep(out)
    merged()


def merged():
    """One graph with both branches, as older versions wrote it and transformers.js has it: `use_cache_branch` chooses."""
    import torch
    from optimum.exporters.onnx import export
    from optimum.exporters.onnx.model_configs import LlamaOnnxConfig
    from optimum.onnx import merge_decoders
    from transformers import AutoModelForCausalLM

    out = fresh("llama-1-optimum-merged")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "llama-1", dtype=torch.float32).eval()
    parts = []
    for past in (False, True):
        parts.append(out / f"part-{past}.onnx")
        config = LlamaOnnxConfig(model.config, task="text-generation", use_past=True, use_past_in_inputs=past)
        export(model=model, config=config, output=parts[-1])
    merge_decoders(*parts, save_path=out / "decoder_model_merged.onnx")
    for part in parts:
        part.unlink()
    shutil.copy(MODELS / "llama-1/config.json", out)
    keep(out)


def genai():
    build("llama", "llama-genai")
    # Three products instead of one.
    build("llama", "llama-genai-unpacked", "fuse_qkv=false")
    build("qwen2", "qwen2-genai", "windowed_kv_cache=false")
    # The default: layers with a window have a past of their own length, in which the oldest tokens are overwritten.
    build("qwen2", "qwen2-genai-ring")
    # DirectML's graphs rotate before the attention, and have position_ids.
    build("llama", "llama-genai-dml", provider="dml", precision="fp16")
    build("llama", "llama-genai-int4", "int4_block_size=32", "int4_accuracy_level=0", precision="int4")


def build(name, to, *options, provider="cpu", precision="fp32"):
    out = fresh(to)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", MODELS / name, "-o", out, "-p", precision]
    command += ["-e", provider, "-c", ROOT / "target/exporters/cache"]
    command += ["--extra_options", *options, "hf_token=false"]
    # It would write the commit of the folder that it lies in into the graph.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GIT_DIR": "/"}
    subprocess.run(command, check=True, env=environment)
    shutil.copy(MODELS / name / "config.json", out)
    keep(out)


def fresh(name):
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return out


def keep(out):
    """Of an export what says something about the decoder; the tokenizer is everywhere the same."""
    for file in out.iterdir():
        if file.suffix not in (".onnx", ".data", ".onnx_data") and file.name not in ("config.json", "genai_config.json"):
            file.unlink()


if __name__ == "__main__":
    for step in sys.argv[1:]:
        {"models": models, "optimum": optimum, "genai": genai}[step]()
