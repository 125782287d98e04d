"""Continues texts with a decoder in the functional form, in a stock ONNX Runtime: decode.py FOLDER [--tokens N] PROMPT...

`pagoda-export SOURCE FOLDER --form functional` makes such a folder. Nothing of Pagoda is needed to run it: this file is all that a
runtime has to have, as an example for runtimes of other devices. The graph reads keys and values from pools by their slots, and
returns those of new tokens; `Pages` knows the slots of each sequence.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort


class Pages:
    """The pools of all layers, and which pages of them each sequence has.

    A page has rows for the keys of so many tokens, then for their values. Rows that were not written hold NaN, to show that
    none is read. Page 0 is no sequence's: its rows are zeros, and padding names them.
    """

    def __init__(self, kv, pages):
        self.size, self.free = kv["page_size"], list(range(1, pages))
        shape = [pages * 2 * self.size, kv["heads"], kv["head_size"]]
        kind = {"f32": np.float32, "f16": np.float16}[kv["type"]]
        self.pools = [np.full(shape, np.nan, kind) for _ in range(kv["layers"])]
        for pool in self.pools:
            pool[: 2 * self.size] = 0
        self.tables, self.lengths = {}, {}

    def slots(self, name, start, stop):
        """Where the keys of the tokens from `start` to `stop` are; values are a page size further."""
        at = np.arange(start, stop)
        return np.array(self.tables[name], np.int64)[at // self.size] * 2 * self.size + at % self.size

    def append(self, name, keys, values):
        """Stores new tokens of a sequence: [tokens, heads, head_size] of each layer."""
        start, stop = self.length(name), self.length(name) + len(keys[0])
        table = self.tables.setdefault(name, [])
        while len(table) * self.size < stop:
            table.append(self.free.pop())
        slots = self.slots(name, start, stop)
        for pool, key, value in zip(self.pools, keys, values):
            pool[slots], pool[slots + self.size] = key, value
        self.lengths[name] = stop

    def length(self, name):
        return self.lengths.get(name, 0)

    def drop(self, name):
        self.free += self.tables.pop(name, [])
        self.lengths.pop(name, None)


class Decoder:
    """A model with its pages. Sequences have names; `step` runs new tokens of several at once."""

    def __init__(self, folder, pages=256, threads=0):
        self.about = json.loads((folder / "pagoda.json").read_text())
        if self.about.get("form") != "functional":
            raise ValueError(f"{folder} is not in the functional form: export it with --form functional")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(folder / self.about["model"], options, providers=["CPUExecutionProvider"])
        self.pages = Pages(self.about["kv"], pages)

    def step(self, new):
        """Runs `new`, tokens by sequence, and returns the logits of each token, by sequence."""
        rows, past = max(map(len, new.values())), max(map(self.pages.length, new))
        ids, positions = np.zeros([2, len(new), rows], np.int64)
        slots = np.zeros([len(new), past], np.int64)
        mask = np.zeros([len(new), 1, rows, past + rows], bool)
        # New tokens see each other in order. Padding is last, so that no token sees it.
        mask[..., past:] = np.tri(rows, dtype=bool)
        for index, (name, tokens) in enumerate(new.items()):
            cached = self.pages.length(name)
            ids[index, : len(tokens)] = tokens
            positions[index] = cached + np.minimum(np.arange(rows), len(tokens) - 1)
            if cached:
                slots[index, :cached] = self.pages.slots(name, 0, cached)
            mask[index, ..., :cached] = True
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "key_slots": slots,
            "value_slots": slots + self.pages.size,
            "attention_mask": mask,
            **{f"kv_pool.{layer}": pool for layer, pool in enumerate(self.pages.pools)},
        }
        outputs = dict(zip((output.name for output in self.session.get_outputs()), self.session.run(None, inputs)))
        layers = range(len(self.pages.pools))
        for index, (name, tokens) in enumerate(new.items()):
            keys, values = (
                [outputs[f"{part}.{layer}"][index, : len(tokens)] for layer in layers] for part in ("new_key", "new_value")
            )
            self.pages.append(name, keys, values)
        return {name: outputs["logits"][index, : len(tokens)] for index, (name, tokens) in enumerate(new.items())}

    def greedy(self, prompts, count):
        """The `count` likeliest tokens after each prompt, fewer where one ends the text."""
        made, new, ends = [[] for _ in prompts], dict(enumerate(prompts)), set(self.about["tokens"]["eos"])
        while new:
            tokens = {name: int(logits[-1].argmax()) for name, logits in self.step(new).items()}
            new = {}
            for name, token in tokens.items():
                made[name].append(token)
                if len(made[name]) < count and token not in ends:
                    new[name] = [token]
                else:
                    self.pages.drop(name)
        return made


def main():
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser("decode.py", description="Continues texts with a decoder in the functional form.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--tokens", type=int, default=40, help="the most tokens to make for each prompt; default: 40")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
    decoder = Decoder(given.folder)
    made = decoder.greedy([tokenizer.encode(prompt).ids for prompt in given.prompts], given.tokens)
    for prompt, tokens in zip(given.prompts, made):
        print(prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
