"""Makes pagoda/_header.py, the declarations of include/pagoda.h as cffi loads them. `make header` runs it.

python make_header.py ../../include/pagoda.h pagoda/_header.py
"""

import contextlib
import re
import sys
import tempfile
from pathlib import Path

from cffi import FFI


def declarations(header: str) -> str:
    """What of the header cffi understands: types, functions and constants, without comments and macros."""
    text = re.sub(r"/\*.*?\*/", "", header.replace("\\\n", ""), flags=re.S)
    constants = re.findall(r"^#define PAGODA_\w+ -?\d+$", text, re.M)
    code = re.sub(r"^\s*#.*$|^extern \"C\" \{$|^\}\s*$", "", text, flags=re.M)
    return "\n".join([*constants, re.sub(r"\n\s*\n+", "\n", code).strip()])


def defaults(header: str) -> dict[str, dict[str, int | float]]:
    """By struct: the fields that its INIT sets to something else than 0 and NULL."""
    text = re.sub(r"/\*.*?\*/", "", header.replace("\\\n", ""), flags=re.S)
    bodies = {name: body for body, name in re.findall(r"typedef struct \{([^}]*)\} (pagoda_\w+);", text)}
    found = {}
    for kind, values in re.findall(r"^#define PAGODA_\w+_INIT\s+\{ sizeof\((\w+)\), (.*) \}$", text, re.M):
        fields = re.findall(r"(\w+);", bodies[kind])[1:]
        given = [value.strip().removesuffix("f") for value in values.split(",")]
        pairs = zip(fields, given, strict=True)
        numbers = {name: float(value) if "." in value else int(value) for name, value in pairs if value != "NULL"}
        found[kind] = {name: value for name, value in numbers.items() if value}
    return found


def make(header: str) -> str:
    """The text of pagoda/_header.py."""
    builder = FFI()
    builder.set_source("pagoda._header", None)
    builder.cdef(declarations(header))
    builder.cdef(declarations((Path(__file__).parent / "native/stream.h").read_text()))
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(None):
            builder.emit_python_code(f"{folder}/_header.py")
        code = Path(f"{folder}/_header.py").read_text()
    code = code.replace(
        "# auto-generated file\n", "# Generated from include/pagoda.h by `make header`. Do not edit it.\n"
    )
    structs = "".join(f"    {kind!r}: {values!r},\n" for kind, values in defaults(header).items())
    version = re.search(r'^#define PAGODA_VERSION "(.*)"$', header, re.M)
    assert version is not None
    return f"{code}\n# What PAGODA_..._INIT sets, beside struct_size.\nINIT: dict[str, dict[str, float]] = {{\n{structs}}}\nVERSION = {version[1]!r}\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(make(Path(sys.argv[1]).read_text()))
