"""Decoders of other exporters, tests/data/decoders, run as they are: they give what transformers gives, and take their inputs as
the README.md there says. No operator of Pagoda is in these sessions."""

import functools
import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from capi import ROOT

DECODERS = ROOT / "tests/data/decoders"
EXPECTED = json.loads((DECODERS / "expected.json").read_text())
# A past in which the oldest tokens are overwritten has a test of its own.
RING = "qwen2-genai-ring"
NAMES = sorted({path.parent.name for path in DECODERS.glob("*/*.onnx")} - {RING})
# What rounds: f16, and weights of 4 bits, which make another model of one so small. Their tokens are their own.
ROUNDED = {"llama-genai-dml": 0.01, "llama-genai-int4": 1.0}


@functools.cache
def session(name):
    (file,) = (DECODERS / name).glob("*.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def cases(name):
    return next(EXPECTED[kind] for kind in sorted(EXPECTED, key=len, reverse=True) if name.startswith(f"{kind}-"))


def grouped(name):
    return "genai" in name


class Growing:
    """The plain loop around such a model: past tensors that grow. Row b of `past` has `lengths[b]` tokens, then padding.

    GroupQueryAttention takes them so, and puts the new ones behind them. Plain operators count by columns: for them the past of
    each sequence ends where the new tokens begin."""

    def __init__(self, name, batch):
        self.session, self.grouped = session(name), grouped(name)
        self.given = {value.name: value for value in self.session.get_inputs()}
        self.kind = np.float16 if "float16" in self.given["past_key_values.0.key"].type else np.float32
        self.past = {
            value.name: np.zeros([batch, value.shape[1], 0, 16], self.kind)
            for value in self.given.values()
            if value.name.startswith("past_key_values")
        }
        self.lengths = [0] * batch

    def step(self, new):
        """Runs new tokens of each sequence and returns their logits."""
        rows, past = max(map(len, new)), max(self.lengths)
        begins = [0 if self.grouped else past - length for length in self.lengths]
        ids, positions = np.zeros([2, len(new), rows], np.int64)
        mask = np.zeros([len(new), past + rows], np.int64)
        for index, (tokens, length, begin) in enumerate(zip(new, self.lengths, begins)):
            ids[index, : len(tokens)] = tokens
            positions[index] = length + np.minimum(np.arange(rows), len(tokens) - 1)
            mask[index, begin : begin + length + len(tokens)] = 1
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask,
            "use_cache_branch": np.array([past > 0]),
            **{name: self.placed(array, begins) for name, array in self.past.items()},
        }
        run = self.session.run(None, {name: array for name, array in inputs.items() if name in self.given})
        outputs = dict(zip((value.name for value in self.session.get_outputs()), run))
        lengths = [length + len(tokens) for length, tokens in zip(self.lengths, new)]
        for name, array in self.past.items():
            present = outputs[name.replace("past_key_values", "present")]
            grown = np.zeros([*array.shape[:2], max(lengths), 16], self.kind)
            for index, (length, begin) in enumerate(zip(lengths, begins)):
                grown[index, :, :length] = present[index, :, begin : begin + length]
            self.past[name] = grown
        self.lengths = lengths
        return [outputs["logits"][index, : len(tokens)].astype(np.float32) for index, tokens in enumerate(new)]

    def placed(self, array, begins):
        made = np.zeros_like(array)
        for index, (length, begin) in enumerate(zip(self.lengths, begins)):
            made[index, :, begin : begin + length] = array[index, :, :length]
        return made


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
    for case in cases(name):
        check(name, [case])


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_several_lengths_in_one_batch_give_their_own_tokens(name):
    batch = cases(name)
    if not grouped(name) and "position_ids" not in [value.name for value in session(name).get_inputs()]:
        # Such a graph counts positions by columns, so that all have the same ones.
        batch = batch[2:] * 2
    check(name, batch)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_chunks_gives_the_same_logits(name):
    case = cases(name)[2]
    prompt, whole, model = case["prompt_ids"], Growing(name, 1), Growing(name, 1)
    chunks = [model.step([part])[0] for part in (prompt[:20], prompt[20:21], prompt[21:])]
    assert np.abs(np.concatenate(chunks) - whole.step([prompt])[0]).max() <= (0.05 if name in ROUNDED else 1e-4)


def test_grouped_query_attention_takes_chunks_of_one_sequence_at_a_time():
    """A prompt on top of a past: one sequence; prompts from the start, and single tokens: any number."""
    prompt = cases("llama-genai")[2]["prompt_ids"]
    model = Growing("llama-genai", 2)
    model.step([prompt[:20]] * 2)
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1 and past context is given"):
        model.step([prompt[20:]] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_who_reads_padding(name, monkeypatch):
    """GroupQueryAttention reads the tokens of a sequence alone. Plain operators multiply padding by 0, and 0 * NaN is NaN."""
    (first, second), model = cases(name)[:2], Growing(name, 2)
    model.step([first["prompt_ids"], second["prompt_ids"]])

    def placed(array, begins):
        made = np.full_like(array, np.nan)
        for index, (length, begin) in enumerate(zip(model.lengths, begins)):
            made[index, :, begin : begin + length] = array[index, :, :length]
        return made

    monkeypatch.setattr(model, "placed", placed)
    short, long = model.step([[first["greedy_ids"][0]], [second["greedy_ids"][0]]])
    assert np.isfinite(long).all()
    assert np.isfinite(short).all() if grouped(name) else np.isnan(short).all()


def test_grouped_query_attention_works_in_one_buffer():
    """A past with room, which is bound as the present too: only new rows are written."""
    case, model = cases("llama-genai")[1], session("llama-genai")
    names = [value.name for value in model.get_inputs() if value.name.startswith("past")]
    buffers = {name: np.full([1, 2, 64, 16], np.nan, np.float32) for name in names}

    def step(tokens, total):
        binding = model.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens]))
        binding.bind_cpu_input("attention_mask", np.ones([1, total], np.int64))
        logits = np.empty([1, len(tokens), len(case["logits"])], np.float32)
        for name, array in buffers.items():
            binding.bind_cpu_input(name, array)
            present = name.replace("past_key_values", "present")
            binding.bind_output(present, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        model.run_with_iobinding(binding)
        return int(logits[0, -1].argmax())

    total = len(case["prompt_ids"])
    made = [step(case["prompt_ids"], total)]
    while len(made) < len(case["greedy_ids"]):
        made.append(step(made[-1:], total + len(made)))
    assert made == case["greedy_ids"]
    for array in buffers.values():
        rows = np.isnan(array).all(axis=(0, 1, 3))
        assert not rows[: total + len(made) - 1].any() and rows[total + len(made) - 1 :].all()


def test_a_ring_of_tokens_is_no_past_of_the_sequence():
    """Its attribute says so, and it can not begin with a past of no tokens."""
    (file,) = (DECODERS / RING).glob("*.onnx")
    nodes = [node for node in onnx.load(file, load_external_data=False).graph.node if node.op_type == "GroupQueryAttention"]
    attributes = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
    assert [(found["local_window_size"], found.get("sliding_window_cache")) for found in attributes] == [(-1, None), (6, 1)]
    with pytest.raises(Exception, match=r"KV cache capacity \(0\) must be at least local_window_size \(6\)"):
        Growing(RING, 1).step([[1, 2, 3]])


def check(name, batch):
    model, tolerance = Growing(name, len(batch)), ROUNDED.get(name, 1e-5)
    logits = model.step([case["prompt_ids"] for case in batch])
    made = [[int(rows[-1].argmax())] for rows in logits]
    while len(made[0]) < len(batch[0]["greedy_ids"]):
        for tokens, rows in zip(made, model.step([tokens[-1:] for tokens in made])):
            tokens.append(int(rows[-1].argmax()))
    for case, rows, tokens in zip(batch, logits, made):
        assert np.linalg.norm(rows[-1] - case["logits"]) <= tolerance * np.linalg.norm(case["logits"])
        if name not in ROUNDED:
            assert rows.argmax(-1).tolist() == case["argmax"]
            assert tokens == case["greedy_ids"]
