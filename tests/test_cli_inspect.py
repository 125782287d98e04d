"""`pagoda inspect`: a model folder as text and as JSON, and damaged folders."""

import hashlib
import json
import os
import re
import subprocess

import numpy as np
import pytest
from exported import HOURS, made  # noqa: F401  (a fixture)
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
    assert report["whole"] and report["version"] == about["version"]
    assert (report["layers"], report["heads"], report["head_size"]) == (2, 2, 8)
    assert [feature["name"] for feature in report["features"]] == ["item", "genre", "rating"]
    assert report["limits"] == about["limits"]
    assert report["bytes_on_disk"] == sum(file["bytes"] for file in about["files"].values())
    memory = report["memory"]
    assert memory["tables"] == (40 + 6 + 5) * 16 * 4
    # 2 rows an event, 256 bytes a row, pages of 8 rows.
    assert memory["kv_per_1000_events"] == 2000 * 256
    assert (memory["users"], memory["events"], memory["kv_of_users"]) == (10, 100, 10 * 200 * 256)


def test_what_can_not_be_cached_says_why(made):  # noqa: F811
    folder, _, _ = model(made, positions={"counted": "from_end", "buckets": 9})
    words = pagoda("inspect", folder).stdout
    assert "cache     none, every request computes its whole history: positions are counted from the end" in words
    assert json.loads(pagoda("inspect", folder, "--json").stdout)["memory"]["kv_of_users"] == 0


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
    "no model folder": "no pagoda.json",
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
