"""`pagoda inspect`: a model folder as text and as JSON, and damaged folders."""

import hashlib
import json
import os
import re
import subprocess

import numpy as np
import onnx
import pytest
from exported import HOURS, made  # noqa: F401  (a fixture)
from pagoda.export import llm
from safetensors.numpy import save_file
from test_cli import RELEASE, pagoda
from test_cli_rank import model, rank


def test_a_folder_in_words(made):  # noqa: F811
    folder, config, _ = model(made, lookup="bag", times=HOURS)
    done = pagoda("inspect", folder, "--users", 10, "--events", 12)
    assert (done.returncode, done.stderr) == (0, "")
    words = re.sub(" +", " ", done.stdout)
    about = json.loads((folder / "pagoda.json").read_text())
    for expected in (
        f"version {about['version']}",
        "nvidia, 2 layers of 2 × 8, rows of 16",
        "tasks like (none), click (sigmoid)",
        "item of an item table items 40 rows of 16 keys are row numbers, others are refused",
        "genre of an item table genres 6 rows of 16 keys are row numbers, others get row 0",
        "2 rows (item + genre, rating) an event, positions counted from the start, times absolute",
        "100 events and 50 candidates",
        "f32 keys and values, 256 B a row, pages of 8 rows",
        "keys.item, keys.genre, keys.rating, positions, times, row_offsets",
        "kv_pool_0 to kv_pool_1",
        "tables/items.safetensors 2.6 KiB whole",
        # 2 layers, keys and values, 2 heads, 8 codes with a scale and a low end.
        "keys and values of a row 256 B by kv_format: native 256 B, int8 96 B, int4 64 B, fp8 80 B",
        "of 1,000 events 500.0 KiB",
        "of 10 users with 12 events each 60.0 KiB",
    ):
        assert expected in words, expected
    # The request that it shows can be answered.
    example = re.search(r"^request (.*)$", words, re.M)[1]
    done, [answer] = rank(folder, [example + "\n"])
    assert done.returncode == 0 and answer["candidates"] == 2


def test_a_folder_in_json(made):  # noqa: F811
    folder, config, _ = model(made, lookup="bag")
    done = pagoda("inspect", folder, "--users", 10, "--json")
    report, about = json.loads(done.stdout), json.loads((folder / "pagoda.json").read_text())
    assert report["kind"] == "rank" and report["whole"] and report["version"] == about["version"]
    assert (report["layers"], report["heads"], report["head_size"]) == (2, 2, 8)
    assert [feature["name"] for feature in report["features"]] == ["item", "genre", "rating"]
    assert report["limits"] == about["limits"]
    assert report["bytes_on_disk"] == sum(file["bytes"] for file in about["files"].values())
    memory = report["memory"]
    assert memory["tables"] == (40 + 6 + 5) * 16 * 4
    # 2 rows an event, 256 bytes a row, pages of 8 rows.
    assert memory["kv_per_1000_events"] == 2000 * 256
    assert memory["kv_per_row"] == 256
    assert memory["kv_per_row_by_format"] == {"native": 256, "int8": 96, "int4": 64, "fp8": 80}
    assert (memory["users"], memory["events"], memory["kv_of_users"]) == (10, 100, 10 * 200 * 256)


def test_what_can_not_be_cached_says_why(made):  # noqa: F811
    folder, _, _ = model(made, positions={"counted": "from_end", "buckets": 9})
    words = pagoda("inspect", folder).stdout
    assert "cache     none, every request computes its whole history: positions are counted from the end" in words
    memory = json.loads(pagoda("inspect", folder, "--json").stdout)["memory"]
    assert (memory["kv_of_users"], memory["kv_per_row"], memory["kv_per_row_by_format"]) == (0, 0, None)


# ---- language models -------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 250,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GENERATION = {"eos_token_id": [2, 39], "do_sample": True, "temperature": 0.25, "top_k": 50, "top_p": 0.9}


def weights():
    """Random weights by the names of a Llama checkpoint."""
    shapes = {"model.embed_tokens": (40, 64), "model.norm": (64,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm": (64,), f"{at}.post_attention_layernorm": (64,)}
        shapes |= {f"{at}.self_attn.{part}_proj": (rows, 64) for part, rows in zip("qkvo", (64, 32, 32, 64))}
        shapes |= {f"{at}.mlp.{part}_proj": (96, 64) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (64, 96)}
    random = np.random.default_rng(7)
    return {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def language_model(tmp_path, template="{{ messages }}", generation=GENERATION, config=None, **options):
    """A folder exported from a tiny random Llama."""
    source = tmp_path / "source"
    source.mkdir()
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{token}": token for token in range(3, 40)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}}
    tokenizer_config = {"unk_token": "<unk>", "add_bos_token": True, "chat_template": template}
    files = {"config": LLAMA | (config or {}), "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}
    for name, content in (files | {"generation_config": generation}).items():
        (source / f"{name}.json").write_text(json.dumps(content))
    save_file(weights(), source / "model.safetensors")
    return tmp_path / "model", llm.export(source, tmp_path / "model", **options)


def test_a_language_model_in_words(tmp_path):
    folder, about = language_model(tmp_path, compute="f16", weights="int8", kv="int8")
    done = pagoda("inspect", folder)
    assert (done.returncode, done.stderr) == (0, "")
    words = re.sub(" +", " ", done.stdout)
    size = {name: file["bytes"] for name, file in about["files"].items()}
    for expected in (
        f"version {about['version']}",
        "blocks llama, 2 layers with 4 heads of 16 over 2 kv heads, rows of 64\n",
        "weights int8 in blocks of 32, the rest f16, computed in f16",
        "limits 250 tokens a sequence, a vocabulary of 40",
        "tokens bos 1 (before every text), eos 2 or 39, unk 0\n",
        "text a tokenizer and a chat template",
        "defaults do_sample true, temperature 0.25, top_k 50, top_p 0.9\n",
        # 2 layers, keys and values, 2 heads, 16 codes with a scale and a low end.
        "int8 keys and values, 160 B a token, pages of 32 tokens",
        "logits_rows, positions, kv_pool_0 to kv_pool_1, kv_scales_0 to kv_scales_1\n",
        "logits, kv_pool_0_out to kv_pool_1_out, kv_scales_0_out to kv_scales_1_out\n",
        f"chat_template.jinja {size['chat_template.jinja']} B whole",
        f"weights {(size['model.onnx'] + size['weights.bin']) / 1024:.1f} KiB more",
        # Native heads take 32 bytes, int4 8 and fp8 16, the latter with a scale alone.
        "keys and values of a token 160 B by kv_format: native 256 B, int8 160 B, int4 96 B, fp8 144 B",
        "of 1,000 tokens 156.2 KiB",
        # 8 pages.
        "of a sequence of 250 tokens 40.0 KiB in whole pages",
    ):
        assert expected in words, expected


@pytest.mark.parametrize("kv", ["native", "int8", "int4", "fp8"])
@pytest.mark.parametrize("form", ["native", "int8", "int4"])
@pytest.mark.parametrize("compute", ["f32", "f16", "bf16"])
def test_a_language_model_in_json(tmp_path, compute, form, kv):
    folder, about = language_model(tmp_path, compute=compute, weights=form, kv=kv)
    done = pagoda("inspect", folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    same = ("kind", "version", "architecture", "compute", "weights", "vocab_size", "hidden_size", "attention", "kv")
    for name in (*same, "limits", "tokens", "generation", "text"):
        assert report[name] == about[name], name
    assert report["whole"] and report["bytes_on_disk"] == sum(file["bytes"] for file in about["files"].values())
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    assert sorted(report["inputs"]) == sorted(value.name for value in graph.input)
    assert sorted(report["outputs"]) == sorted(value.name for value in graph.output)
    # The bytes of a token by the graph's own pools.
    numbers = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.UINT8: 1}
    of_token = 0
    for pool in (value.type.tensor_type for value in graph.input if value.name.startswith("kv_")):
        _, two, _, heads, width = (dim.dim_value for dim in pool.shape.dim)
        of_token += two * heads * width * numbers.get(pool.elem_type, 2)
    model = sum(about["files"][name]["bytes"] for name in ("model.onnx", "weights.bin"))
    cache = about["kv"]
    blocks, size = cache["layers"] * cache["heads"] * 2, cache["head_size"]
    native = size * (4 if compute == "f32" else 2)
    of_head = {"native": native, "int8": size + 4, "int4": size // 2 + 4, "fp8": size + 2}
    by_format = {form: blocks * bytes_of_head for form, bytes_of_head in of_head.items()}
    assert by_format[cache["format"]] == of_token
    assert report["memory"] == {
        "session_weights": model,
        "kv_per_token": of_token,
        "kv_per_token_by_format": by_format,
        "kv_per_1000_tokens": 1000 * of_token,
        "kv_of_longest_sequence": 256 * of_token,
    }


def test_a_model_without_template_and_defaults_says_so(tmp_path):
    folder, _ = language_model(tmp_path, template=None, generation={})
    words = pagoda("inspect", folder).stdout
    assert "text      a tokenizer, no chat template\n" in words
    assert "defaults  the model sets none\n" in words
    assert "weights   f32, computed in f32\n" in words and "cache     f32 keys and values" in words


def test_windows_are_shown(tmp_path):
    folder, _ = language_model(tmp_path, config={"model_type": "mistral", "sliding_window": 64, "head_dim": 16})
    assert "rows of 64, windows of 64 tokens in all layers\n" in pagoda("inspect", folder).stdout


def test_tensors_may_share_their_bytes(tmp_path):
    folder, _ = language_model(tmp_path, weights="int8")
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    places = {tensor.name: tuple((e.key, e.value) for e in tensor.external_data) for tensor in tensors}
    # The codes of the embedding, in the shape that its lookup takes and in the one that the head takes.
    assert places["embedding.rows"] == places["embedding.codes"] != ()
    assert pagoda("inspect", folder).returncode == 0


def test_options_of_ranking_models_are_refused(tmp_path):
    folder, _ = language_model(tmp_path)
    for option in "--users", "--events":
        done = pagoda("inspect", folder, option, 3)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"pagoda: {option}: .*this is a language model.*\n", done.stderr), done.stderr


def test_a_language_model_can_not_be_ranked_with(tmp_path):
    folder, _ = language_model(tmp_path)
    done = pagoda("rank", folder)
    assert (done.returncode, done.stdout) == (1, "")
    expected = 'this folder has the kind "generate", and one of the kind "rank" is needed here: it is a language model'
    assert expected in done.stderr


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "tokenizer.json", "chat_template.jinja"])
def test_a_language_model_that_is_not_whole_is_refused(tmp_path, name):
    folder, _ = language_model(tmp_path)
    good = (folder / name).read_bytes()
    changed = bytes([good[0] ^ 1]) + good[1:]
    for data, what in ((changed, "was changed"), (good[:-1], "was cut"), (None, "is missing")):
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        for command in (), ("--json",):
            done = pagoda("inspect", folder, *command)
            assert (done.returncode, done.stdout) == (1, "")
            assert re.fullmatch(rf"pagoda: folder: .*{name} {what}.*\n", done.stderr), done.stderr
        (folder / name).touch()


# ---- folders that are not whole --------------------------------------------------------------------------------------


def damaged(folder, how):
    manifest = folder / "pagoda.json"
    if how == "not there":
        return folder / "nowhere"
    if how == "no model folder":
        return folder.parent
    if how == "truncated model":
        os.truncate(folder / "model.onnx", (folder / "model.onnx").stat().st_size // 2)
    elif how == "truncated table":
        os.truncate(folder / "tables/items.safetensors", 1000)
    elif how == "a changed byte":
        data = bytearray((folder / "model.onnx").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "model.onnx").write_bytes(data)
    elif how == "missing table":
        (folder / "tables/items.safetensors").unlink()
    elif how == "another format":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    elif how == "truncated manifest":
        os.truncate(manifest, 300)
    return folder


DAMAGE = {
    "not there": "no such folder",
    "no model folder": "(no|neither a) pagoda.json in it",
    "truncated model": "model.onnx was cut",
    "truncated table": "tables/items.safetensors was cut",
    "a changed byte": "model.onnx was changed",
    "missing table": "tables/items.safetensors is missing",
    "another format": "format.* 2",
    "truncated manifest": "pagoda.json",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused(made, how):  # noqa: F811
    folder = damaged(model(made, lookup="bag")[0], how)
    for command in ["rank", folder], ["inspect", folder], ["inspect", folder, "--json"]:
        done = subprocess.run([RELEASE / "pagoda", *command], input="", capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"pagoda: folder: .*{DAMAGE[how]}.*\n", done.stderr), done.stderr


def test_weights_that_are_no_numbers_are_refused(made):  # noqa: F811
    folder, _, _ = model(made, lookup="bag")
    about = json.loads((folder / "pagoda.json").read_text())
    # The exporter refuses such weights, so that the folder has to be made by hand, hashes and all.
    rehash(folder, about, "tables/items.safetensors", lambda data: data[:-4] + np.float32("nan").tobytes())
    done = pagoda("inspect", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"pagoda: folder: .*items.* has NaN in row 39.*\n", done.stderr), done.stderr


def rehash(folder, about, name, change):
    """Changes a file and says so in pagoda.json."""
    data = change((folder / name).read_bytes())
    (folder / name).write_bytes(data)
    about["files"][name]["sha256"] = hashlib.sha256(data).hexdigest()
    text = json.dumps(about | {"version": "0" * 64}, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    (folder / "pagoda.json").write_text(text.replace("0" * 64, version, 1))
