"""`pagoda rank`: scores as the formulas compute them, one clear line for each error, the command line."""

import json
import os
import pty
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest
from exported import HOURS, Oracle, error, made, people, settings, tensors, with_user  # noqa: F401  (a fixture)
from test_cli import RELEASE, pagoda

TASKS = ("like", "click")
# Bytes that a line may have.
LONGEST = 64 << 20


def model(made, seed=1, **changes):  # noqa: F811
    """A folder, its configuration, and its formulas."""
    config = settings(interleaved=True, **changes)
    weights = tensors(config, seed)
    return made(config, weights), config, Oracle(config, weights)


def columns(rows, names):
    return {name: [row[name] for row in rows] for name in names}


def request(config, user, number, start=None, events=None, **changes):
    """The line for a user of exported.people."""
    tokens = config["tokens"]
    kinds = [kind for kind in ("item", "action", "user") if kind in tokens]
    names = {kind: [feature["name"] for feature in tokens[kind]["features"]] for kind in kinds}
    told = user["events"][start or 0 : events]
    made = {"user": number, "events": columns(told, names["item"] + names["action"] + ["time"])}
    made |= {"candidates": columns(user["candidates"], names["item"]), "time": user["now"]}
    made |= {"user_keys": user["keys"]} if names.get("user") else {}
    made |= {} if start is None else {"start": start}
    return {name: value for name, value in (made | changes).items() if value is not None}


def rank(folder, requests, *options):
    """What `pagoda rank --json --top 0` answers, line by line."""
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in requests)
    done = subprocess.run(
        [RELEASE / "pagoda", "rank", folder, "--json", "--top", "0", *map(str, options)],
        input=text,
        capture_output=True,
        text=True,
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def scores(answer):
    """In the order of the candidates."""
    found = np.full([answer["candidates"], len(TASKS)], np.nan)
    for column, task in enumerate(TASKS):
        places = answer["top"][task]
        assert [place["score"] for place in places] == sorted((place["score"] for place in places), reverse=True)
        for place in places:
            found[place["index"], column] = place["score"]
    return found


# ---- scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookup", ["gather", "bag"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_scores_are_those_of_the_formulas(made, lookup, at_once):  # noqa: F811
    folder, config, oracle = model(made, lookup=lookup, times=HOURS)
    users = people(config, [(7, 4), (0, 3), (25, 9), (1, 1), (18, 6)])
    requests = [request(config, user, number) for number, user in enumerate(users)]
    done, answers = rank(folder, requests, "--at-once", at_once)
    assert (done.returncode, done.stderr) == (0, "")
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    for answer, user in zip(answers, users):
        assert error(scores(answer), oracle.scores([user])) <= 1e-5
        assert (answer["events"], answer["computed_rows"]) == (len(user["events"]), 2 * len(user["events"]))
        for place in answer["top"]["like"]:
            assert place["keys"] == user["candidates"][place["index"]]


def test_users_have_features(made):  # noqa: F811
    config = with_user(settings())
    weights = tensors(config)
    user = people(config, [(9, 5)])[0]
    done, [answer] = rank(made(config, weights), [request(config, user, 7)])
    assert done.returncode == 0, done.stderr
    assert error(scores(answer), Oracle(config, weights).scores([user])) <= 1e-5


def test_a_history_goes_on_where_it_ended(made, tmp_path):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(30, 5)])
    first, second = (user | {"events": user["events"][:count]} for count in (20, 24))
    steps = [request(config, user, 7, events=20), request(config, user, 7, start=20, events=24)]
    done, answers = rank(folder, steps, "--store", tmp_path / "histories")
    assert done.returncode == 0, done.stderr
    assert [answer["cached_rows"] for answer in answers] == [0, 40]
    # Another process finds what the first has kept; the whole history is as good as what is new of it.
    done, [answer] = rank(folder, [request(config, user, 7)], "--store", tmp_path / "histories")
    assert done.returncode == 0, done.stderr
    assert answer["cached_rows"] >= 40 and answer["computed_rows"] == 60 - answer["cached_rows"]
    for answer, user in zip([*answers, answer], [first, second, user]):
        assert error(scores(answer), oracle.scores([user])) <= 1e-5
    done, [answer] = rank(folder, [request(config, user, 7)], "--cache", 0)
    assert (answer["cached_rows"], answer["computed_rows"]) == (0, 60)


def test_quantised_histories_are_of_their_format(made, tmp_path):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(30, 5)])
    line, store = [request(config, user, 7)], ("--store", tmp_path / "histories")
    for format, cached in ("int8", False), ("int8", True), ("fp8", False), ("native", False):
        done, [answer] = rank(folder, line, *store, "--kv-format", format)
        assert done.returncode == 0, done.stderr
        assert (answer["cached_rows"] > 0) == cached, format
        assert error(scores(answer), oracle.scores([user])) <= (1e-5 if format == "native" else 2e-2), format
    # Positions from the end: nothing is kept that could be quantised.
    folder, config, _ = model(made, positions={"counted": "from_end", "buckets": 9})
    done, _ = rank(folder, [], "--kv-format", "int8")
    assert done.returncode == 1 and "int8, and this model keeps no keys and values" in done.stderr


def test_tables_are_for_people(made, tmp_path):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(3, 6)])
    (tmp_path / "requests.jsonl").write_text("\n" + json.dumps(request(config, user, 7)) + "\n")
    done = pagoda("rank", folder, "--requests", tmp_path / "requests.jsonl", "--top", 2)
    assert (done.returncode, done.stderr) == (0, "")
    about, tasks, head, *places = done.stdout.splitlines()
    assert re.fullmatch(
        r"line 2, user 7: 3 events and 6 candidates; 0 rows from the cache, 6 computed, [\d.]+ ms", about
    )
    assert tasks.split() == list(TASKS) and head.split() == ["item/genre", "score"] * 2
    order = np.argsort(-oracle.scores([user]), axis=0)[:2]
    for place, (row, best) in enumerate(zip(places, order, strict=True)):
        number, *cells = row.split()
        keys = [f"{user['candidates'][at]['item']}/{user['candidates'][at]['genre']}" for at in best]
        assert int(number) == place + 1 and cells[::2] == keys


# ---- what is wrong -----------------------------------------------------------------------------------------------

WRONG = {
    "not JSON": ('{"user": 7,\n', "request: not JSON: EOF while parsing a value at column 11", "INVALID_ARGUMENT"),
    "an unknown field": ({"candiates": []}, "candiates: no such field; did you mean `candidates`?", "INVALID_ARGUMENT"),
    "an unknown feature": (
        {"candidates": {"itme": [1]}},
        "candidates.itme: no such feature here; did you mean `item`?",
        "INVALID_ARGUMENT",
    ),
    "no candidates": ({"candidates": []}, "candidate", "INVALID_ARGUMENT"),
    "100,000 candidates": (
        {"candidates": {"item": [1] * 100_000, "genre": [1] * 100_000}},
        r"100,?000.*\b50\b",
        "INVALID_ARGUMENT",
    ),
    "a gap": ({"start": 3}, r"gap.*whole history", "NOT_FOUND"),
    "an unknown item": ({"candidates": {"item": [4711], "genre": [1]}}, r"item.*4711", None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_line_fails_alone(made, wrong):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(5, 4)])
    good = request(config, user, 7)
    change, message, status = WRONG[wrong]
    bad = change if isinstance(change, str) else request(config, user, 8, **change)
    done, answers = rank(folder, [good, bad, good])
    assert done.returncode == 1
    assert [answer["line"] for answer in answers] == [1, 2, 3]
    assert re.search(message, answers[1]["error"]), answers[1]
    assert "\n" not in answers[1]["error"] and status in (None, answers[1]["status"])
    for answer in answers[::2]:
        assert error(scores(answer), oracle.scores([user])) <= 1e-5
    # In words: one line on stderr, with the number of the line.
    text = bad if isinstance(bad, str) else json.dumps(bad) + "\n"
    done = subprocess.run([RELEASE / "pagoda", "rank", folder], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"pagoda: line 1: {answers[1]['error']}\n"


def test_a_line_that_is_too_long_fails_alone(made):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(5, 4)])
    good = json.dumps(request(config, user, 7))
    done, answers = rank(folder, [good.ljust(LONGEST) + "\n", good.ljust(LONGEST + 1) + "\n", good + "\n"])
    assert (done.returncode, [answer["line"] for answer in answers]) == (1, [1, 2, 3])
    assert answers[1]["status"] == "INVALID_ARGUMENT" and "longer than 64.0 MiB" in answers[1]["error"]
    for answer in answers[::2]:
        assert error(scores(answer), oracle.scores([user])) <= 1e-5
    done = subprocess.run([RELEASE / "pagoda", "rank", folder], input=bytes(LONGEST + 1), capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(r"pagoda: line 1: request: longer than 64\.0 MiB, .*\n", done.stderr.decode()), done.stderr


def test_a_line_without_an_end_takes_no_memory(made):  # noqa: F811
    folder, config, _ = model(made)
    [user] = people(config, [(5, 4)])
    command = [RELEASE / "pagoda", "rank", folder, "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(512):
            process.stdin.write(bytes(1 << 20))
        process.stdin.write(b"\n" + json.dumps(request(config, user, 7)).encode() + b"\n")
        process.stdin.flush()
        bad, good = (json.loads(process.stdout.readline()) for _ in range(2))
        with open(f"/proc/{process.pid}/status") as status:
            most = int(re.search(r"VmHWM:\s*(\d+) kB", status.read())[1])
    assert (bad["line"], good["line"], good["events"], process.returncode) == (1, 2, 5, 1)
    assert "longer than 64.0 MiB" in bad["error"]
    assert most < 300 << 10


def test_a_byte_order_mark_begins_a_text(made, tmp_path):  # noqa: F811
    folder, config, oracle = model(made)
    [user] = people(config, [(5, 4)])
    mark, good = "\ufeff", json.dumps(request(config, user, 7)) + "\n"
    done, [answer] = rank(folder, [mark + good])
    assert done.returncode == 0 and error(scores(answer), oracle.scores([user])) <= 1e-5
    (tmp_path / "requests.jsonl").write_text(good, encoding="utf-8-sig")
    assert pagoda("rank", folder, "--requests", tmp_path / "requests.jsonl").returncode == 0
    # Only there.
    done, answers = rank(folder, [mark + "\n", good, mark + good])
    assert done.returncode == 1 and [(answer["line"], "top" in answer) for answer in answers] == [(2, True), (3, False)]


def test_requests_that_can_not_be_read(made, tmp_path):  # noqa: F811
    folder, config, _ = model(made)
    done = pagoda("rank", folder, "--requests", tmp_path / "nowhere")
    assert done.returncode == 1 and re.fullmatch(r"pagoda: --requests: .*nowhere can not be read: .*\n", done.stderr)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    done = pagoda("rank", folder, "--requests", tmp_path / "binary")
    assert done.returncode == 1 and done.stderr.startswith("pagoda: line 1: request: not UTF-8")


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["rnak"],
        ["rank"],
        ["inspect"],
        ["rank", "folder", "--colour"],
        ["rank", "folder", "--cache", "much"],
        ["rank", "folder", "--at-once", "0"],
        ["completions", "cmd"],
        ["bench", "luck"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments):
    done = pagoda(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: pagoda" in done.stderr or "For more information, try '--help'" in done.stderr


def test_completions_load():
    for shell in "bash", "zsh", "fish":
        done = pagoda("completions", shell)
        assert done.returncode == 0 and "inspect" in done.stdout and "at-once" in done.stdout
    done = pagoda("completions", "bash")
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    asked = 'COMP_WORDS=(pagoda ins); COMP_CWORD=1; _pagoda pagoda ins pagoda; echo "${COMPREPLY[@]}"'
    found = subprocess.run(["bash", "-c", f"{done.stdout}\n{asked}"], capture_output=True, text=True, check=True)
    assert found.stdout == "inspect\n"
    assert "__fish_pagoda_using_subcommand bench\" -f -a \"attention\"" in pagoda("completions", "fish").stdout


def test_the_benchmark_says_how_to_make_its_model(tmp_path):
    done = pagoda("bench", "rank", "--model", tmp_path)
    assert done.returncode == 1 and "make bench-model" in done.stderr and done.stderr.count("\n") == 1


def test_benchmarks_are_a_program_beside_the_command(tmp_path):
    command = shutil.copy(RELEASE / "pagoda", tmp_path)
    done = subprocess.run([command, "bench", "kv"], capture_output=True, text=True)
    assert done.returncode == 1 and "make build" in done.stderr and done.stderr.count("\n") == 1
    program = tmp_path / "pagoda-bench"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    program.chmod(0o755)
    done = subprocess.run([command, "bench", "kv", "--model", "a b", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "kv\n--model\na b\n--json\n")


def test_a_reader_may_leave_early(made, tmp_path):  # noqa: F811
    folder, config, _ = model(made)
    [user] = people(config, [(3, 6)])
    (tmp_path / "many").write_text((json.dumps(request(config, user, 7)) + "\n") * 500)
    piped = f"{RELEASE}/pagoda rank {folder} --requests {tmp_path}/many | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.stdout.startswith("line 1, user 7") and done.stdout.endswith("\n0\n") and done.stderr == ""


def test_progress_is_for_terminals(made):  # noqa: F811
    folder, config, _ = model(made)
    [user] = people(config, [(3, 6)])
    line = (json.dumps(request(config, user, 7)) + "\n").encode()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [RELEASE / "pagoda", "rank", folder, "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    # The bar comes after a moment without an end.
    process.stdin.write(line)
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["user"] == 7
    seen = b""
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    while b"ranking" not in seen:
        seen += os.read(ours, 4096)
    watchdog.cancel()
    process.stdin.close()
    assert process.wait() == 0
