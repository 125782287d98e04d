"""`pagoda chat`: at a terminal and in scripts, with the tiny model of random weights and with SmolLM2."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

import pytest
from capi import ROOT
from test_cli import RELEASE

TINY = ROOT / "tests/data/generate/llama"
SMOLLM2 = ROOT / "target/models/smollm2"
# Longer than anything takes on a busy machine.
HANGS = 200
# More than two pages of the tiny model. Its answers are no text, and have other tokens when they come back as messages.
SYSTEM = "You speak in bytes that mean nothing, and nobody minds: it is what your weights are good for."
FIGURES = re.compile(
    r"(\d+) tokens?(?:, ([\d.]+) tokens/s)?(?:, the first after ([\d.]+) s)?; "
    r"(\d+) of (\d+) prompt tokens cached(, \w+)?"
)


def chat(*arguments, input, model=TINY):
    command = [RELEASE / "pagoda", "chat", model, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, input=input, timeout=HANGS)


def figures(text):
    """Of each answer: its tokens, the cached tokens, and those of the prompt."""
    return [(int(found[1]), int(found[4]), int(found[5])) for found in FIGURES.finditer(text)]


class Terminal:
    """`pagoda chat` at a terminal."""

    def __init__(self, *arguments, model=TINY):
        ours, theirs = pty.openpty()
        command = [RELEASE / "pagoda", "chat", model, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Ctrl-C goes to the processes of the terminal that the session has.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self.ours, self.seen, self.at = ours, "", 0

    def __enter__(self):
        self.until("> ")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def until(self, text):
        """Reads until the text comes; returns what came before it."""
        begun = time.monotonic()
        while (found := self.seen.find(text, self.at)) < 0:
            left = HANGS - (time.monotonic() - begun)
            assert left > 0 and select.select([self.ours], [], [], left)[0], f"{text!r} does not come: {self.seen!r}"
            self.seen += os.read(self.ours, 4096).decode(errors="replace").replace("\r\n", "\n")
        before, self.at = self.seen[self.at : found], found + len(text)
        return before

    def type(self, text):
        os.write(self.ours, text.encode())

    def ask(self, text):
        """What a line gives, until the next prompt."""
        self.type(text + "\n")
        self.until(text + "\n")
        return self.until("\n> ")

    def end(self):
        self.type("\x04")
        assert self.process.wait(HANGS) == 0


# ---- scripts -----------------------------------------------------------------------------------------------------


def test_a_script_gets_answers_alone():
    done = chat("-m", 12, "--greedy", "--ignore-eos", "--system", SYSTEM, input="Hello\n\nthere\n")
    assert done.returncode == 0
    assert "> " not in done.stdout and "cached" not in done.stdout
    first, second = figures(done.stderr)
    assert done.stderr.count("\n") == 2 and first[:2] == (12, 0) and second[0] == 12
    # The second message was sent with all that came before it, of which the keys and values were there.
    assert second[2] > first[2] + 12 and second[1] >= 64


def test_a_conversation_is_what_its_messages_say(tmp_path):
    """The second answer is that of a request with the whole conversation."""
    file = tmp_path / "talk.json"
    done = chat("-m", 10, "--greedy", "--system", "Be brief.", input=f"Hello\nthere\n/save {file}\n")
    assert done.returncode == 0
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[at]["content"] for at in (0, 1, 3)] == ["Be brief.", "Hello", "there"]
    assert messages[2]["content"] in done.stdout and messages[4]["content"] in done.stdout
    command = [RELEASE / "pagoda", "generate", TINY, "--messages", json.dumps(messages[:-1]), "-m", "10", "--greedy"]
    alone = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=HANGS)
    assert json.loads(alone.stdout)["choices"][0]["text"] == messages[4]["content"]


def test_reset_and_load(tmp_path):
    saved, reset, loaded = (tmp_path / name for name in ("saved", "reset", "loaded"))
    lines = f"Hello\n/save {saved}\n/reset\n/save {reset}\n/load {saved}\nthere\\\nand here\n/save {loaded}\n/quit\nx\n"
    done = chat("-m", 5, "--greedy", "--system", "Be brief.", input=lines)
    assert done.returncode == 0, done.stderr
    assert [message["role"] for message in json.loads(saved.read_text())] == ["system", "user", "assistant"]
    assert json.loads(reset.read_text()) == [{"role": "system", "content": "Be brief."}]
    messages = json.loads(loaded.read_text())
    assert messages[:3] == json.loads(saved.read_text())
    assert messages[3] == {"role": "user", "content": "there\nand here"} and len(messages) == 5
    # Nothing but the files: what was written on the way is gone.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loaded", "reset", "saved"]


def test_a_conversation_goes_on_after_a_restart(tmp_path):
    arguments = ["-m", 6, "--greedy", "--system", SYSTEM, "--store", tmp_path / "kept", "--session", "anna/1"]
    first = chat(*arguments, input="Hello\n")
    kept = tmp_path / "kept.chats/anna%2F1.json"
    [(made, _, prompt)] = figures(first.stderr)
    assert len(json.loads(kept.read_text())) == 3
    second = chat(*arguments, input="there\n")
    [(_, cached, longer)] = figures(second.stderr)
    assert cached >= 64 and longer > prompt + made
    messages = json.loads(kept.read_text())
    assert [message["content"] for message in messages if message["role"] == "user"] == ["Hello", "there"]
    # Another session, and one that was reset, know nothing of it.
    other = chat(*arguments[:-1], "bea", input="Hello\n")
    assert other.stdout == first.stdout
    assert chat(*arguments, input="/reset\n").returncode == 0
    assert json.loads(kept.read_text()) == [{"role": "system", "content": SYSTEM}]
    assert chat(*arguments, input="Hello\n").stdout == first.stdout
    kept.write_text("[{}]")
    broken = chat(*arguments, input="Hello\n")
    assert broken.returncode == 1 and f"{kept}: messages[0]: " in broken.stderr and broken.stdout == ""


def test_bad_lines_fail_alone(tmp_path):
    lines = f"/rest\n/save\n/save {tmp_path}/no/where\n/load {tmp_path}/none\n{'long ' * 400}\nHello\n//fine\n"
    done = chat("-m", 3, "--greedy", "--ignore-eos", input=lines)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("pagoda: ")]
    assert errors[0].startswith("pagoda: /rest: no such command; did you mean `/reset`?")
    assert errors[1].startswith("pagoda: /save: it needs a file")
    assert errors[2].startswith(f"pagoda: {tmp_path}/no/where can not be written")
    assert errors[3].startswith(f"pagoda: /load: {tmp_path}/none does not exist")
    assert errors[4].startswith("pagoda: prompt: ") and errors[4].endswith("/reset begins a new conversation")
    assert len(errors) == 5 and len(figures(done.stderr)) == 2


def test_a_full_context_ends_the_answer():
    done = chat("--greedy", "--ignore-eos", "-m", 600, input="Hello\nmore\n")
    [(made, _, prompt)] = figures(done.stderr)
    assert made + prompt == 512 and "pagoda: prompt: " in done.stderr and done.returncode == 1


def test_wrong_usage():
    for arguments in ["--session", "a"], ["--prompt", "a"]:
        done = chat(*arguments, input="")
        assert (done.returncode, done.stdout) == (2, "")
    done = chat("--store", "somewhere", "--session", "", input="")
    assert done.returncode == 1 and done.stderr.startswith("pagoda: --session: it is empty")


# ---- terminals ---------------------------------------------------------------------------------------------------


def test_a_terminal(tmp_path):
    with Terminal("-m", 20, "--greedy") as terminal:
        assert "llama on the CPU, a context of 512 tokens. /help lists the commands." in terminal.seen
        answer = terminal.ask("Hello")
        # Dimly, and after the answer.
        assert FIGURES.search(answer.split("\x1b[2m")[1]) and "\x1b[0m" in answer
        assert "/save FILE" in terminal.ask("/help")
        assert "did you mean `/reset`?" in terminal.ask("/rest")
        assert f"2 messages saved in {tmp_path}/a." in terminal.ask(f"/save {tmp_path}/a")
        assert "A new conversation." in terminal.ask("/reset")
        terminal.type("half a line\x03")
        terminal.until("Ctrl-D or /quit ends.")
        terminal.until("> ")
        terminal.ask("Hello")
        terminal.ask(f"/save {tmp_path}/b")
        # What was half typed when it was interrupted is no message.
        assert json.loads((tmp_path / "b").read_text()) == json.loads((tmp_path / "a").read_text())
        terminal.end()


needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="make model-smollm2 makes it")


@needs_smollm2
def test_a_real_conversation(tmp_path):
    arguments = ["--greedy", "-m", 60, "--store", tmp_path / "kept"]
    with Terminal(*arguments, model=SMOLLM2) as terminal:
        answer = terminal.ask("Hi")
        assert "Hello" in answer
        [(made, cached, prompt)] = figures(answer)
        assert cached == 0
        terminal.type("Tell me a long story about a dragon.\n")
        terminal.until("dragon.\n")
        # Some words have come.
        begun = terminal.until(" ") + terminal.until(" ")
        terminal.type("\x03")
        rest = terminal.until("\n> ")
        assert ", stopped" in rest and "pagoda: " not in rest
        [(_, cached, longer)] = figures(rest)
        assert prompt <= cached < longer
        assert terminal.process.poll() is None
        terminal.end()
    messages = json.loads((tmp_path / "kept.chats/chat.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    # The part of the answer that was seen is what the model knows of it.
    assert messages[-1]["content"].split()[0] in begun and len(messages[-1]["content"]) < 2000
    with Terminal(*arguments, model=SMOLLM2) as terminal:
        assert "Going on with 4 messages of" in terminal.seen and "kept.chats/chat.json" in terminal.seen
        [(_, cached, _)] = figures(terminal.ask("Thank you. What is 2 + 2?"))
        assert cached >= longer
        terminal.ask("/reset")
        [(_, _, again)] = figures(terminal.ask("Hi"))
        assert again == prompt
        terminal.type("/quit\n")
        assert terminal.process.wait(HANGS) == 0


@needs_smollm2
def test_an_interrupt_of_a_script_ends_the_answer_alone():
    command = [RELEASE / "pagoda", "chat", SMOLLM2, "--greedy", "-m", "300"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        process.stdin.write(b"Tell me a long story about a dragon.\nSay hello.\n")
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait(HANGS) == 0
    assert len(figures(errors)) == 2 and ", stopped" in errors.splitlines()[0]
