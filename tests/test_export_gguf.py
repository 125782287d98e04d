"""GGUF files are read as Hugging Face's checkpoints: configuration, weights to the bit, exact blocks, refusals."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from pagoda.export import ExportError  # noqa: E402
from pagoda.export.readers.gguf import open_gguf  # noqa: E402
from tiny_gguf import TYPE, Tiny, sentencepiece  # noqa: E402

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "baichuan")


def whole(tensor):
    return tensor.rows(0, tensor.shape[0])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_has_the_name_the_shape_and_the_numbers_it_was_made_of(architecture, path):
    tiny = Tiny(architecture)
    read = open_gguf(tiny.write(path))
    assert set(read.tensors) == set(tiny.theirs)
    for name, weight in tiny.theirs.items():
        tensor = read.tensors[name]
        assert (tensor.name, tensor.shape, tensor.type) == (name, weight.shape, "f32")
        stored = whole(tensor)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            # What the file holds is 1 + weight in f32: that number comes back, the lost bits of the weight do not.
            np.testing.assert_allclose(stored, weight, atol=2**-22)
        else:
            assert np.array_equal(stored, weight), name


@pytest.mark.parametrize(
    "architecture, names",
    [
        ("llama", ("llama", "LlamaForCausalLM")),
        ("qwen2", ("qwen2", "Qwen2ForCausalLM")),
        ("qwen3", ("qwen3", "Qwen3ForCausalLM")),
        ("gemma3", ("gemma3_text", "Gemma3ForCausalLM")),
        ("phi3", ("phi3", "Phi3ForCausalLM")),
        ("baichuan", ("baichuan", "BaichuanForCausalLM")),
    ],
)
def test_metadata_become_a_configuration(architecture, names, path):
    tiny = Tiny(architecture, head_dim=32 if architecture in ("qwen3", "gemma3") else None)
    tiny.metadata["rope.freq_base"] = 500000.0
    config = open_gguf(tiny.write(path)).config
    assert (config["model_type"], *config["architectures"]) == names
    expected = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": tiny.vocab(),
        "tie_word_embeddings": False,
        "attention_bias": architecture == "qwen2",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_scaling" not in config


def test_a_model_without_output_is_tied(path):
    read = open_gguf(Tiny("llama", tied=True).write(path))
    assert read.config["tie_word_embeddings"] is True and "lm_head.weight" not in read.tensors


def test_biases_of_permuted_rows_are_permuted_with_them(path):
    tiny = Tiny("llama", bias=True)
    read = open_gguf(tiny.write(path))
    assert read.config["attention_bias"] is True
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj.bias"
        assert np.array_equal(whole(read.tensors[name]), tiny.theirs[name])


def test_gemmas_norms_give_the_files_number_when_1_is_added(path):
    tiny = Tiny("gemma3")
    name = "model.layers.0.input_layernorm.weight"
    trained = tiny.random.uniform(-3, 60, 64).astype(ml_dtypes.bfloat16).astype(np.float32)
    tiny.theirs[name] = trained
    read = open_gguf(tiny.write(path))
    stored = tiny.tensors()["blk.0.attn_norm.weight"]
    assert np.array_equal(whole(read.tensors[name]) + np.float32(1), stored)


FLOATS = {TYPE.F32: np.float32, TYPE.F16: np.float16, TYPE.BF16: ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", [*FLOATS, TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1, TYPE.Q8_0], ids=lambda k: k.name)
def test_rows_are_what_gguf_makes_of_them(kind, path):
    tiny = Tiny("llama", kind)
    read = open_gguf(tiny.write(path))
    for part in ("q_proj", "k_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        tensor, weight = read.tensors[name], tiny.theirs[name]
        # Blocks lie along rows, so rows may be put into order before or after they are quantised.
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        stored = whole(tensor)
        assert tensor.type == kind.name.lower() and stored.dtype == FLOATS.get(kind, np.float32)
        assert np.array_equal(stored.astype(np.float32), expected)
        assert np.array_equal(tensor.rows(5, 23), stored[5:23]) and tensor.rows(7, 7).shape == (0, weight.shape[1])


@pytest.mark.parametrize("kind", [TYPE.Q4_0, TYPE.Q4_1, TYPE.Q8_0], ids=lambda k: k.name)
def test_blocks_hold_the_exact_codes_and_scales(kind, path):
    tiny = Tiny("llama", kind)
    read = open_gguf(tiny.write(path))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        tensor = read.tensors[name]
        blocks = tensor.blocks(3, 29)
        rows, width = 26, tensor.shape[1]
        assert blocks.bits == (8 if kind == TYPE.Q8_0 else 4)
        assert blocks.codes.dtype == np.uint8 and blocks.codes.shape == (rows, width)
        assert blocks.codes.max() < 2**blocks.bits
        assert blocks.scale.dtype == np.float16 and blocks.scale.shape == (rows, width // 32)
        scale, codes = np.repeat(blocks.scale.astype(np.float32), 32, axis=1), blocks.codes.astype(np.float32)
        if kind == TYPE.Q4_1:
            made = scale * codes + np.repeat(blocks.low.astype(np.float32), 32, axis=1)
        else:
            assert blocks.low is None
            made = scale * (codes - 2 ** (blocks.bits - 1))
        assert np.array_equal(made, tensor.rows(3, 29))


def test_other_types_have_no_blocks(path):
    read = open_gguf(Tiny("llama", TYPE.Q5_1).write(path))
    assert read.tensors["model.layers.0.mlp.up_proj.weight"].blocks(0, 2) is None
    assert read.tensors["model.norm.weight"].blocks(0, 2) is None


K_QUANTS = (TYPE.Q2_K, TYPE.Q3_K, TYPE.Q4_K, TYPE.Q5_K, TYPE.Q6_K, TYPE.IQ4_XS)


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda k: k.name)
def test_k_quants_are_dequantised_in_order(kind, path):
    tiny = Tiny("llama", hidden=256)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    stored = tiny.random.integers(0, 60, (256, size), dtype=np.uint8)
    tiny.more["blk.0.attn_q.weight"], tiny.kinds["blk.0.attn_q.weight"] = stored, kind
    tensor = open_gguf(tiny.write(path)).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert tensor.type == kind.name.lower() and tensor.blocks(0, 4) is None
    expected = gguf.quants.dequantize(stored, kind)
    assert np.array_equal(tiny.rotated(whole(tensor)), expected)


def test_baichuans_projections_are_one_tensor(path):
    tiny = Tiny("baichuan", TYPE.Q4_1)
    read = open_gguf(tiny.write(path))
    name = "model.layers.0.self_attn.W_pack.weight"
    tensor, weight = read.tensors[name], tiny.theirs[name]
    assert tensor.type == "q4_1"
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, TYPE.Q4_1), TYPE.Q4_1)
    assert np.array_equal(whole(tensor), expected)
    # Over the seams of its three parts.
    assert np.array_equal(tensor.rows(60, 131), expected[60:131])
    blocks = tensor.blocks(60, 131)
    low = np.repeat(blocks.low.astype(np.float32), 32, axis=1)
    made = np.repeat(blocks.scale.astype(np.float32), 32, axis=1) * blocks.codes + low
    assert np.array_equal(made, expected[60:131])


def test_baichuans_projections_of_several_types_come_as_f32(path):
    tiny = Tiny("baichuan", TYPE.Q4_1)
    tiny.kinds["blk.0.attn_v.weight"] = TYPE.F16
    tensor = open_gguf(tiny.write(path)).tensors["model.layers.0.self_attn.W_pack.weight"]
    assert tensor.type == "f32" and tensor.blocks(0, 10) is None
    assert tensor.rows(0, 192).dtype == np.float32 and tensor.rows(130, 140).dtype == np.float32
    v = tiny.theirs["model.layers.0.self_attn.W_pack.weight"][128:].astype(np.float16).astype(np.float32)
    assert np.array_equal(tensor.rows(128, 192), v)


def test_a_part_costs_the_memory_of_a_part(path):
    tiny = Tiny("llama", TYPE.Q4_1, hidden=1024, layers=1)
    tensor = open_gguf(tiny.write(path)).tensors["model.layers.0.mlp.gate_proj.weight"]
    tracemalloc.start()
    try:
        tensor.rows(0, 16), tensor.blocks(16, 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The whole is 1536 rows, 6 MB as f32.
    assert peak < 8 * 16 * 1024 * 4


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0,
             "rope.scaling.yarn_attn_factor": 1.5},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
             "attention_factor": 1.5},
        ),
    ],
)  # fmt: skip
def test_rotation_scaling(metadata, expected, path):
    tiny = Tiny("llama")
    tiny.metadata |= metadata
    assert open_gguf(tiny.write(path)).config.get("rope_scaling") == expected


def test_llama_3s_scaling_comes_as_factors(path):
    tiny = Tiny("llama")
    tiny.more["rope_freqs.weight"] = np.array([1, 1, 1.5, 2, 3.25, 8, 8, 8], np.float32)
    scaling = open_gguf(tiny.write(path)).config["rope_scaling"]
    assert scaling == {"rope_type": "factors", "factors": [1, 1, 1.5, 2, 3.25, 8, 8, 8]}


def test_phi_3s_factors_for_long_contexts(path):
    tiny = Tiny("phi3")
    tiny.metadata |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    factors = {"short": np.full(8, 1, np.float32), "long": np.full(8, 2, np.float32)}
    tiny.more = {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    config = open_gguf(tiny.write(path)).config
    assert config["original_max_position_embeddings"] == 64
    assert config["rope_scaling"] == {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.25,
    }  # fmt: skip


def test_windows(path):
    tiny = Tiny("llama")
    tiny.metadata["attention.sliding_window"] = 32
    config = open_gguf(tiny.write(path)).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    tiny = Tiny("phi3")
    tiny.metadata["attention.sliding_window"] = 0
    assert open_gguf(tiny.write(path)).config["sliding_window"] is None


def test_gemmas_local_and_global_layers(path):
    tiny = Tiny("gemma3", layers=7)
    tiny.metadata |= {"attention.sliding_window": 32, "rope.freq_base": 1e6}
    config = open_gguf(tiny.write(path)).config
    assert [kind == "full_attention" for kind in config["layer_types"]] == [False] * 5 + [True, False]
    assert (config["sliding_window"], config["rope_theta"], config["rope_local_base_freq"]) == (32, 1e6, 1e4)
    assert config["query_pre_attn_scalar"] == tiny.head_dim
    tiny.metadata["attention.sliding_window_pattern"] = 2
    config = open_gguf(tiny.write(path)).config
    assert [kind == "full_attention" for kind in config["layer_types"]] == [False, True] * 3 + [False]


def test_baichuan_13b_has_alibi(path):
    assert open_gguf(Tiny("baichuan").write(path)).config["position_embedding"] == "rope"
    config = open_gguf(Tiny("baichuan", hidden=32, layers=40).write(path)).config
    assert config["position_embedding"] == "alibi" and config["model_max_length"] == 128
    assert "max_position_embeddings" not in config


def test_a_model_in_several_files(tmp_path):
    tiny = Tiny("llama", TYPE.Q8_0)
    tiny.write(tmp_path / "tiny.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    read = open_gguf(parts[0])
    assert set(read.tensors) == set(tiny.theirs)
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(tiny.theirs[name], TYPE.Q8_0), TYPE.Q8_0)
    assert np.array_equal(whole(read.tensors[name]), expected)
    with pytest.raises(ExportError, match="is part 2 of a model in 3 files: give the first one"):
        open_gguf(parts[1])
    parts[2].unlink()
    with pytest.raises(ExportError, match="00003-of-00003.gguf is not beside it"):
        open_gguf(parts[0])


def changed(**metadata):
    return lambda tiny: tiny.metadata.update({key.replace("__", "."): value for key, value in metadata.items()})


def grown(name, shape, kind=TYPE.F32):
    def change(tiny):
        tiny.more[name], tiny.kinds[name] = np.zeros(shape, np.float32), kind

    return change


@pytest.mark.parametrize(
    "architecture, change, words",
    [
        ("llama", lambda tiny: tiny.dropped.add("blk.1.attn_k.weight"), "no tensor blk.1.attn_k.weight"),
        ("llama", lambda tiny: tiny.dropped.add("token_embd.weight"), "no tensor token_embd.weight"),
        ("llama", grown("blk.0.ffn_up.weight", (95, 64)), r"shape \[95, 64\], the metadata call for \[96, 64\]"),
        ("llama", grown("blk.0.attn_norm.weight", (65,)), r"blk.0.attn_norm.weight has shape \[65\]"),
        ("llama", grown("blk.0.ffn_gate_inp.weight", (4, 64)), "no such tensors: blk.0.ffn_gate_inp.weight"),
        ("llama", grown("rope_freqs.weight", (7,)), r"rope_freqs.weight is F32, shape \[7\]"),
        ("llama", changed(block_count=3), "no tensor blk.2.attn_norm.weight"),
        ("llama", changed(block_count=1), "no such tensors: blk.1"),
        ("llama", changed(block_count=None), "llama.block_count is missing"),
        ("llama", changed(embedding_length=None), "llama.embedding_length is missing"),
        ("llama", changed(block_count="two"), "llama.block_count is 'two': it has to be an integer"),
        ("llama", changed(attention__head_count=0), "llama.attention.head_count is 0: it has to be positive"),
        ("llama", changed(attention__head_count_kv=3), "is 4, which is no multiple of the 3"),
        ("llama", changed(attention__head_count_kv=[2, 1]), "layers that differ are not supported"),
        ("llama", changed(attention__value_length=8), "they have to be the same"),
        ("llama", changed(attention__layer_norm_rms_epsilon=None), "rms_epsilon is missing"),
        ("llama", changed(expert_count=8), "llama.expert_count is 8: the exporter does not know"),
        ("llama", changed(final_logit_softcapping=30.0), "llama.final_logit_softcapping is 30.0: the exporter"),
        ("llama", changed(attention__scale=0.5), "llama.attention.scale is 0.5: the exporter does not know"),
        ("llama", changed(rope__dimension_count=8), "rope.dimension_count is 8, heads have 16"),
        ("llama", changed(rope__scaling__type="longrope"), "rope.scaling.type is 'longrope'"),
        ("llama", changed(vocab_size=7), "llama.vocab_size is 7, and token_embd.weight has"),
        ("phi3", grown("rope_factors_long.weight", (8,)), "they come together"),
        ("baichuan", changed(attention__head_count_kv=2), "Baichuan has as many of both"),
        ("mamba", lambda tiny: None, "general.architecture is 'mamba': the exporter knows llama, qwen2"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(architecture, change, words, path):
    tiny = Tiny("llama" if architecture == "mamba" else architecture)
    change(tiny)
    tiny.architecture = architecture
    with pytest.raises(ExportError, match=words) as caught:
        open_gguf(tiny.write(path))
    assert str(path) in str(caught.value)


def test_what_is_no_gguf_is_refused(path, tmp_path):
    with pytest.raises(ExportError, match="is not a file"):
        open_gguf(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ExportError, match="is not a GGUF file: it begins with"):
        open_gguf(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ExportError, match="GGUF of version 1"):
        open_gguf(path)
    Tiny("llama").write(path, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ExportError, match="is a big-endian GGUF file"):
        open_gguf(path)


def test_a_file_that_was_cut_is_refused_wherever_it_was_cut(path):
    data = Tiny("llama", layers=1).write(path).read_bytes()
    with pytest.raises(ExportError, match="was cut: .* ends at byte"):
        path.write_bytes(data[: len(data) // 2])
        open_gguf(path)
    # The writer pads the end; the last tensor ends inside the last 32 bytes.
    for size in [*range(0, 400), *np.linspace(400, len(data) - 32, 150).astype(int).tolist()]:
        path.write_bytes(data[:size])
        with pytest.raises(ExportError):
            open_gguf(path)


def test_a_damaged_header_never_raises_anything_but_words(path):
    data = bytearray(Tiny("llama", layers=1).write(path).read_bytes())
    random = np.random.default_rng(27)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for at in random.integers(0, 1500, 3):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except ExportError:
            refused += 1
    assert refused > 50


def test_the_sentencepiece_kind_is_read_with_every_architecture(path):
    tiny = Tiny("llama")
    before = tiny.vocab()
    tiny.metadata |= sentencepiece()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tiny.theirs[name] = np.resize(tiny.theirs[name], (tiny.vocab(), 64))
    assert tiny.vocab() != before
    assert open_gguf(tiny.write(path)).config["vocab_size"] == tiny.vocab()
