"""What can be wrong with a parameter: by its role, and by its name where more can be."""

import ctypes
import json
import math

from capi import HEADER, POINTED_TO, address, pointed_to, struct, structs

C = HEADER.constants
INVALID_ARGUMENT, INVALID_HANDLE = C["PAGODA_STATUS_INVALID_ARGUMENT"], C["PAGODA_STATUS_INVALID_HANDLE"]
SIZE_MAX, INT_MIN, INT_MAX = 2**64 - 1, -(2**31), 2**31 - 1
NOT_UTF8 = b"caf\xe9"
# A number that no machine has a GPU of.
NO_GPU = 4096

# What may be NULL; the handles of _free too.
NULL_IS_FINE = {"options", "user_data", "release", "error"}
NULL_IS_FINE_IN = {
    ("pagoda_model_run", "cancel"),
    ("pagoda_model_run_async", "cancel"),
    ("pagoda_log_set", "callback"),
    ("pagoda_tensor_new_strings", "lengths"),
    ("pagoda_kv_cache_lookup", "starts"),
    ("pagoda_kv_cache_lookup", "lengths"),
    ("pagoda_kv_cache_lookup", "tiers"),
    ("pagoda_embeddings_lookup", "found"),
    ("pagoda_embeddings_pool", "found"),
    ("pagoda_embeddings_estimate", "memory"),
    ("pagoda_embeddings_estimate", "disk"),
    ("pagoda_embeddings_add", "folder"),
    ("pagoda_engine_rank", "response"),
    ("pagoda_generator_generate_async", "token_callback"),
}
# A cache has no shape without them.
NULL_IS_WRONG_IN = {("pagoda_kv_cache_open", "options")}

class Case:
    def __init__(self, what, spoil, status=INVALID_ARGUMENT, argument=None):
        self.what, self.spoil, self.status, self.argument = what, spoil, status, argument


def fine(function, parameter):
    freed = parameter.role == "handle" and function.name.endswith("_free")
    here = (function.name, parameter.name)
    named = parameter.role != "handle" and parameter.name in NULL_IS_FINE and here not in NULL_IS_WRONG_IN
    return freed or named or here in NULL_IS_FINE_IN


def setting(parameter, value):
    return lambda call: call.set(parameter.name, value)


def element(name, index, value):
    """Puts another element into a list."""

    def spoil(call):
        call.memory[name][index] = value

    return spoil


def field(name, field, value, index=None):
    """Sets a field of a struct, or of one in an array; memory that it points to lives as long as the call."""

    def spoil(call):
        struct = call.memory[name] if index is None else call.memory[name][index]
        if isinstance(value, bytes):
            call.memory[f"{name}.{field}"] = text = ctypes.create_string_buffer(value)
            setattr(struct, field, address(text))
        elif isinstance(struct, ctypes.Structure):
            setattr(struct, field, value)
        else:
            ctypes.c_uint32.from_buffer(struct).value = value

    return spoil


def instead(name, **values):
    """Sets several fields of a struct."""

    def spoil(call):
        for at, value in values.items():
            setattr(call.memory[name], at, value)

    return spoil


# ---- what can be wrong with a parameter, by its role -------------------------------------------------------------


def bad_handles(world, kind):
    """Numbers that are not handles of `kind`, each with why."""
    freed = world.fresh(kind)
    world.pagoda.free(kind, freed)
    yield "freed", freed
    live = world.keep(kind)
    for bit in [*range(8), 31, *range(32, 64)]:  # Another bit of the place in the table may make another good handle.
        yield f"bit {bit} flipped", live ^ 1 << bit
    for other in sorted(HEADER.opaque - {kind}):
        yield f"a {other}", world.keep(other)
    for forged in (1, 8, 0xDEADBEEF, SIZE_MAX):
        yield f"forged {forged:#x}", forged
    yield "an address", ctypes.addressof(world.heap)


def by_role(world, function, p):
    if p.role == "handle":
        for what, handle in bad_handles(world, p.kind):
            yield Case(what, setting(p, handle), INVALID_HANDLE)
        if not fine(function, p):
            yield Case("NULL", setting(p, None), INVALID_HANDLE)
    elif p.role == "scalar":
        assert str(p) in SCALARS or (function.name, p.name) in SCALARS, f"{function.name}: how can `{p}` be misused?"
        for value, status, *argument in SCALARS.get((function.name, p.name)) or SCALARS[str(p)]:
            yield Case(str(value), setting(p, value), status, *argument)
    elif not fine(function, p):
        yield Case("NULL", setting(p, None))
    if p.role == "handles":
        count = 2 if p.name == "inputs" else 1
        for index in range(count):
            for what, handle in bad_handles(world, "pagoda_tensor"):
                yield Case(f"[{index}] {what}", element(p.name, index, handle), INVALID_HANDLE, f"{p.name}[{index}]")
            for what, handle in world.unfit.items():
                yield Case(f"[{index}] {what}", element(p.name, index, handle), argument=f"{p.name}[{index}]")
        if p.name == "inputs":
            yield Case("[1] NULL", element(p.name, 1, None), INVALID_HANDLE, "inputs[1]")
    elif p.role == "texts":
        for what, text in ("NULL", None), ("not UTF-8", NOT_UTF8):
            yield Case(f"[0] {what}", element(p.name, 0, text), argument=f"{p.name}[0]")
        if p.name.endswith("_names"):
            not_found = C["PAGODA_STATUS_NOT_FOUND"]
            yield Case("[0] unknown", element(p.name, 0, b"nothing"), not_found, f"{p.name}[0]")
            yield Case("[0] empty", element(p.name, 0, b""), not_found, f"{p.name}[0]")
        if p.name == "input_names":
            yield Case("twice", element(p.name, 1, b"x"), argument="input_names[1]")
    elif p.role == "text":
        yield Case("not UTF-8", setting(p, ctypes.create_string_buffer(NOT_UTF8)))
    elif p.role == "array":
        yield from bad_dims(function, p)
    elif p.role == "lengths":
        for what, lengths, at in ("too long", [SIZE_MAX, 0, 3, 1], 0), ("cuts a character", [1, 0, 2, 1], 2):
            yield Case(what, setting(p, (ctypes.c_size_t * 4)(*lengths)), argument=f"values[{at}]")
    elif p.role in ("struct", "out struct"):
        size = ctypes.sizeof(HEADER.structs[p.kind])
        for wrong in (0, 4, size - 1, 4097, 0xA5A5A5A5, 2**32 - 1):
            yield Case(f"size {wrong}", field(p.name, "struct_size", wrong), argument=f"{p.name}.struct_size")
    elif p.role == "structs":
        size = ctypes.sizeof(HEADER.structs[p.kind])
        wrongs = [(0, wrong) for wrong in (0, size - 1, 4097, 2**32 - 1)] + [(1, wrong) for wrong in (0, size + 8)]
        for index, wrong in wrongs:
            at = f"{p.name}[{index}].struct_size"
            yield Case(f"[{index}] size {wrong}", field(p.name, "struct_size", wrong, index), argument=at)
    elif p.role == "numbers":
        yield Case("misaligned", misaligned(p.name, 2))


def misaligned(name, offset):
    """Moves a pointer."""

    def spoil(call):
        call.values[name] += offset

    return spoil


def bad_dims(function, p):
    shapes = [[-1, 2], [2, -1], [-(2**63), 1], [-2, -2], [2**62, 4], [2**40, 2**40], [2**62, 4, 0], [0, 2**40, 2**40]]
    for shape in shapes:

        def spoil(call, shape=shape):
            call.set(p.name, (ctypes.c_int64 * len(shape))(*shape))
            call.set("rank", len(shape))

        axis = next((axis for axis, dim in enumerate(shape) if dim < 0), None)
        yield Case(str(shape), spoil, argument="dims" if axis is None else f"dims[{axis}]")


# Scalars that can not be used: value, status, and the argument named where that is another one.
FIRST = INVALID_ARGUMENT
SCALARS = {
    "uint32_t header_version": [(v, C["PAGODA_STATUS_UNSUPPORTED"]) for v in (0, 2, 2**32 - 1)],
    "pagoda_log_level level": [(v, FIRST) for v in (-1, 6, INT_MIN, INT_MAX)],
    "pagoda_element_type type": [(v, FIRST) for v in (-1, 0, 27, 1000, INT_MIN)],
    "size_t capacity": [(v, C["PAGODA_STATUS_CAPACITY"]) for v in (0, 1, 10)],
    # Where the provider was asked for there is no reason to give: a NUL alone.
    **{(f"pagoda_{kind}_provider", "capacity"): [(0, C["PAGODA_STATUS_CAPACITY"])] for kind in ("engine", "generator")},
    **{(f"pagoda_generator_{name}", "capacity"): [(v, C["PAGODA_STATUS_CAPACITY"]) for v in (0, 1)]
       for name in ("tokenize", "detokenize")},
    "size_t token_count": [(v, FIRST) for v in (2**28 + 1, 2**63, SIZE_MAX)],
    "int32_t skip_special": [(v, FIRST) for v in (-1, 2, INT_MAX)],
    "size_t session_count": [(v, FIRST) for v in (2**20 + 1, 2**63, SIZE_MAX)],
    "int32_t stored": [(v, FIRST) for v in (-1, 2, INT_MIN)],
    "int32_t on": [(v, FIRST) for v in (-1, 2, INT_MAX)],
    "int32_t clear": [(v, FIRST) for v in (-1, 2, INT_MIN)],
    "size_t choice": [(v, FIRST) for v in (1, 2**63, SIZE_MAX)],
    "size_t rank": [(v, FIRST) for v in (65, 2**32, 2**63, SIZE_MAX)],
    "size_t bytes": [(v, FIRST) for v in (0, 15)],
    "size_t count": [(v, FIRST) for v in (0, 3, 5, SIZE_MAX)],
    "size_t index": [(v, FIRST) for v in (2, 1000, 2**63, SIZE_MAX)],
    "size_t size": [(0, FIRST, "bytes"), (SIZE_MAX, FIRST, "bytes"), (20, C["PAGODA_STATUS_MODEL"], "bytes")],
    "size_t input_count": [(v, FIRST) for v in (65537, 2**63, SIZE_MAX)] + [(v, FIRST, "input_names") for v in (0, 1)],
    "size_t output_count": [(v, FIRST) for v in (65537, 2**63, SIZE_MAX)] + [(0, FIRST, "output_names")],
    "int32_t layer": [(v, FIRST) for v in (-1, 2, INT_MIN, INT_MAX)],
    ("pagoda_kv_lease_wait", "layer"): [(v, FIRST) for v in (-2, 2, INT_MIN, INT_MAX)],
    "size_t user_count": [(v, FIRST) for v in (2**20 + 1, 2**63, SIZE_MAX)],
    "size_t owner_count": [(v, FIRST) for v in (2**20 + 1, 2**63, SIZE_MAX)],
    "uint64_t from": [(2, FIRST, "to")],  # Every number is an owner, but none can begin with its own history.
    "uint64_t to": [(1, FIRST)],
    "int32_t tokens": [(v, FIRST) for v in (-1, INT_MIN)],
    "size_t request_count": [(v, FIRST) for v in (65537, 2**63, SIZE_MAX)],
    "pagoda_tiers tiers": [(v, FIRST) for v in (0, 4, -1, INT_MIN, INT_MAX)],
    "pagoda_kv_tensor which": [(v, FIRST) for v in (-1, 5, INT_MIN, INT_MAX)],
    "int32_t wait": [(v, FIRST) for v in (-1, 2, INT_MAX)],
    "size_t key_count": [(v, FIRST) for v in (2**28 + 1, 2**63, SIZE_MAX)] + [(2, FIRST, "number_count")],
    ("pagoda_embeddings_pool", "key_count"): [(v, FIRST) for v in (2**28 + 1, SIZE_MAX)] + [(2, FIRST, "offsets")],
    **{(f"pagoda_embeddings_{name}", "key_count"): [(2**28 + 1, FIRST), (SIZE_MAX, FIRST)] for name in ("delete", "prefetch")},
    "size_t offset_count": [(0, FIRST, "number_count"), (2, FIRST, "number_count"), (SIZE_MAX, FIRST, "offsets")],
    "size_t number_count": [(v, FIRST) for v in (0, 8, 10, SIZE_MAX)],
    "pagoda_combiner combiner": [(v, FIRST) for v in (-1, 3, INT_MAX)],
    "pagoda_reach reach": [(v, FIRST) for v in (-1, 2, INT_MIN)],
    "uint64_t version": [],  # Every number is a version.
    "size_t score_count": [(v, FIRST) for v in (0, 5, 7)] + [(SIZE_MAX, FIRST, "scores")],
    "pagoda_status status": [],  # Every number has a name; see below.
}


# What the fields of options can not be.
BAD_COUNTS, NEGATIVE = (-1, 0, 8193, INT_MIN, INT_MAX), (-1, INT_MIN)
WRONG_OPTIONS = {
    "pagoda_model_options": {
        "provider": (-1, 3, INT_MIN),
        "optimization": (-1, 4, INT_MAX),
        "device_id": NEGATIVE,
        "sleep_when_idle": (2, -1),
        "tf32": (2, -1),
        "host_pools": (2, INT_MIN),
        "intra_op_threads": (-1, INT_MIN, 1025, INT_MAX),
        # Another ONNX Runtime than before, and no place to write to.
        "onnxruntime_path": (NOT_UTF8, b"/nowhere/file"),
        "profile_path": (NOT_UTF8, b"/nowhere/file"),
    },
    "pagoda_store_options": {"durability": (-1, 3, INT_MIN)},
    "pagoda_lookup_options": {"miss": (-1, 4, INT_MIN)},
    "pagoda_engine_options": {
        "instances": (-1, 0, 257, INT_MAX),
        **dict.fromkeys(["max_batch", "max_batch_rows", "queue"], (-1, 0, INT_MIN)),
        "kv_size_unit": (-1, 4, INT_MIN, INT_MAX),
        "kv_size": (2**31, SIZE_MAX),
        "offload": (-1, 3, INT_MAX),
        "kv_format": (-1, 5, INT_MIN, INT_MAX),
        "ahead_percent": (-1, 101, INT_MAX),
        "store_path": (NOT_UTF8, b""),
        "table_tiers_path": (NOT_UTF8, b""),
        "cuda_graph_count": (65537, SIZE_MAX),
    },
    "pagoda_rank_request": {
        "has_time": (2, -1),
        "start": (-2, -(2**63)),
        "event_count": (2**28 + 1, 2**63, SIZE_MAX),
        "event_feature_count": (0, 65537, SIZE_MAX),
        "event_features": (None,),
        "event_keys": (None,),
        "event_times": (None,),
        "user_feature_count": (65537, SIZE_MAX),
        "user_features": (None,),
        "user_keys": (None,),
        "candidate_count": (2**28 + 1, 2**63, SIZE_MAX),
        "candidate_feature_count": (0, 65537, SIZE_MAX),
        "candidate_features": (None,),
        "candidate_keys": (None,),
    },
    "pagoda_generator_options": {
        "driver": (-1, 2, INT_MAX),
        "share_prefixes": (-1, 2, INT_MIN),
        **dict.fromkeys(["max_batch", "max_batch_tokens", "queue"], (-1, 0, INT_MIN)),
        "max_stretch": (0.5, -2.0, 2000.0, math.nan, math.inf),
        **dict.fromkeys(["max_prompt_tokens", "max_new_tokens"], NEGATIVE),
        "kv_size_unit": (-1, 4, INT_MIN, INT_MAX),
        "kv_size": (2**31, SIZE_MAX),
        "kv_format": (-1, 5, INT_MIN, INT_MAX),
        "store_path": (NOT_UTF8, b""),
    },
    # What is found out when a request is read. The rest is below.
    "pagoda_generate_request": {
        **dict.fromkeys(["max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size"], (-2, INT_MIN)),
        **dict.fromkeys(["forced_eos", "logprobs", "prompt_logprobs", "max_draft"], (-2, INT_MIN)),
        "do_sample": (-2, 2, INT_MAX),
        **dict.fromkeys(["ignore_eos", "include_stop", "skip_special", "echo", "has_seed"], (-1, 2)),
        "n": NEGATIVE,
        "context_end": (-1, 2, INT_MAX),
        "token_count": (2**28 + 1, 2**63, SIZE_MAX),
        "tokens": (None,),
        "tools": (b"[]",),
        "variables": (b"{}",),
        **dict.fromkeys(["stop_count", "stop_token_count", "logit_bias_count"], (65537, SIZE_MAX)),
        "session": (NOT_UTF8, b""),
        "grammar": (NOT_UTF8, b"", b"{", b"[]", b"{}"),
    },
    "pagoda_kv_options": {
        **dict.fromkeys(["layers", "heads", "head_size"], BAD_COUNTS),
        "page_size": (-1, 0, 4, 12, INT_MAX),
        "type": (-1, 0, 6, 11, 27, INT_MAX),
        "size_unit": (-1, 4, INT_MIN, INT_MAX),
        "size": (0, 2**31, SIZE_MAX),
        "max_history": NEGATIVE,
        "overlap": (-1, 2, INT_MAX),
        "edited": (-1, 3, INT_MAX),
        "offload": (-1, 3, INT_MAX),
        "onload_in_background": (2, -1),
        "onload_threads": (-1, 1025, INT_MAX),
        "ahead_percent": (-1, 101, INT_MAX),
        "model_version": (NOT_UTF8,),
        "device_id": (-2, INT_MIN),
    },
}


UNIT = {name: C[f"PAGODA_KV_SIZE_UNIT_{name}"] for name in ("DEFAULT", "PAGES", "BYTES", "PERCENT")}
# Sizes of a pool in host memory that can not be.
BAD_SIZES = [
    ("a size without a unit", UNIT["DEFAULT"], 1),
    ("percent of the host", UNIT["PERCENT"], 50),
    ("0 percent", UNIT["PERCENT"], 0),
    ("101 percent", UNIT["PERCENT"], 101),
    ("one byte", UNIT["BYTES"], 1),
]


def bad_requests(p):
    """What one element of a batch can have wrong."""
    items = (ctypes.c_uint64 * 8)(*range(8))
    wrong = {"tokens": (-1, INT_MIN), "candidates": (-1, INT_MIN), "start": (-1, 1, 2**62, -(2**63)), "owner": (7,)}
    wrong |= {"item_count": (2**28 + 1, 2**63, SIZE_MAX)}
    for name, values in wrong.items():
        for value in values:
            yield Case(f"[1] {name} {value}", field(p.name, name, value, 1), argument=f"{p.name}[1].{name}")
    for what, where, count in ("not asked for", 0, 3), ("NULL", -address(items), 3), ("misaligned", 4, 3):

        def spoil(call, where=where, count=count):
            call.memory[p.name][1].items = (address(items) + where) or None
            call.memory[p.name][1].item_count = count

        yield Case(f"[1] items {what}", spoil, argument=f"{p.name}[1].items")

    def later(call):  # Elements of a later version, the second with a field that this library does not know.
        size = ctypes.sizeof(HEADER.structs[p.kind])
        elements = [bytes(element) for element in call.memory[p.name]]
        longer = (ctypes.c_uint8 * (2 * size + 16))(*elements[0], *bytes(8), *elements[1], *[1] * 8)
        for at in 0, size + 8:
            ctypes.c_uint32.from_buffer(longer, at).value = size + 8
        call.set(p.name, longer)

    yield Case("[1] a field unknown here", later, C["PAGODA_STATUS_UNSUPPORTED"], f"{p.name}[1]")


def bad_parts(p):
    """What the options that those of an engine or a generator point to can have wrong, and their sizes."""
    for name, value in ("provider", 9), ("intra_op_threads", 1025), ("struct_size", 3):
        model = pointed_to(struct("pagoda_model_options", provider=C["PAGODA_PROVIDER_CPU"]))
        setattr(POINTED_TO[-1], name, value)
        yield Case(f"model.{name} {value}", field(p.name, "model", model), argument=f"options.model.{name}")
    store = pointed_to(struct("pagoda_store_options", durability=7))
    yield Case("durability", field(p.name, "store_options", store), argument="options.store_options.durability")
    if p.kind == "pagoda_generator_options":
        wrong = [("struct_size", 3), ("cache_length", 0), ("cache_length", -1), ("chunk_size", 0), ("protect", -2)]
        wrong += [("grace_period", -1), ("grace_period", 8), ("keep_initial_fraction", math.nan), ("normalise", 2)]
        wrong += [("score_share", 1.5), ("cache_length_count", -1), ("cache_length_count", 2)]
        wrong += [("protect_first_message", 2)]
        for name, value in [*wrong, ("name", None)]:
            others = {("grace_period", 8): "cache_length", ("cache_length_count", 2): "cache_lengths"}
            named = others.get((name, value), name)
            yield policy_case(p, name, value, f"options.kv_policy.{named}", cache_length=8)
    too_much = field(p.name, "host_bytes", SIZE_MAX)
    yield Case(f"host_bytes {SIZE_MAX}", too_much, C["PAGODA_STATUS_CAPACITY"], "options.host_bytes")
    for what, unit, size in BAD_SIZES:
        yield Case(what, instead(p.name, kv_size_unit=unit, kv_size=size), argument="options.kv_size")


def policy_case(p, name, value, argument, status=FIRST, **fields):
    """A policy with one field set to a value."""
    text = pointed_to(ctypes.create_string_buffer(b"h2o"))
    policy = pointed_to(struct("pagoda_kv_policy", chunk_size=64, protect=-1, name=text, **fields))
    setattr(POINTED_TO[-1], name, value)
    return Case(f"policy.{name} {value}", field(p.name, "kv_policy", policy), status, argument)


def bad_engine_options(p):
    """What only those of an engine can have wrong."""
    yield Case("no shapes", field(p.name, "cuda_graph_count", 1), argument="options.cuda_graphs")
    shapes = {"no users": (0, 8, 0, 0), "no rows": (8, 0, 0, 0), "more candidates than rows": (1, 8, 9, 0)}
    for what, (users, rows, candidates, pages) in shapes.items():
        graph = struct("pagoda_graph_shape", users=users, rows=rows, candidates=candidates, pages=pages)
        spoil = instead(p.name, cuda_graphs=pointed_to(graph), cuda_graph_count=1)
        yield Case(what, spoil, argument="options.cuda_graphs[0]")
    for name in "users", "rows", "candidates", "pages":
        graph = struct("pagoda_graph_shape", **{"users": 1, "rows": 8} | {name: -1})
        spoil = instead(p.name, cuda_graphs=pointed_to(graph), cuda_graph_count=1)
        yield Case(f"{name} -1", spoil, argument=f"options.cuda_graphs[0].{name}")
    missing = field(p.name, "table_tiers_path", b"/nowhere/ps.json")
    yield Case("no tiers", missing, C["PAGODA_STATUS_NOT_FOUND"], "options.table_tiers_path")


def bad_rank_requests(world, function, p):
    """What a request can have wrong beyond its numbers."""
    not_found = C["PAGODA_STATUS_NOT_FOUND"]
    for what in "event", "candidate":
        for name, status, at in (
            (None, FIRST, f"{what}_features[0]"),
            (NOT_UTF8, FIRST, f"{what}_features[0]"),
            (b"nothing", not_found, f"{what}_keys"),
        ):
            names = [name, b"genre", b"rating"]
            spoil = field(p.name, f"{what}_features", pointed_to((ctypes.c_char_p * 3)(*names)))
            yield Case(f"{what}_features {name}", spoil, status, f"request.{at}")
        lists = pointed_to((ctypes.c_void_p * 3)(None, None, None))
        yield Case(f"{what}_keys NULL", field(p.name, f"{what}_keys", lists), argument=f"request.{what}_keys[0]")
        odd = pointed_to((ctypes.c_void_p * 3)(*[address(POINTED_TO[0]) + 4] * 3))
        yield Case(f"{what}_keys odd", field(p.name, f"{what}_keys", odd), argument=f"request.{what}_keys[0]")
    waits = function.has("scores")
    none = field(p.name, "candidate_count", 0)
    yield Case("no candidates", none, argument="score_count" if waits else "request.candidate_keys")
    if waits:  # The other one says it later.
        yield Case("a gap", field(p.name, "start", 7), not_found, "request.start")
    names = pointed_to((ctypes.c_char_p * 2)(b"nothing", b"town"))
    yield Case("user_features", field(p.name, "user_features", names), not_found, "request.user_keys")
    for what, handle in bad_handles(world, "pagoda_cancel"):
        yield Case(f"cancel {what}", field(p.name, "cancel", handle), INVALID_HANDLE, "request.cancel")


NO_TOKENS = {"tokens": None, "token_count": 0}


def beams_case(p, name, value):
    """A beam search with one field set to a value."""
    beams = pointed_to(struct("pagoda_beam_options", width=4, length_penalty=1))
    setattr(POINTED_TO[-1], name, value)
    return Case(f"beams.{name} {value}", field(p.name, "beams", beams), FIRST, f"request.beams.{name}")


def bad_generate_requests(world, function, p):
    """What a request for text can have wrong beyond its numbers."""

    def pointing(what, at, **values):
        for name, value in values.items():
            values[name] = pointed_to(value) if isinstance(value, ctypes.Array) else value
        return Case(what, instead(p.name, **values), argument=f"request.{at}")

    def text(value):
        return ctypes.create_string_buffer(value)

    def tokens(*ids):
        return (ctypes.c_uint32 * len(ids))(*ids)

    yield pointing("no prompt", "prompt", **NO_TOKENS)
    yield pointing("two prompts", "tokens", prompt=text(b"a"))
    yield pointing("a prompt and a chat", "messages", messages=text(b"[]"))
    yield pointing("prompt not UTF-8", "prompt", **NO_TOKENS, prompt=text(NOT_UTF8))
    yield pointing("no such token", "tokens[1]", tokens=tokens(5, 272))
    yield pointing("tokens odd", "tokens", tokens=address(POINTED_TO[0]) + 2)
    for messages in b"", b"{", b'[{"role": "user", "content": }]', b"{}", b'"a"', b"null", b"3", b"[] []", NOT_UTF8:
        yield pointing(f"messages {messages}", "messages", **NO_TOKENS, messages=text(messages))
    for part, values in ("tools", (b"", b"{", NOT_UTF8)), ("variables", (b"", b"{", b"[]", b"1", NOT_UTF8)):
        for value in values:
            yield pointing(f"{part} {value}", part, **NO_TOKENS, messages=text(b"[]"), **{part: text(value)})
    yield pointing("flag", "add_generation_prompt", **NO_TOKENS, messages=text(b"[]"), add_generation_prompt=2)
    for name, count in ("stop", "stop_count"), ("stop_tokens", "stop_token_count"), ("logit_bias", "logit_bias_count"):
        yield pointing(f"{name} NULL", name, **{count: 1})
    for stop in None, NOT_UTF8:
        yield pointing(f"stop {stop}", "stop[1]", stop=(ctypes.c_char_p * 2)(b"a", stop), stop_count=2)
    bias = structs("pagoda_logit_bias", [{"token": 1}, {"token": 2}])
    bias[1].struct_size = 16
    yield pointing("bias size", "logit_bias[1].struct_size", logit_bias=bias, logit_bias_count=2)
    for what, handle in bad_handles(world, "pagoda_cancel"):
        yield Case(f"cancel {what}", field(p.name, "cancel", handle), INVALID_HANDLE, "request.cancel")
    wrong = [("struct_size", 3), ("cache_length", -1), ("chunk_size", -1), ("protect", -2), ("grace_period", -1)]
    wrong += [("normalise", 2), ("protect_first_message", -1), ("cache_length_count", 2), ("name", None)]
    for name, value in wrong:
        named = "cache_lengths" if name == "cache_length_count" else name
        yield policy_case(p, name, value, f"request.kv_policy.{named}")
    for name, value in ("struct_size", 3), ("width", -1), ("early_stop", 3), ("early_stop", -1):
        yield beams_case(p, name, value)
    if function.name == "pagoda_generator_tokenize":
        return
    wrong = [("width", 0), ("width", 17), ("length_penalty", math.nan), ("length_penalty", math.inf)]
    for name, value in wrong:
        yield beams_case(p, name, value)
    yield policy_case(p, "protect", 4, "request.kv_policy", C["PAGODA_STATUS_UNSUPPORTED"])
    wrong = {"max_new_tokens": (0, 511, INT_MAX), "n": (0, INT_MAX), "forced_eos": (272,), "token_count": (512, 600)}
    wrong |= dict.fromkeys(["logprobs", "prompt_logprobs"], (1001, INT_MAX))
    wrong |= dict.fromkeys(["temperature", "repetition_penalty"], (-2.0, math.nan, math.inf))
    wrong |= dict.fromkeys(["top_p", "min_p"], (-0.5, 1.5, math.nan))
    wrong |= dict.fromkeys(["presence_penalty", "frequency_penalty"], (-2.5, 2.5, math.nan))
    many = tokens(*[5] * 600)
    for name, values in wrong.items():
        for value in values:
            at = "tokens" if name == "token_count" else name
            yield pointing(f"{name} {value}", at, tokens=many if at == "tokens" else tokens(5, 6), **{name: value})
    yield pointing("no tokens", "tokens", tokens=tokens(5), token_count=0)
    yield pointing("stop empty", "stop", stop=(ctypes.c_char_p * 1)(b""), stop_count=1)
    yield pointing("stop token", "stop_tokens", stop_tokens=tokens(272), stop_token_count=1)
    for token, value in (272, 1.0), (5, math.inf), (5, math.nan):
        bias = structs("pagoda_logit_bias", [{"token": token, "bias": value}])
        yield pointing(f"bias {token} {value}", "logit_bias[0]", logit_bias=bias, logit_bias_count=1)
    twice = structs("pagoda_logit_bias", [{"token": 5}, {"token": 5}])
    yield pointing("bias twice", "logit_bias", logit_bias=twice, logit_bias_count=2)
    yield pointing("two in a session", "n", n=2, session=text(b"a"))
    for grammar, part in (b'{"regex": "("}', "regex"), (b'{"json_schema": {"type": "x"}}', "json_schema"), (b'{"choice": []}', "choice"):
        yield pointing(f"grammar {part}", f"grammar.{part}", grammar=text(grammar))


def by_name(world, function, p):
    """What only this parameter can have wrong."""
    if p.role == "struct":
        for name, values in WRONG_OPTIONS[p.kind].items():
            for value in values:
                yield Case(f"{name} {value}", field(p.name, name, value), argument=f"{p.name}.{name}")

        def later(call):  # A later version of the struct, with a field that this library does not know.
            size = ctypes.sizeof(call.memory[p.name])
            longer = (ctypes.c_uint8 * (size + 8))(*bytes(call.memory[p.name]), *[1] * 8)
            ctypes.c_uint32.from_buffer(longer).value = size + 8
            call.set(p.name, longer)

        yield Case("a field unknown here", later, C["PAGODA_STATUS_UNSUPPORTED"], p.name)
    if p.kind == "pagoda_model_options":
        for what, handle in bad_handles(world, "pagoda_embeddings"):
            yield Case(f"tables {what}", field(p.name, "tables", handle), INVALID_HANDLE, "options.tables")
    if p.kind == "pagoda_kv_options":
        for what, handle in bad_handles(world, "pagoda_store"):
            yield Case(f"store {what}", field(p.name, "store", handle), INVALID_HANDLE, "options.store")
        for what, unit, size in BAD_SIZES:
            yield Case(what, instead(p.name, size_unit=unit, size=size), argument="options.size")
        yield Case("no size", instead(p.name, size_unit=UNIT["DEFAULT"], size=0), argument="options.size_unit")
        for unit, size in (UNIT["PAGES"], 64), (UNIT["PERCENT"], 50):
            spoil = instead(p.name, device_id=NO_GPU, size_unit=unit, size=size)
            yield Case(f"device {NO_GPU} {size}", spoil, C["PAGODA_STATUS_UNSUPPORTED"], "options.device_id")
    if p.kind in ("pagoda_engine_options", "pagoda_generator_options"):
        yield from bad_parts(p)
    if p.kind == "pagoda_engine_options":
        yield from bad_engine_options(p)
    if p.kind == "pagoda_generate_request":
        yield from bad_generate_requests(world, function, p)
    if (function.name, p.name) == ("pagoda_generator_tokenize", "tokens"):
        yield Case("misaligned", misaligned(p.name, 2))
    if (function.name, p.name) == ("pagoda_generator_step", "generator"):
        yield Case("runs by itself", setting(p, world.generator), C["PAGODA_STATUS_UNSUPPORTED"], "options.driver")
    if p.kind == "pagoda_rank_request":
        yield from bad_rank_requests(world, function, p)
    if p.name == "folder" and function.name in ("pagoda_engine_open", "pagoda_engine_swap", "pagoda_generator_open"):
        folders = {"empty": (b"", FIRST), "not there": (b"/nowhere/model", C["PAGODA_STATUS_NOT_FOUND"])}
        folders |= {"another folder": (str(world.path.parent).encode(), C["PAGODA_STATUS_NOT_FOUND"])}
        for what, (path, status) in folders.items():
            yield Case(what, setting(p, ctypes.create_string_buffer(path)), status)
    if p.kind == "pagoda_kv_request":
        yield from bad_requests(p)
    if (function.name, p.role) == ("pagoda_kv_cache_lookup", "out"):
        yield Case("misaligned", misaligned(p.name, 2))
    if str(p) == "pagoda_element_type type" and function.has("data"):
        yield Case("strings", setting(p, C["PAGODA_ELEMENT_TYPE_STRING"]))
    if str(p) == "void * data":
        for offset, kind in (1, "F32"), (2, "F32"), (1, "BF16"), (4, "F64"):

            def moved(call, offset=offset, kind=kind):
                call.set("bytes", 32)
                call.set("type", C[f"PAGODA_ELEMENT_TYPE_{kind}"])
                call.values["data"] += offset

            yield Case(f"{kind} at an address + {offset}", moved)
    if (function.name, p.name) == ("pagoda_store_open", "path"):
        busy = world.folder()
        world.busy = world.pagoda.make("pagoda_store_open", address(busy), None)
        folders = {"a file": (world.path, C["PAGODA_STATUS_IO"]), "nowhere": ("/proc/nowhere", C["PAGODA_STATUS_IO"])}
        folders |= {"other things": (world.path.parent, FIRST), "empty": ("", FIRST)}
        folders |= {"busy": (busy.value.decode(), C["PAGODA_STATUS_BUSY"])}
        for what, (path, status) in folders.items():
            yield Case(what, setting(p, ctypes.create_string_buffer(str(path).encode())), status)
    if str(p) == "const char * table":
        for name in "nothing", "", "m/", "x/t", "/":
            yield Case(name, setting(p, ctypes.create_string_buffer(name.encode())), C["PAGODA_STATUS_NOT_FOUND"])
    if str(p) == "const int64_t * offsets":
        for offsets in [1, 2, 2, 3], [0, 2, 1, 3], [0, 2, 2, 2], [0, 2, 2, 4], [-1, 2, 2, 3]:
            yield Case(str(offsets), setting(p, (ctypes.c_int64 * 4)(*offsets)))
    if (function.name, p.name) == ("pagoda_embeddings_add", "model"):
        again = {**world.new_model(), "model": "m"}
        wrong = {"": "model", "{": "model", "[]": "model", "{}": "model.model", json.dumps(again): "model"}
        for text, argument in wrong.items():
            yield Case(text[:20], setting(p, ctypes.create_string_buffer(text.encode())), argument=argument)
        for key, value in ("sparse_files", ["nowhere.npy"]), ("gpucacheper", 7), ("nonsense", 1):
            text = json.dumps({**world.new_model(), key: value})
            status, at = (C["PAGODA_STATUS_NOT_FOUND"], "model") if key == "sparse_files" else (FIRST, f"model.{key}")
            yield Case(f"{key} {value}", setting(p, ctypes.create_string_buffer(text.encode())), status, at)
    if (function.name, p.name) == ("pagoda_embeddings_retire", "model"):
        yield Case("nothing", setting(p, ctypes.create_string_buffer(b"nothing")), C["PAGODA_STATUS_NOT_FOUND"])
    if p.name == "path" and function.name in ("pagoda_embeddings_open", "pagoda_embeddings_estimate"):
        yield Case("not there", setting(p, ctypes.create_string_buffer(b"/nowhere/ps.json")), C["PAGODA_STATUS_NOT_FOUND"])
        yield Case("not JSON", setting(p, ctypes.create_string_buffer(str(world.path).encode())))
    if (function.name, p.name) == ("pagoda_model_open", "path"):
        files = {"a folder": (world.path.parent, FIRST), "not there": ("/nowhere/m.onnx", C["PAGODA_STATUS_NOT_FOUND"])}
        files |= {"empty": ("", C["PAGODA_STATUS_INVALID_ARGUMENT"]), "not a model": (__file__, C["PAGODA_STATUS_MODEL"])}
        files |= {"an empty file": ("/dev/null", C["PAGODA_STATUS_MODEL"])}
        for what, (path, status) in files.items():
            yield Case(what, setting(p, ctypes.create_string_buffer(str(path).encode())), status)
    if str(p) == "const void * bytes":

        def graphless(call):  # Well-formed, but a version number is all there is.
            call.set("bytes", ctypes.create_string_buffer(b"\x08\x0a"))
            call.set("size", 2)

        yield Case("no graph", graphless, C["PAGODA_STATUS_MODEL"])
    if function.name == "pagoda_tensor_string" and p.name == "tensor":
        yield Case("of numbers", setting(p, world.x))
    if function.name == "pagoda_tensor_data" and p.name == "tensor":
        yield Case("of strings", setting(p, world.strings), C["PAGODA_STATUS_UNSUPPORTED"])
