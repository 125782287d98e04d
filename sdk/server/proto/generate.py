"""Writes the Rust structs of kserve.proto: `generate.py` prints what src/kserve/grpc/messages.rs has to be.

It reads the part of the language that this file has: messages, one level inside of another, and oneofs. A test compares.
"""

import re
import sys
from pathlib import Path

HEAD = """\
//! The messages of proto/kserve.proto. Written by proto/generate.py: change those, not this.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Oneof};
"""
RUST = {
    "bool": "bool",
    "int32": "i32",
    "int64": "i64",
    "uint32": "u32",
    "uint64": "u64",
    "float": "f32",
    "double": "f64",
    "string": "String",
    "bytes": "Bytes",
}
# Large where most are absent, so that a body of empty tensors takes little memory.
BOXED = {"InferTensorContents"}


def messages(text):
    """Name -> lines of (label, type, name, number), and of oneofs (name, fields); inner messages come before their outer ones."""
    found, stack = {}, []
    for line in re.sub(r"//.*", "", text).splitlines():
        line = line.strip()
        if opened := re.fullmatch(r"message (\w+) \{(\})?", line):
            fields = []
            if opened[2]:
                found[opened[1]] = fields
            else:
                stack.append((opened[1], fields))
        elif opened := re.fullmatch(r"oneof (\w+) \{", line):
            stack.append((opened[1], None))
            stack[-2][1].append((opened[1], []))
        elif re.match(r"service ", line):
            stack.append((None, []))
        elif line == "}":
            name, fields = stack.pop()
            if name and fields is not None:
                found[name] = fields
        elif field := re.fullmatch(r"(repeated )?(map<string, \w+>|\w+) (\w+) = (\d+);", line):
            one = (bool(field[1]), field[2], field[3], int(field[4]))
            # Of a oneof: into the list of the message that has it.
            fields = stack[-1][1] if stack[-1][1] is not None else stack[-2][1][-1][1]
            fields.append(one)
    return found


def attribute(repeated, kind, number):
    """The type in Rust, and what prost has to know."""
    if entry := re.fullmatch(r"map<string, (\w+)>", kind):
        return f"BTreeMap<String, {entry[1]}>", f'btree_map = "string, message", tag = "{number}"'
    scalar = 'bytes = "bytes"' if kind == "bytes" else kind if kind in RUST else "message"
    rust = RUST.get(kind, kind)
    if repeated:
        return f"Vec<{rust}>", f'{scalar}, repeated, tag = "{number}"'
    if kind in BOXED:
        return f"Option<Box<{rust}>>", f'message, optional, boxed, tag = "{number}"'
    if scalar == "message":
        return f"Option<{rust}>", f'message, optional, tag = "{number}"'
    return rust, f'{scalar}, tag = "{number}"'


def variant(name):
    return "".join(word.capitalize() for word in name.split("_"))


def rust(text):
    """The structs."""
    out = [HEAD]
    for name, fields in messages(text).items():
        choices = [field for field in fields if len(field) == 2]
        out.append(f"\n#[derive(Clone, PartialEq, Message)]\npub struct {name} {{{'' if fields else '}'}\n")
        for field in fields:
            if len(field) == 2:
                tags = ", ".join(str(number) for *_, number in field[1])
                out.append(f'    #[prost(oneof = "{name}Choice", tags = "{tags}")]\n')
                out.append(f"    pub {field[0]}: Option<{name}Choice>,\n")
                continue
            repeated, kind, own, number = field
            of, about = attribute(repeated, kind, number)
            out.append(f"    #[prost({about})]\n    pub {own}: {of},\n")
        if fields:
            out.append("}\n")
        for _, options in choices:
            out.append(f"\n#[derive(Clone, PartialEq, Oneof)]\npub enum {name}Choice {{\n")
            for _, kind, own, number in options:
                of, about = attribute(False, kind, number)
                out.append(f"    #[prost({about})]\n    {variant(own.removesuffix('_param'))}({of}),\n")
            out.append("}\n")
    return "".join(out)


if __name__ == "__main__":
    sys.stdout.write(rust((Path(__file__).parent / "kserve.proto").read_text()))
