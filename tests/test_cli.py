"""The `pagoda` command on a store that a program has written."""

import json
import subprocess

from capi import ROOT

RELEASE = ROOT / "target/release"


def pagoda(*arguments):
    return subprocess.run([RELEASE / "pagoda", *map(str, arguments)], capture_output=True, text=True)


def remember(folder):
    subprocess.run([RELEASE / "remember-c", ROOT / "target/demo/model.onnx", folder], check=True, capture_output=True)


def numbers(*arguments):
    done = pagoda("store", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_store_that_is_whole(tmp_path):
    folder = tmp_path / "histories"
    remember(folder)
    remember(folder)
    stats = numbers("stats", folder)
    assert (stats["owners"], stats["records"], stats["index_rebuilds"]) == (1, 2, 0)
    check = numbers("check", folder)
    assert (check["records"], check["corrupt_records"], check["damaged_regions"]) == (2, 0, 0)
    assert numbers("rebuild", folder)["owners"] == 1
    assert numbers("stats", folder) == stats
    compacted = numbers("compact", folder)
    assert (compacted["owners"], compacted["freed_bytes"]) == (1, 0)
    assert "owners" in pagoda("store", "stats", folder).stdout


def test_space_comes_back(tmp_path):
    folder = tmp_path / "histories"
    remember(folder)
    # The next visits replace one another's small pieces.
    for _ in range(4):
        remember(folder)
    before = numbers("stats", folder)
    assert before["file_bytes"] > before["live_bytes"] + 4096
    compacted = numbers("compact", folder)
    assert compacted["freed_bytes"] > 0 and compacted["owners"] == 1
    assert numbers("stats", folder)["live_bytes"] == before["live_bytes"]
    remember(folder)


def test_damage_is_found(tmp_path):
    folder = tmp_path / "histories"
    # Twice, for at the very end damage looks like a write that a crash has cut off.
    remember(folder)
    remember(folder)
    segment = folder / "segment-0000000001.pgd"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    done = pagoda("store", "check", folder, "--json")
    assert done.returncode == 1 and "is damaged" in done.stderr
    assert json.loads(done.stdout)["corrupt_records"] == 1


def test_what_is_no_store_is_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/a.txt").write_text("dear")
    for command in ("stats", "check", "rebuild", "compact"):
        for folder in (tmp_path / "letters", tmp_path / "nowhere"):
            done = pagoda("store", command, folder)
            assert done.returncode == 1 and "is not a store" in done.stderr, (command, done)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "letters"]
