"""What cache policies and page formats cost in quality: python quality.py PAGODA FOLDER OUT

For each policy, format of pages and cache length, by the command `pagoda generate`:
- the perplexity of a long text, over the tokens after the longest cache length, when every cache has evicted;
- how many of the facts that were planted in long texts are found again: each token of the answer has to be the
  likeliest one;
- the memory of one sequence's keys and values, and the tokens per second of an answer after the long text.

Writes quality.md (a table), quality.json (the figures) and quality.svg (perplexity against memory) to OUT. The text is
the Debian Policy Manual, out of the package debian-policy; --text takes another file. --jobs N runs N rows at a time,
each on cores of its own, so that its tokens per second are those of that many cores.
"""

import argparse
import concurrent.futures
import gzip
import json
import math
import os
import queue
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer

POLICIES = ["dense", "lastrec", "smart-lastrec", "h2o", "h2o-vlen", "qh2o", "qh2o-vlen", "h2o-orig"]
FORMATS = ["native", "int8", "int4", "fp8"]
LENGTHS = [256, 512, 1024]
CITIES = ["Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Delhi", "Rome", "Accra", "Bern"]
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def main(arguments=None):
    given = parse(arguments)
    text = given.text.read_text() if given.text else debian_policy()
    model = Model(given.folder)
    tokens = model.tokens(text)
    if given.tokens <= given.skip:
        message = f"--tokens {given.tokens} is not above the longest of --lengths, {given.skip}"
        print(f"quality.py: {message}", file=sys.stderr)
        return 1
    needed = given.tokens + given.fact_tokens + 1
    if len(tokens) < needed:
        print(f"quality.py: the text has {len(tokens)} tokens, and {needed} are needed", file=sys.stderr)
        return 1
    texts = plant(model, tokens[given.tokens :], given.fact_tokens, given.facts)
    places = queue.SimpleQueue()
    for cores in shares(given.jobs):
        places.put(cores)

    def run(configuration):
        cores, began = places.get(), time.monotonic()
        # Of this thread, and of the command that it starts.
        os.sched_setaffinity(0, cores)
        try:
            row = measure(given, model, configuration, len(cores), tokens[: given.tokens], texts)
        finally:
            places.put(cores)
        print(f"{name(row):28}", *cells(row), f"({time.monotonic() - began:.0f} s)", sep="  ", flush=True)
        return row

    rows = []
    given.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(run, configurations(given)):
            rows.append(row)
            figures = {"tokens": given.tokens, "rows": rows}
            (given.out / "quality.json").write_text(json.dumps(figures, indent=1) + "\n")
    (given.out / "quality.md").write_text(table(rows))
    (given.out / "quality.svg").write_text(picture(rows, given.tokens - given.skip))
    return 0


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", help="the command pagoda")
    parser.add_argument("folder", type=Path, help="the model folder")
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("--text", type=Path, help="a long text, instead of the Debian Policy Manual")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of the text whose perplexity is measured")
    parser.add_argument("--chunk-size", type=int, default=32, help="tokens read at once when the cache is full")
    grace = "the part of the slots that h2o, h2o-vlen, qh2o and qh2o-vlen have as a grace period"
    parser.add_argument("--grace", type=float, default=0.5, help=grace)
    parser.add_argument("--facts", type=int, default=len(CITIES), help="facts to plant, five in a text")
    parser.add_argument("--fact-tokens", type=int, default=1280, help="tokens of a text around its facts")
    parser.add_argument("--jobs", type=int, default=1, help="rows that run at a time, each on its share of the cores")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    given = parser.parse_args(arguments)
    # Perplexity is that of the tokens after the longest cache, of all rows alike.
    given.skip = max(map(int, given.lengths.split(",")))
    if not shutil.which(given.command):
        parser.error(f"{given.command}: there is no such command: `make build` makes target/release/pagoda")
    cores = len(os.sched_getaffinity(0))
    if not 1 <= given.jobs <= cores:
        parser.error(f"--jobs {given.jobs}: there are {cores} cores, and a row needs one at least")
    return given


def debian_policy():
    """The manual as text, out of Debian's package."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["apt-get", "-q", "download", "debian-policy"], cwd=place, check=True, capture_output=True)
        (package,) = Path(place).glob("debian-policy_*.deb")
        files = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout
        (Path(place) / "files.tar").write_bytes(files)
        with tarfile.open(Path(place) / "files.tar") as archive:
            packed = archive.extractfile("./usr/share/doc/debian-policy/policy.txt.gz").read()
    return gzip.decompress(packed).decode()


class Model:
    def __init__(self, folder):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        cache = json.loads((folder / "pagoda.json").read_text())["kv"]
        self.layers, self.heads, self.size = cache["layers"], cache["heads"], cache["head_size"]
        self.element = ELEMENT_BYTES[cache["type"]]

    def tokens(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, form):
        """Keys and values of a token: codes, and scales in f16."""
        bytes_of_head = {
            "native": self.size * self.element,
            "int8": self.size + 4,
            "int4": self.size // 2 + 4,
            "fp8": self.size + 2,
        }
        return self.layers * self.heads * 2 * bytes_of_head[form]


FACTS_OF_A_TEXT = 5


def plant(model, tokens, around, facts):
    """Texts with facts at different depths and questions behind them, each with the places of its answers: the same
    ones each time."""
    draw = random.Random(7)
    texts = []
    for first in range(0, facts, FACTS_OF_A_TEXT):
        cities = CITIES[first : min(first + FACTS_OF_A_TEXT, facts)]
        numbers = [str(draw.randrange(10000, 99999)) for _ in cities]
        begin = draw.randrange(0, len(tokens) - around)
        text, last = [], begin
        for index, (city, number) in enumerate(zip(cities, numbers, strict=True)):
            at = begin + int((index + 0.5) / len(cities) * around)
            subject = f"secret number of {city}"
            fact = f"\n\nThe {subject} is {number}. Remember: the {subject} is {number}.\n\n"
            text += tokens[last:at] + model.tokens(fact)
            last = at
        text += tokens[last : begin + around]
        answers = []
        # In another order than that of the text.
        for city, number in sorted(zip(cities, numbers, strict=True)):
            subject = f"secret number of {city}"
            text += model.tokens(f"\n\nQuestion: What is the {subject}?\nAnswer: The {subject} is")
            answer = model.tokens(f" {number}")
            answers.append(range(len(text), len(text) + len(answer)))
            text += answer
        texts.append((text, answers))
    return texts


def configurations(given):
    """Dense first, in every format; then each policy. qh2o is about quantised pages."""
    chosen = given.formats.split(",")
    for policy in given.policies.split(","):
        for length in [None] if policy == "dense" else [int(length) for length in given.lengths.split(",")]:
            for form in chosen:
                if form != "native" or not policy.startswith("qh2o"):
                    yield policy, form, length


def shares(jobs):
    """The cores that this process may use, in equal parts. Where a core counts as two, those are neighbours."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // jobs
    return [cores[job * each : (job + 1) * each] for job in range(jobs)]


def measure(given, model, configuration, threads, tokens, texts):
    policy, form, length = configuration
    lines = [{"prompt": tokens, "prompt_logprobs": 0, "max_new_tokens": 64, "temperature": 0, "ignore_eos": True}]
    lines += [{"prompt": text, "prompt_logprobs": 0, "max_new_tokens": 1} for text, _ in texts]
    options = ["--provider", "cpu", "--threads", str(threads)]
    options += ["--kv-format", form, "--no-sharing", "--max-batch", "1"]
    if policy != "dense":
        options += ["--kv-policy", policy, "--cache-length", str(length), "--chunk-size", str(given.chunk_size)]
    if has_grace(policy):
        options += ["--grace-period", str(int(given.grace * length))]
    command = [given.command, "generate", given.folder, "--requests", "-", "--json", *options]
    done = subprocess.run(command, input="\n".join(map(json.dumps, lines)), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"quality.py: {' '.join(map(str, command))}\n{done.stderr.strip() or done.stdout.strip()}")
    long, *read = map(json.loads, done.stdout.rstrip("\n").split("\n"))
    counted = [entry["logprob"] for entry in long["prompt_logprobs"][given.skip :]]
    found = [
        all(response["prompt_logprobs"][place]["rank"] == 1 for place in answer)
        for response, (_, answers) in zip(read, texts, strict=True)
        for answer in answers
    ]
    timings = long["timings"]
    return {
        "policy": policy,
        "format": form,
        "cache_length": length,
        "perplexity": math.exp(-sum(counted) / len(counted)),
        "found": sum(found),
        "facts": len(found),
        "bytes": model.token_bytes(form) * (length or len(tokens)),
        "read_tokens_per_second": len(tokens) / (timings["first_token_ms"] - timings["queued_ms"]) * 1e3,
        "tokens_per_second": timings["tokens_per_second"],
    }


def has_grace(policy):
    """Heavy hitters, but for those as they were first published."""
    return "h2o" in policy and policy != "h2o-orig"


def name(row):
    length = row["cache_length"]
    return f"{row['policy']} {row['format']} {length or 'full'}"


def cells(row):
    return [
        f"{row['perplexity']:.2f}",
        f"{row['found']}/{row['facts']}",
        f"{row['bytes'] / 2**20:.1f} MiB",
        f"{row['read_tokens_per_second']:.0f}",
        f"{row['tokens_per_second']:.1f}",
    ]


def table(rows):
    head = ["policy", "pages", "slots", "perplexity", "facts found", "memory", "read, tokens/s", "answer, tokens/s"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        slots = str(row["cache_length"] or "all")
        lines.append("| " + " | ".join([row["policy"], row["format"], slots, *cells(row)]) + " |")
    return "\n".join(lines) + "\n"


COLOURS = {"dense": "#555", "lastrec": "#1f77b4", "smart-lastrec": "#17becf", "h2o": "#d62728", "h2o-vlen": "#ff7f0e",
           "qh2o": "#2ca02c", "qh2o-vlen": "#98b436", "h2o-orig": "#9467bd"}  # fmt: skip
MARKS = {"native": "●", "int8": "■", "int4": "▲", "fp8": "◆"}


def picture(rows, tokens):
    """Perplexity against memory, both axes logarithmic: lower and further left is better. Lines join the cache lengths
    of a policy and a format."""
    width, height, left, right, top, bottom = 760, 460, 62, 150, 56, 52
    mib = [row["bytes"] / 2**20 for row in rows]
    values = [row["perplexity"] for row in rows]
    # Rows far above the others would leave them no room.
    most = min(max(values), 1.35 * min(values))
    across, up = Scale(min(mib), max(mib), left, width - right), Scale(min(values), most, height - bottom, top)
    above = f", at the upper edge above {most:.1f}" if most < max(values) else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="22" font-size="15">Perplexity of {tokens:,} tokens against memory</text>',
        f'<text x="{left}" y="41" fill="#666">lower and further left is better{above}</text>',
        f'<text x="{(left + width - right) / 2}" y="{height - 12}" text-anchor="middle">MiB of keys and values</text>',
    ]
    for mark in across.marks():
        parts.append(f'<path d="M{across(mark):.1f} {top}V{height - bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{across(mark):.1f}" y="{height - bottom + 16}" text-anchor="middle">{mark:g}</text>')
    for mark in up.marks():
        parts.append(f'<path d="M{left} {up(mark):.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{up(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    places = [(across(x), up(min(y, most))) for x, y in zip(mib, values, strict=True)]
    lines = {}
    for row, (x, y) in zip(rows, places, strict=True):
        lines.setdefault((row["policy"], row["format"]), []).append(f"{x:.1f} {y:.1f}")
    for (policy, _), line in lines.items():
        parts.append(f'<path d="M{"L".join(line)}" fill="none" stroke="{COLOURS[policy]}" opacity="0.35"/>')
    for row, (x, y) in zip(rows, places, strict=True):
        parts.append(
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="{COLOURS[row["policy"]]}">'
            f"{MARKS[row['format']]}<title>{name(row)}: {row['perplexity']:.2f}</title></text>"
        )
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    legend = [(COLOURS[policy], "●", policy) for policy in policies]
    legend += [("#000", mark, form) for form, mark in MARKS.items() if any(row["format"] == form for row in rows)]
    for index, (colour, mark, words) in enumerate(legend):
        x, y = width - right + 14, top + 14 + 18 * index
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{mark} {words}</text>')
    return "\n".join(parts) + "\n</svg>\n"


class Scale:
    """A logarithmic axis."""

    def __init__(self, low, high, begin, end):
        self.low, self.high, self.begin, self.end = low / 1.08, high * 1.08, begin, end

    def __call__(self, value):
        return self.begin + (self.end - self.begin) * math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self):
        """Round numbers, at least four of them where there is room."""
        tenths = [[n / 10 for n in range(10, 100, step)] for step in (5, 2, 1)]
        for steps in ([1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7], *tenths):
            marks = [step * 10**power for power in range(-3, 7) for step in steps]
            marks = [round(mark, 6) for mark in marks if self.low <= mark <= self.high]
            if len(marks) >= 4:
                return marks
        return marks


if __name__ == "__main__":
    sys.exit(main())
