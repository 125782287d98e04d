"""`pagoda generate`: the tokens that the model gives, one clear line for each error, streams, interrupts.

The tiny model has random weights and tokens of one byte: what it says means nothing, but is always the same."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from capi import ROOT
from paged import Paged
from pagoda.export import export_language_model
from test_cli import RELEASE, pagoda
from tokenizers import Tokenizer

MODEL = ROOT / "tests/data/generate/llama"
EOS = {2, 4}
# Longer than anything takes on a busy machine.
HANGS = 120


def generate(*arguments, input=None):
    command = [RELEASE / "pagoda", "generate", MODEL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, input=input, timeout=HANGS)


def json_lines(text):
    # Not by splitlines, which ends a line at characters such as U+0085 too: a text may have them.
    return [json.loads(line) for line in text.split("\n")[:-1]]


def answers(*arguments, input=None, code=0):
    done = generate(*arguments, "--json", input=input)
    assert done.returncode == code, done.stderr
    return json_lines(done.stdout)


def lines(*requests):
    return "".join(json.dumps(request) + "\n" for request in requests)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def greedy():
    """The likeliest tokens after a prompt, each from a run over the whole sequence."""

    def tokens(prompt, count, folder=MODEL):
        made = []
        while len(made) < count and not (made and made[-1] in EOS):
            model = Paged(folder, pages=8)
            logits = model.step({"a": np.array(prompt + made)})["a"]
            made.append(int(logits[-1].argmax()))
        return made

    return tokens


# ---- answers -----------------------------------------------------------------------------------------------------


def test_an_answer_is_what_the_model_says(tokenizer, greedy):
    prompt = tokenizer.encode("Hello the").ids
    [answer] = answers("--prompt", "Hello the", "-m", 12, "--greedy")
    [choice] = answer["choices"]
    assert choice["tokens"] == greedy(prompt, 12)
    assert choice["text"] == tokenizer.decode(choice["tokens"])
    assert choice["finish_reason"] in ("length", "stop")
    usage = {"prompt_tokens": len(prompt), "cached_tokens": 0, "completion_tokens": len(choice["tokens"])}
    assert (answer["id"], answer["usage"]) == (1, usage)
    times = answer["timings"]
    assert 0 <= times["queued_ms"] <= times["first_token_ms"] <= times["total_ms"]
    assert times["tokens_per_second"] > 0


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8"])
def test_pages_may_be_quantised_when_a_model_is_opened_or_exported(tokenizer, greedy, tmp_path, kv):
    folder = tmp_path / "folder"
    export_language_model(ROOT / "tests/data/llm/llama", folder, kv=kv)
    prompt = tokenizer.encode("Hello the world of pages").ids
    expected = greedy(prompt, 24, folder)
    arguments = ["--json", "--prompt", "Hello the world of pages", "-m", 24, "--greedy"]
    for model, flags in [(folder, []), (MODEL, ["--kv-format", kv])]:
        done = pagoda("generate", model, *arguments, *flags)
        assert json.loads(done.stdout)["choices"][0]["tokens"] == expected
    [native] = answers(*arguments[1:])
    done = pagoda("generate", folder, *arguments, "--kv-format", "native")
    assert json.loads(done.stdout)["choices"] == native["choices"]


def test_a_ring_of_the_newest_tokens_is_a_window(tokenizer, greedy, tmp_path):
    # The same weights in a model that sees 16 tokens. Step by step, a ring of 16 slots holds the same ones.
    source, folder = tmp_path / "source", tmp_path / "folder"
    shutil.copytree(ROOT / "tests/data/llm/llama", source)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (source / "config.json").write_text(json.dumps(config))
    export_language_model(source, folder)
    text = "Hello the world of pages that are few"
    prompt = tokenizer.encode(text).ids
    assert len(prompt) > 20
    policy = ["--kv-policy", "lastrec", "--cache-length", 16, "--protect", 0, "--chunk-size", 1]
    [answer] = answers("--prompt", text, "-m", 40, "--greedy", *policy)
    assert answer["choices"][0]["tokens"] == greedy(prompt, 40, folder) != greedy(prompt, 40)


def test_a_policy_says_what_it_needs():
    done = generate("-p", "Hello", "--kv-policy", "h2o")
    assert done.returncode == 2 and "--cache-length" in done.stderr
    done = generate("-p", "Hello", "--kv-policy", "qh2o", "--cache-length", 64)
    assert done.returncode == 1 and done.stderr.startswith("pagoda: --kv-policy: ") and "--kv-format" in done.stderr
    done = generate("-p", "Hello", "--kv-policy", "h2o", "--cache-length", "64,64,64")
    assert done.returncode == 1 and done.stderr.startswith("pagoda: --cache-length: 3 numbers for a model of ")


def test_a_line_chooses_its_policy():
    slots, prompt = ["--cache-length", 64, "-m", 8, "--temperature", 0], [5 + at * 7 % 250 for at in range(300)]
    chosen = [{}, {"kv_policy": "lastrec"}, {"kv_policy": {"name": "lastrec", "protect": 3}}, {"kv_policy": "h2o-vlen"}]
    requests = lines(*({"prompt": prompt, **policy} for policy in chosen))
    *made, refused = answers("--requests", "-", "--kv-policy", "h2o", *slots, input=requests, code=1)
    made = [answer["choices"][0]["tokens"] for answer in made]
    assert len({tuple(tokens) for tokens in made}) == 3
    of_line = lines({"prompt": prompt})
    for policy, tokens in zip((["h2o"], ["lastrec"], ["lastrec", "--protect", 3]), made):
        [alone] = answers("--requests", "-", "--kv-policy", *policy, *slots, input=of_line)
        assert alone["choices"][0]["tokens"] == tokens, policy
    assert refused["error"].startswith("kv_policy.name: h2o-vlen needs ") and refused["status"] == "UNSUPPORTED"


def test_beams_are_printed_with_their_scores():
    options = ["-m", 12, "--beams", 4, "-n", 3, "--length-penalty", 0.5, "--early-stop", "never"]
    [answer] = answers("-p", "Hello", *options)
    scores = [choice["score"] for choice in answer["choices"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    line = {"prompt": "Hello", "beams": {"width": 4, "length_penalty": 0.5, "early_stop": "never"}, "n": 3}
    [of_line, plain] = answers("--requests", "-", "-m", 12, input=lines(line, {"prompt": "Hello"}))
    assert of_line["choices"] == answer["choices"] and "score" not in plain["choices"][0]
    done = generate("-p", "Hello", "--beams", 17)
    assert done.returncode == 1 and "beams.width: 17 is not between 1 and 16" in done.stderr
    assert generate("-p", "Hello", "--beams", 4, "-t", 0.5).returncode == 2
    assert generate("-p", "Hello", "--length-penalty", 2).returncode == 2


def test_text_alone_is_text_alone():
    [answer] = answers("-p", "Hello", "-m", 16, "--seed", 5)
    text = answer["choices"][0]["text"].rstrip("\n") + "\n"
    for stream in [], ["--stream"]:
        done = generate("-p", "Hello", "-m", 16, "--seed", 5, *stream)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.rstrip("\n") + "\n" == text


def test_a_prompt_may_be_a_file(tmp_path):
    (tmp_path / "prompt").write_text("Hello\n")
    [by_file] = answers("--prompt-file", tmp_path / "prompt", "-m", 4, "--seed", 1)
    [by_stdin] = answers("--prompt-file", "-", "-m", 4, "--seed", 1, input="Hello\n")
    [by_flag] = answers("--prompt", "Hello\n", "-m", 4, "--seed", 1)
    assert by_file["choices"] == by_stdin["choices"] == by_flag["choices"]
    done = generate("--prompt-file", tmp_path / "missing")
    assert done.returncode == 1 and done.stderr.startswith("pagoda: --prompt-file: ") and "missing" in done.stderr


def test_requests_are_answered_in_order(tokenizer, greedy):
    # The first is the longest: it ends last.
    prompts = ["a longer one", "b", [1, 70, 71], "the"]
    counts = [40, 2, 3, 9]
    asked = [
        {"prompt": prompt, "max_new_tokens": count, "temperature": 0, "id": f"r{at}"}
        for at, (prompt, count) in enumerate(zip(prompts, counts))
    ]
    made = answers("--requests", "-", input=lines(*asked))
    assert [answer["id"] for answer in made] == ["r0", "r1", "r2", "r3"]
    for answer, prompt, count in zip(made, prompts, counts):
        ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt).ids
        assert answer["choices"][0]["tokens"] == greedy(ids, count)
    unordered = answers("--requests", "-", "--unordered", input=lines(*asked))
    assert sorted(answer["id"] for answer in unordered) == ["r0", "r1", "r2", "r3"]
    by_id = {answer["id"]: answer["choices"] for answer in unordered}
    assert all(by_id[answer["id"]] == answer["choices"] for answer in made)


def test_flags_hold_where_a_line_says_nothing():
    requests = lines({"prompt": "ab", "max_new_tokens": 2}, {"prompt": "ab", "seed": 9}, {"prompt": "ab"})
    made = answers("--requests", "-", "-m", 6, "--seed", 3, "--ignore-eos", input=requests)
    assert [len(answer["choices"][0]["tokens"]) for answer in made] == [2, 6, 6]
    assert made[0]["choices"][0]["tokens"] == made[2]["choices"][0]["tokens"][:2]
    assert [answer["id"] for answer in made] == [1, 2, 3]
    [alone] = answers("-p", "ab", "-m", 6, "--seed", 9, "--ignore-eos")
    assert alone["choices"] == made[1]["choices"]


def test_more_than_fit_at_once():
    count = 40
    requests = lines(*({"prompt": f"number {at}", "seed": at} for at in range(count)))
    made = answers("--requests", "-", "-m", 4, "--max-batch", 2, input=requests)
    assert [answer["id"] for answer in made] == list(range(1, count + 1))
    alone = answers("--prompt", "number 31", "-m", 4, "--seed", 31)
    assert made[31]["choices"] == alone[0]["choices"]


def test_several_choices_and_log_probabilities(tokenizer):
    arguments = ["-p", "Hello", "-m", 5, "-n", 3, "--seed", 1, "--logprobs", 2, "--prompt-logprobs", 1, "--ignore-eos"]
    [answer] = answers(*arguments)
    assert len(answer["choices"]) == 3 and answer["usage"]["completion_tokens"] == 15
    for choice in answer["choices"]:
        assert [entry["token"] for entry in choice["logprobs"]] == choice["tokens"]
        for entry in choice["logprobs"]:
            assert len(entry["top"]) == 2 and entry["top"][0]["logprob"] >= entry["logprob"]
            assert (entry["rank"] == 1) == (entry["top"][0]["token"] == entry["token"])
    prompt = answer["prompt_logprobs"]
    assert prompt[0] is None and [entry["token"] for entry in prompt[1:]] == tokenizer.encode("Hello").ids[1:]
    assert prompt[1]["text"] == "H"


def test_stops(tokenizer):
    [whole] = answers("-p", "Hello", "-m", 24, "--greedy", "--ignore-eos")
    tokens = whole["choices"][0]["tokens"]
    # A printable token that is new at its place.
    at = next(at for at, token in enumerate(tokens) if at > 2 and 69 <= token <= 94 and token not in tokens[:at])
    stop = tokenizer.decode([tokens[at]])
    base = ["-p", "Hello", "-m", 24, "--greedy", "--ignore-eos"]
    [cut] = answers(*base, "--stop", stop)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["text"] == tokenizer.decode(tokens[:at])
    [kept] = answers(*base, "--stop", stop, "--include-stop")
    assert kept["choices"][0]["text"] == tokenizer.decode(tokens[: at + 1])
    [by_token] = answers(*base, "--stop-token", tokens[at])
    assert by_token["choices"][0]["tokens"] == tokens[: at + 1]
    [without] = answers(*base, "--logit-bias", f"{tokens[0]}=-100")
    assert without["choices"][0]["tokens"][0] != tokens[0]


def test_a_session_goes_on_in_the_next_command(tmp_path):
    prompt = [1] + list(range(69, 89)) * 3
    request = {"prompt": prompt, "session": "anna", "max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    [first] = answers("--requests", "-", "--store", tmp_path / "kept", input=lines(request))
    assert first["usage"]["cached_tokens"] == 0
    longer = {**request, "prompt": prompt + first["choices"][0]["tokens"] + [70]}
    [second] = answers("--requests", "-", "--store", tmp_path / "kept", input=lines(longer))
    # The keys and values of its last token were not computed.
    assert second["usage"]["cached_tokens"] == len(prompt) + 4
    [fresh] = answers("--requests", "-", input=lines(longer))
    assert fresh["usage"]["cached_tokens"] == 0 and fresh["choices"] == second["choices"]


def test_equal_beginnings_are_shared():
    # Pages have 32 tokens; whole pages are shared.
    prompt = [1] + list(range(69, 89)) * 4
    requests = lines({"prompt": prompt}, {"prompt": prompt + [5]})
    cached = [
        [answer["usage"]["cached_tokens"] for answer in answers("--requests", "-", "-m", 2, *flags, input=requests)]
        for flags in (["--max-batch", 1], ["--max-batch", 1, "--no-sharing"])
    ]
    assert cached[0][0] == 0 and cached[0][1] >= 64
    assert cached[1] == [0, 0]


# ---- streams -----------------------------------------------------------------------------------------------------


def test_a_stream_of_objects_is_the_answer():
    requests = lines(
        {"id": "a", "prompt": "Hello", "n": 2, "seed": 1, "max_new_tokens": 12},
        {"id": "b", "prompt": "there", "seed": 2, "max_new_tokens": 7, "logprobs": 1},
    )
    made = answers("--requests", "-", "--stream", input=requests)
    whole = {answer["id"]: answer for answer in made if "choices" in answer}
    assert set(whole) == {"a", "b"}
    for name, count in ("a", 2), ("b", 1):
        for at in range(count):
            tokens = [one for one in made if one["id"] == name and one.get("choice") == at]
            choice = whole[name]["choices"][at]
            assert [one["token"] for one in tokens] == choice["tokens"]
            assert "".join(one["text"] for one in tokens) == choice["text"]
            ends = [one["finish_reason"] for one in tokens]
            assert ends == [None] * (len(tokens) - 1) + [choice["finish_reason"]]
            assert all(("logprobs" in one) == (name == "b") for one in tokens)
    # The answer comes after its last token.
    last = {name: max(at for at, one in enumerate(made) if one["id"] == name) for name in whole}
    assert all("choices" in made[at] for at in last.values())


def test_text_of_several_requests():
    requests = lines({"prompt": "Hello", "seed": 1}, {"id": "b", "prompt": "x", "n": 2, "seed": 2})
    made = answers("--requests", "-", "-m", 6, input=requests)
    texts = [choice["text"] for answer in made for choice in answer["choices"]]
    for stream in [], ["--stream"]:
        done = generate("--requests", "-", "-m", 6, *stream, input=requests)
        assert (done.returncode, done.stderr) == (0, "")
        at = -1
        for heading, text in zip(["line 1:", 'line 2, "b", answer 1 of 2:', 'line 2, "b", answer 2 of 2:'], texts):
            at = done.stdout.index(heading, at + 1)
            assert done.stdout[at:].split("\n", 1)[1].startswith(text)


def test_answers_come_while_the_next_line_is_typed():
    command = [RELEASE / "pagoda", "generate", MODEL, "--requests", "-", "--json", "-m", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for at in (1, 2):
            process.stdin.write(lines({"prompt": "Hello"}))
            process.stdin.flush()
            assert select.select([process.stdout], [], [], HANGS)[0]
            assert json.loads(process.stdout.readline())["id"] == at
        process.stdin.close()
        assert process.wait(HANGS) == 0


# ---- errors ------------------------------------------------------------------------------------------------------


def test_a_bad_line_fails_alone():
    requests = '{"prompt": "a"}\n{"promt": "b"}\n\n[1]\n{"id": "x", "prompt": [1, 999]}\n\xff{\n' + lines(
        {"prompt": "c", "max_new_tokens": 600}, {"id": "y", "prompt": "d"}
    )
    made = answers("--requests", "-", "-m", 2, input=requests, code=1)
    assert [(answer["id"], answer.get("line")) for answer in made] == [
        (1, None), (2, 2), (4, 4), ("x", 5), (6, 6), (7, 7), ("y", None),
    ]  # fmt: skip
    errors = [answer.get("error", "") for answer in made]
    assert errors[1] == "promt: no such field; did you mean `prompt`?"
    assert errors[2].startswith("request: a list of 1 is not an object such as")
    assert errors[3] == "prompt[1]: 999 is no token: the model has 272, from 0 on"
    assert errors[4].startswith("request: not JSON")
    assert "the model's context of 512" in errors[5]
    assert {answer["status"] for answer in made if "error" in answer} == {"INVALID_ARGUMENT"}
    done = generate("--requests", "-", "-m", 2, input=requests)
    assert done.returncode == 1 and done.stderr.splitlines()[0] == f"pagoda: line 2: {errors[1]}"
    assert done.stderr.count("\n") == 5 and done.stdout.startswith("line 1: 2 tokens")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "a", "-t", "-1"], "temperature: is -1"),
        (["-p", "a", "--stop", ""], "stop: an empty text"),
        (["-p", "a", "--cache", "1"], "--cache: "),
        (["-p", "a", "--max-stretch", "0.5"], "--max-stretch: 0.5"),
        (["-p", "a", "-m", "9", "--cache", "8KiB", "--min-new-tokens", "10"], "min_new_tokens: is 10"),
        (["-p", "a", "--tools", "[]"], "--tools: given without --messages"),
        (["--messages", "[]"], "--messages: an empty list"),
        (["--messages", "[{]"], "--messages: not JSON"),
        (["--messages", '[{"content": "hi"}]'], "--messages[0]: an object is not a message"),
        (["--requests", "nowhere.jsonl"], "--requests: nowhere.jsonl can not be read"),
    ],
)
def test_what_is_wrong_is_named(arguments, message):
    done = generate(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"pagoda: {message}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-p", "a", "--requests", "-"],
        ["-p", "a", "--greedy", "-t", "1"],
        ["-p", "a", "--logprobs", "1"],
        ["-p", "a", "--logit-bias", "a"],
        ["-p", "a", "--timeout", "0"],
        ["-p", "a", "--provider", "tpu"],
        ["-p", "a", "--context-end", "never"],
        ["-p", "a", "--max-batch", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments):
    done = generate(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and "--help" in done.stderr


def test_a_ranking_model_is_refused(tmp_path):
    (tmp_path / "pagoda.json").write_text('{"format": 1, "kind": "rank"}')
    done = pagoda("generate", tmp_path, "-p", "a")
    assert done.returncode == 1 and "rank" in done.stderr and done.stderr.count("\n") == 1


# ---- interrupts --------------------------------------------------------------------------------------------------

# One that ends at once, and many that take longer than a signal.
LONG = lines(
    {"prompt": "a", "max_new_tokens": 1},
    *({"prompt": f"{at}", "max_new_tokens": 500, "ignore_eos": True} for at in range(3000)),
)


@pytest.mark.parametrize("arguments", [["--json"], ["--stream"], ["--stream", "--json"]], ids=" ".join)
def test_an_interrupt_ends_all_answers(arguments, tmp_path):
    (tmp_path / "requests").write_text(LONG)
    command = [RELEASE / "pagoda", "generate", MODEL, "--requests", tmp_path / "requests", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        # The others are read and begun by then; they take far longer than this.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        # Not by communicate, which leaves out what readline has read ahead.
        rest, errors = process.stdout.read(), process.stderr.read()
    assert (process.returncode, errors) == (130, "") and first
    if "--json" in arguments:
        made = json_lines(rest)
        ended = [one["choices"][0]["finish_reason"] for one in made if "choices" in one]
        # Those in flight, and no others.
        assert "cancelled" in ended and len(ended) < 1000


def test_an_interrupt_while_nothing_is_asked():
    command = [RELEASE / "pagoda", "generate", MODEL, "--requests", "-", "--json", "-m", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(lines({"prompt": "Hello"}))
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGS) == 130


def test_a_reader_may_leave_early(tmp_path):
    (tmp_path / "requests").write_text(lines({"prompt": "a"}) * 3000)
    piped = (
        f"{RELEASE}/pagoda generate {MODEL} --requests {tmp_path}/requests -m 5 --json | head -n 1; "
        "echo ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.startswith('{"id":1') and done.stdout.endswith("\n0\n") and done.stderr == ""


def test_a_terminal_does_not_obey_the_model():
    # Byte 27 is the token of the character that ByteLevel writes as ě.
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    escape = next(token for text, token in vocabulary.items() if text == chr(0x100 + 27))
    only = ["--logit-bias", f"{escape}=1000", "--greedy"]
    command = [RELEASE / "pagoda", "generate", MODEL, "-p", "a", "-m", "2", *only]
    piped = subprocess.run(command, capture_output=True, timeout=HANGS)
    assert piped.stdout == b"\x1b\x1b\n"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    seen, begun = b"", time.monotonic()
    while b"\n" not in seen and time.monotonic() - begun < HANGS:
        seen += os.read(ours, 4096)
    assert process.wait(HANGS) == 0
    assert seen.decode() == "\ufffd\ufffd\r\n"
