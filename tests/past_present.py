"""Decoders with past and present tensors, made of a folder in the functional form: the same nodes and weights with other inputs and
outputs, as optimum (plain operators) and onnxruntime-genai (GroupQueryAttention) have them."""

import json
import os
import shutil

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
BLOCK = 32
HEADS_FIRST = [0, 2, 1, 3]


def rewrite(functional, out, grouped):
    """Writes the folder `out`: a checkpoint's files, and model.onnx with weights in a file beside it."""
    about = json.loads((functional / "pagoda.json").read_text())
    out.mkdir(parents=True)
    for name in about["files"]:
        if name not in ("model.onnx", "chat_template.jinja"):
            link(functional / name, out / name)
    model = onnx.load(functional / "model.onnx", load_external_data=False)
    (Grouped if grouped else Plain)(model.graph, about["kv"]).run()
    if grouped:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    onnx.save(model, out / "model.onnx")
    kv, tokens = about["kv"], about["tokens"]
    config = {
        "model_type": about["architecture"],
        "vocab_size": about["vocab_size"],
        "hidden_size": about["hidden_size"],
        "num_hidden_layers": kv["layers"],
        "num_attention_heads": about["attention"]["heads"],
        "num_key_value_heads": kv["heads"],
        "head_dim": kv["head_size"],
        "max_position_embeddings": about["limits"]["max_context"],
        "bos_token_id": tokens["bos"],
        "eos_token_id": tokens["eos"],
    }
    texts = dict(about["text"]["template_tokens"])
    if about["text"]["chat_template"]:
        texts["chat_template"] = (functional / about["text"]["chat_template"]).read_text()
    for name, content in (("config", config), ("generation_config", about["generation"]), ("tokenizer_config", texts)):
        (out / f"{name}.json").write_text(json.dumps(content))


def quantise(folder, out):
    """Copies a folder of `rewrite`, with products that onnxruntime-genai's builder would have for int4: com.microsoft.MatMulNBits, in
    blocks of 32 around the middle of their codes, with inputs rounded to 8 bits."""
    out.mkdir(parents=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, out / file.name)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}

    def load(name):
        tensor = weights[name]
        if not tensor.external_data:
            return numpy_helper.to_array(tensor)
        # `onnx` reads no file that has two names.
        where = {entry.key: entry.value for entry in tensor.external_data}
        count = int(where["length"]) // 4
        return np.fromfile(folder / where["location"], np.float32, count, offset=int(where["offset"])).reshape(tensor.dims)

    made = {}
    for node in graph.node:
        if node.op_type != "Gemm":
            continue
        x, name = node.input
        weight = load(name)
        if name not in made:
            made[name] = [
                numpy_helper.from_array(array, f"{name}.{what}") for array, what in zip(blocks(weight), ("codes", "scales"))
            ]
        about = {"K": weight.shape[1], "N": weight.shape[0], "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        inputs = [x, *(tensor.name for tensor in made[name])]
        node.CopyFrom(helper.make_node("MatMulNBits", inputs, node.output, node.name, domain=MICROSOFT, **about))
    used = {name for node in graph.node for name in node.input}
    kept = [numpy_helper.from_array(load(name), name) for name in weights if name in used]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *(tensor for tensors in made.values() for tensor in tensors)])
    if not any(opset.domain == MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    onnx.save(model, out / "model.onnx", save_as_external_data=True, location="weights.bin")


def blocks(weight):
    """Codes [N, K / 32, 16] and scales [N, K / 32]: the number that is furthest from 0 is the lowest code."""
    numbers = weight.reshape(len(weight), -1, BLOCK)
    furthest = np.take_along_axis(numbers, np.abs(numbers).argmax(-1, keepdims=True), -1)
    scales = np.where(furthest == 0, 1, furthest / -8).astype(np.float32)
    codes = np.clip(np.rint(numbers / scales) + 8, 0, 15).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales[..., 0]


def link(source, to):
    """The same file under another name, or a copy."""
    try:
        os.link(source, to)
    except OSError:
        shutil.copy(source, to)


class Rewriting:
    """Nodes that read pages are replaced; `first` are new ones that come before all others."""

    def __init__(self, graph, kv):
        self.graph, self.kv, self.first = graph, kv, []

    def run(self):
        graph, kv = self.graph, self.kv
        self.prepare()
        nodes = self.used([*self.first, *(new for node in graph.node for new in self.replaced(node))])
        del graph.node[:], graph.input[1:], graph.output[1:]
        graph.node.extend(nodes)
        rows, kind = ["batch", "new"], {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[kv["type"]]
        graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "columns"]))
        graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, rows))
        for name in (f"{layer}.{part}" for layer in range(kv["layers"]) for part in ("key", "value")):
            past, present = (["batch", kv["heads"], size, kv["head_size"]] for size in ("past", "columns"))
            graph.input.append(helper.make_tensor_value_info(f"past_key_values.{name}", kind, past))
            graph.output.append(helper.make_tensor_value_info(f"present.{name}", kind, present))

    def used(self, nodes):
        """Without those whose input no node makes any more."""
        made = {name for node in nodes for name in node.output} | {value.name for value in self.graph.initializer}
        gone = {name for node in self.graph.node for name in node.output} - made
        return [node for node in nodes if not gone & set(node.input)]

    def replaced(self, node):
        if node.op_type == "Gather" and node.input[0].startswith("kv_pool."):
            return self.read(node, node.input[0].split(".")[1], node.input[1].removesuffix("_slots"))
        new = [name for name in node.input if name.startswith(("new_key.", "new_value."))]
        if node.op_type == "Concat" and new:
            part, layer = new[0].removeprefix("new_").split(".")
            return self.join(node, layer, part)
        return self.attend(node) if node.op_type == "Attention" else [node]

    def node(self, operator, inputs, output, **attributes):
        self.first.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def constant(self, name, numbers):
        """A list of numbers, or one without dimensions."""
        dims = [len(numbers)] if isinstance(numbers, list) else []
        self.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, dims, numbers if dims else [numbers]))
        return name

    def columns(self, of, name, one):
        """The second dimension."""
        return self.node("Gather", [self.node("Shape", [of], f"{name}.shape"), one], name, axis=0)


class Plain(Rewriting):
    """The past before the new rows, and a mask of what each row sees: columns up to its own that are no padding. Keys and values have
    their heads in front, from the past to the attention."""

    layer = 0

    def prepare(self):
        zero, one = self.constant("mask.zero", 0), self.constant("mask.one", 1)
        columns, rows = self.columns("attention_mask", "mask.columns", one), self.columns("input_ids", "mask.rows", one)
        past = self.node("Sub", [columns, rows], "mask.past")
        column = self.node("Range", [zero, columns, one], "mask.column")
        row = self.node("Range", [past, columns, one], "mask.row")
        row = self.node("Unsqueeze", [row, self.constant("mask.last", [1])], "mask.each_row")
        causal = self.node("LessOrEqual", [column, row], "mask.causal")
        tokens = self.node("Cast", ["attention_mask"], "mask.bool", to=TensorProto.BOOL)
        tokens = self.node("Unsqueeze", [tokens, self.constant("mask.middle", [1, 2])], "mask.tokens")
        self.node("And", [tokens, causal], "mask.seen")

    def read(self, node, layer, part):
        return []

    def join(self, node, layer, part):
        new = f"{part}.{layer}.heads_first"
        first = helper.make_node("Transpose", [f"new_{part}.{layer}"], [new], perm=HEADS_FIRST)
        past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
        return [first, helper.make_node("Concat", [past, new], [present], axis=2)]

    def attend(self, node):
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        layer, query = self.layer, f"query.{self.layer}"
        self.layer += 1
        apart = self.constant(f"{query}.shape", [0, 0, given["q_num_heads"], self.kv["head_size"]])
        together = self.constant(f"{query}.width", [0, 0, given["q_num_heads"] * self.kv["head_size"]])
        inputs = [f"{query}.heads_first", f"present.{layer}.key", f"present.{layer}.value", "mask.seen"]
        return [
            helper.make_node("Reshape", [node.input[0], apart], [query]),
            helper.make_node("Transpose", [query], inputs[:1], perm=HEADS_FIRST),
            helper.make_node("Attention", inputs, [f"{query}.seen"], scale=given["scale"]),
            helper.make_node("Transpose", [f"{query}.seen"], [f"{query}.rows"], perm=HEADS_FIRST),
            helper.make_node("Reshape", [f"{query}.rows", together], node.output),
        ]


class Grouped(Rewriting):
    """GroupQueryAttention, with the two lengths that the builder of onnxruntime-genai gives it."""

    layer = 0

    def prepare(self):
        one = self.constant("lengths.one", 1)
        tokens = self.node("ReduceSum", ["attention_mask", self.constant("lengths.last", [1])], "lengths.tokens", keepdims=0)
        self.node("Cast", [self.node("Sub", [tokens, one], "lengths.before")], "seqlens_k", to=TensorProto.INT32)
        columns = self.columns("attention_mask", "lengths.columns", one)
        self.node("Cast", [columns], "total_sequence_length", to=TensorProto.INT32)

    def read(self, node, layer, part):
        return []

    def join(self, node, layer, part):
        return [helper.make_node("Identity", [f"new_{part}.{layer}"], node.output)]

    def attend(self, node):
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        names = [f"{self.layer}.key", f"{self.layer}.value"]
        self.layer += 1
        inputs = [*node.input[:3], *(f"past_key_values.{name}" for name in names), "seqlens_k", "total_sequence_length"]
        outputs = [node.output[0], *(f"present.{name}" for name in names)]
        attributes = {"num_heads": given["q_num_heads"], "kv_num_heads": given["kv_num_heads"], "scale": given["scale"]}
        return [helper.make_node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **attributes)]
