"""bindings/python has all of pagoda.h: every function is used, every constant and every field has its name, with the
default of the header. What is missing is named."""

import dataclasses
import re
import sys

import pagoda
import pytest
from capi import HEADER, ROOT, Header
from pagoda._header import ffi
from pagoda._native import STRUCTS, count_field, lib

PACKAGE = ROOT / "bindings/python"
TEXT = (ROOT / "include/pagoda.h").read_text()
sys.path.insert(0, str(PACKAGE))

# What of the header the package does without, and why.
WITHOUT = {
    "PAGODA_VERSION_MAJOR": "HEADER_VERSION has it",
    "PAGODA_VERSION_MINOR": "HEADER_VERSION has it",
    "PAGODA_VERSION_PATCH": "HEADER_VERSION has it",
    "pagoda_logit_bias": "GenerateRequest.logit_bias is a mapping of its two fields",
}
# Structs that are not dataclasses, which cost more to make.
TUPLES = {"pagoda_generate_token": (pagoda.Token, {"text_length": "text"})}


def sources():
    """All code of the package but for the generated part and the exporter."""
    files = [file for file in (PACKAGE / "pagoda").glob("*.py") if file.name != "_header.py"]
    return re.sub(r"^\s*#.*$", "", "\n".join(file.read_text() for file in files), flags=re.M)


def missing_functions(header, code):
    return [name for name in header.functions if not re.search(rf"\b{name}\b", code) and name not in WITHOUT]


def camel(kind):
    """pagoda_kv_size_unit is KvSizeUnit."""
    return "".join(part.capitalize() for part in kind.removeprefix("pagoda_").split("_"))


def missing_constants(header, code):
    """Constants without a member of the same name and number in the enumeration of their type."""
    # The longest first: PAGODA_KV_SIZE_UNIT_PAGES is no constant of a pagoda_kv.
    kinds = sorted((kind for kind in header.integers if kind.startswith("pagoda_")), key=len, reverse=True)
    found = []
    for name, number in header.constants.items():
        kind = next((kind for kind in kinds if name.startswith(f"{kind.upper()}_")), None)
        if kind is None:
            known = name in WITHOUT or re.search(rf"\b{name}\b", code)
        else:
            members = getattr(getattr(pagoda, camel(kind), None), "__members__", {})
            known = members.get(name.removeprefix(f"{kind.upper()}_")) == number
        found += [] if known else [name]
    return found


def missing_fields(header):
    """Fields of structs that no field of the Python class is, or sets."""
    found = []
    for kind, struct in header.structs.items():
        fields = [name for name, _ in struct._fields_ if name != "struct_size"]
        if kind in TUPLES:
            python, made_of = TUPLES[kind]
            names = set(python._fields)
        elif kind in STRUCTS:
            names = {field.name for field in dataclasses.fields(STRUCTS[kind])}
            made_of = STRUCTS[kind].made_of
        else:
            found += [] if kind in WITHOUT else [f"{kind}.{name}" for name in fields]
            continue
        counts = {count_field(name, fields) for name in names}
        for name in fields:
            sets = name in counts or name.removeprefix("has_") in names or made_of.get(name) in names
            # The number of dimensions is the length of both lists.
            found += (
                [] if name in names or sets or (kind, name) == ("pagoda_value_info", "rank") else [f"{kind}.{name}"]
            )
    return found


def wrong_defaults(header):
    found = []
    for kind, values in header.inits.items():
        names = [name for name, _ in header.structs[kind]._fields_[1:]]
        given = dict(zip(names, values, strict=True))
        for field in dataclasses.fields(STRUCTS[kind]) if kind in STRUCTS else ():
            if field.name not in given or field.default is dataclasses.MISSING:
                continue
            default, expected = field.default, given[field.name]
            if given.get(f"has_{field.name}") == 0:
                expected = None
            # None is what the INIT sets: nothing, or -1 where that is a number that is not given.
            fine = default is None and expected in (None, -1) or default == () and expected is None
            if not fine and default != expected:
                found.append(f"{kind}.{field.name}: {default!r}, and {expected!r} in the header")
    return found


def problems(text):
    header, code = Header(text), sources()
    return missing_functions(header, code) + missing_constants(header, code) + missing_fields(header), wrong_defaults(
        header
    )


def test_nothing_is_missing():
    assert problems(TEXT) == ([], [])


def test_what_is_missing_is_named():
    """A header with something new of each kind."""
    new = TEXT.replace("} pagoda_generate_request;", "    int32_t dreams;\n} pagoda_generate_request;")
    new = new.replace(" }\n\n/** Why an answer ended", ", 4 }\n\n/** Why an answer ended")
    new = new.replace("#define PAGODA_DRIVER_CALLER 1", "#define PAGODA_DRIVER_CALLER 1\n#define PAGODA_DRIVER_BOTH 2")
    new = new.replace("{ sizeof(pagoda_engine_options), 1, 64,", "{ sizeof(pagoda_engine_options), 1, 65,")
    new = new.replace("#ifdef __cplusplus\n} ", "pagoda_status pagoda_generator_dream(void);\n\n#ifdef __cplusplus\n} ")
    missing, defaults = problems(new)
    assert missing == ["pagoda_generator_dream", "PAGODA_DRIVER_BOTH", "pagoda_generate_request.dreams"]
    assert defaults == ["pagoda_engine_options.max_batch: 64, and 65 in the header"]


def test_reasons_are_still_needed():
    code = sources()
    for name in WITHOUT:
        assert name in TEXT and not re.search(rf"\b{name}\b", code), name


def test_the_declarations_are_those_of_the_header():
    import make_header

    made, message = make_header.make(TEXT), "bindings/python/pagoda/_header.py is stale: run `make header`"
    assert (PACKAGE / "pagoda/_header.py").read_text() == made, message


@pytest.mark.parametrize("function", HEADER.functions.values(), ids=lambda function: function.name)
def test_every_prototype_is_as_declared(function):
    """As another reader of the header sees it (capi.py), which knows nothing of cffi."""

    def plain(kind):
        kind = re.sub(r"\bconst\b|\bstruct\b", "", kind)
        for alias in (name for name in HEADER.integers if name.startswith("pagoda_")):
            kind = re.sub(rf"\b{alias}\b", "int32_t", kind)
        return kind.replace(" ", "")

    declared = ffi.typeof(getattr(lib, function.name))
    callbacks = {name: ffi.typeof(name).cname for name in HEADER.callbacks}
    expected = [callbacks.get(parameter.type, parameter.type) for parameter in function.parameters]
    assert [plain(argument.cname) for argument in declared.args] == [plain(kind) for kind in expected]
    assert plain(declared.result.cname) == plain(function.result)


def numbers_of(kind):
    """Another number for each field of a struct that is a number."""
    plain = [
        name for name, field in ffi.typeof(kind).fields if field.type.kind == "primitive" and name != "struct_size"
    ]
    return {name: number for number, name in enumerate(plain, 3)}


GOES_IN = sorted(kind for kind, python in STRUCTS.items() if not python.__dataclass_params__.frozen)
COMES_OUT = sorted(kind for kind in STRUCTS if kind.endswith(("_stats", "_owner")))


@pytest.mark.parametrize("kind", GOES_IN)
def test_every_number_goes_in(kind):
    python, keep = STRUCTS[kind], []
    names = {field.name for field in dataclasses.fields(python)}
    given = {name: number for name, number in numbers_of(kind).items() if name in names}
    needed = (
        {"name": "h2o"} if kind == "pagoda_kv_policy" else {"candidates": {}} if kind == "pagoda_rank_request" else {}
    )
    read = python(**given, **needed).to_c("options", keep)
    assert read.struct_size == ffi.sizeof(kind) and given
    assert {name: getattr(read, name) for name in given} == given


@pytest.mark.parametrize("kind", COMES_OUT)
def test_every_number_comes_out(kind):
    given = numbers_of(kind)
    assert dataclasses.asdict(STRUCTS[kind].from_c(ffi.new(f"{kind} *", given))) == given
