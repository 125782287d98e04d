"""config.json: what the model is, checked in full before a weight is read. sdk/docs/model-folder.md describes it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..error import ExportError
from ..section import Section

NAMES = ("pagoda", "nvidia-native", "nvidia-fused", "nvidia-inference", "meta")
ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh")
NORMS = ("layer_norm", "swish_layer_norm")
TYPES = ("f32", "f16", "bf16")
NO_KEY = -1


@dataclass(frozen=True)
class Step:
    """One step of an MLP: a matrix, an activation, or a norm; `size` is how wide its result is."""

    kind: str
    size: int
    bias: bool = True


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dim: int
    default_row: int | None  # None: a key that is not there gets zeros
    keyed: bool  # has keys of its own; otherwise row i has key i
    file: Path | None  # None: in the checkpoint
    rows_tensor: str | None
    keys_tensor: str | None


@dataclass(frozen=True)
class Feature:
    name: str
    table: str
    source: str
    candidate_key: int | None  # of an action: its key in candidate rows, where None means that they have none


@dataclass(frozen=True)
class Token:
    """The features that are added up or put side by side in one row, and the MLP that they go through."""

    features: tuple[Feature, ...]
    combine: str
    mlp: tuple[Step, ...]
    width: int  # of what goes into the MLP


@dataclass(frozen=True)
class Block:
    flavour: str
    layers: int
    heads: int
    head_size: int
    scaling_seqlen: int
    alpha: float
    max_attn_len: int
    target_group_size: int
    epsilon: float
    input_norm_learned: bool
    output_norm_learned: bool
    uvqk_bias: bool
    residual: bool
    group_norm: bool

    @property
    def width(self):
        """Of u, v, q and k each."""
        return self.heads * self.head_size


@dataclass(frozen=True)
class Positions:
    counted: str  # from_start or from_end
    buckets: int


@dataclass(frozen=True)
class Times:
    kind: str  # before_request or absolute
    buckets: int
    bucket_seconds: float
    function: str  # sqrt, log or linear
    origin: int
    wrap: bool


@dataclass(frozen=True)
class Task:
    name: str
    activation: str


@dataclass(frozen=True)
class Checkpoint:
    names: str
    prefix: str | None
    rename: dict[str, str]
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    checkpoint: Checkpoint
    embedding_size: int
    block: Block
    compute: str  # the type that blocks compute in
    fused: bool  # whether blocks consist of Pagoda's operators alone
    kv_type: str
    page_size: int
    tables: dict[str, Table]
    item: Token
    action: Token | None
    user: Token | None
    user_sees_history: bool
    interleaved: bool
    positions: Positions | None
    times: Times | None
    scale_embeddings: bool
    final_norm: str
    head: tuple[Step, ...]
    tasks: tuple[Task, ...]
    max_history: int
    max_candidates: int
    lookup: str

    @property
    def tokens(self):
        """The kinds of rows that there are, by name."""
        kinds = {"user": self.user, "item": self.item, "action": self.action}
        return {kind: token for kind, token in kinds.items() if token}

    @property
    def features(self):
        return [feature for token in self.tokens.values() for feature in token.features]

    @property
    def not_cacheable(self):
        """Why what was computed for old rows does not stay true as the history grows; None where it does."""
        if self.positions and self.positions.counted == "from_end":
            return "positions are counted from the end of the history: every new event moves those of all old ones"
        if self.times and self.times.kind == "before_request":
            return "times are counted back from the request: those of all old events change with every request"
        if self.user_sees_history:
            return "user rows see the whole history: their keys and values change with every new event"
        return None


def load(path):
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} can not be read: {error}") from error
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ExportError(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    return parse(value, folder=path.parent)


def parse(value, folder=Path()):
    """A configuration out of what was JSON; files named in it are looked for in `folder`."""
    top = Section("config", value)
    size = top.integer("embedding_size")
    block = _block(top.section("block"))
    kv = top.section("kv", {})
    compute = top.text("compute", "f32", of=TYPES)
    # ONNX Runtime's own products of f32 are faster on a CPU; in half precision there are none.
    fused = top.flag("fused", compute != "f32")
    if compute != "f32" and not fused:
        raise ExportError(
            f"{top.path('fused')} is false and {top.path('compute')} is {compute}: ONNX's own operators have no "
            "kernels of that type on the CPU. Say true, or compute in f32"
        )
    kv_type, page_size = kv.text("type", compute, of=TYPES), kv.integer("page_size", 32, least=8)
    if compute not in ("f32", kv_type):
        raise ExportError(
            f"{kv.path('type')} is {kv_type} and {top.path('compute')} is {compute}: keys and values are then of that "
            "type too. Leave the first out, or make them agree"
        )
    if page_size % 8:
        raise ExportError(f"{kv.path('page_size')} is {page_size}: it has to be a multiple of 8, such as 16 or 32")
    kv.done()
    lookup = top.text("lookup", "bag", of=("bag", "gather"))
    tables = {name: _table(name, section, folder) for name, section in top.sections("tables").items()}
    if lookup == "gather" and any(table.keyed for table in tables.values()):
        name = next(name for name, table in tables.items() if table.keyed)
        raise ExportError(
            f"config.tables.{name}.keyed is true, but with lookup gather a key is the number of a row: use lookup bag, "
            "or number the rows from 0 and leave out the keys"
        )

    tokens = top.section("tokens")
    item = _token(tokens.section("item"), "item", tables, size)
    action_section = tokens.section("action", None)
    action = action_section and _token(action_section, "action", tables, size)
    user_section, sees = tokens.section("user", None), False
    if user_section:
        sees = user_section.flag("sees_history", False)
    user = user_section and _token(user_section, "user", tables, size)
    interleaved = tokens.flag("interleaved", False)
    if interleaved and not action:
        raise ExportError(
            f"{tokens.path('interleaved')} is true, but there is no action to put after each item: add "
            f"{tokens.path('action')}, or say false"
        )
    tokens.done()

    positions, times = _positions(top.section("positions", None)), _times(top.section("times", None))
    config = Config(
        checkpoint=_checkpoint(top.section("checkpoint", {})),
        embedding_size=size,
        block=block,
        compute=compute,
        fused=fused,
        kv_type=kv_type,
        page_size=page_size,
        tables=tables,
        item=item,
        action=action,
        user=user,
        user_sees_history=sees,
        interleaved=interleaved,
        positions=positions,
        times=times,
        scale_embeddings=top.flag("scale_embeddings", bool(positions or times)),
        final_norm=top.text("final_norm", "l2", of=("none", "l2", "layer_norm")),
        **_head(top.section("head"), size),
        **_limits(top.section("limits")),
        lookup=lookup,
    )
    top.done()
    _check_features(config)
    return config


def _block(section):
    flavour = section.text("flavour", of=("nvidia", "meta"))
    head_size = section.integer("head_size")
    hidden_size = section.integer("hidden_size", head_size)
    if hidden_size != head_size:
        raise ExportError(
            f"{section.path('hidden_size')} is {hidden_size} and {section.path('head_size')} is {head_size}: they have "
            "to be the same, for the operator HstuAttention has one head size for queries, keys and values, and a page "
            "of the KV cache holds keys and values of one size. Train the model with both alike"
        )
    scaling = section.values.get("scaling_seqlen")
    if scaling == -1:
        raise ExportError(
            f"{section.path('scaling_seqlen')} is -1, which in training means the longest sequence of the batch: then "
            "a score would depend on who else is in the batch. Give the fixed number that the model is to be served "
            "with, such as the longest sequence of training"
        )
    nvidia = flavour == "nvidia"
    block = Block(
        flavour=flavour,
        layers=section.integer("layers"),
        heads=section.integer("heads"),
        head_size=head_size,
        scaling_seqlen=section.integer("scaling_seqlen"),
        alpha=section.number("alpha", 0.0),
        max_attn_len=section.integer("max_attn_len", 0, least=0),
        target_group_size=section.integer("target_group_size", 1),
        epsilon=section.number("epsilon", 1e-5 if nvidia else 1e-6, above=0),
        input_norm_learned=section.flag("input_norm_learned", True),
        output_norm_learned=section.flag("output_norm_learned", True),
        uvqk_bias=section.flag("uvqk_bias", True),
        residual=section.flag("residual", True),
        group_norm=section.flag("group_norm", False),
    )
    if nvidia and block.group_norm:
        raise ExportError(f"{section.path('group_norm')} is true, but blocks of flavour nvidia have none: say false")
    if not nvidia and not block.residual:
        raise ExportError(f"{section.path('residual')} is false, but blocks of flavour meta always add: say true")
    section.done()
    return block


def _table(name, section, folder):
    # Table names become file names and attributes.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ExportError(
            f"{section.where}: a table's name has letters, digits, _, - and . only, at most 100: rename it"
        )
    rows, file = section.integer("rows", most=2**62), section.text("file", None)
    table = Table(
        name=name,
        rows=rows,
        dim=section.integer("dim"),
        default_row=section.integer("default_row", None, least=0, most=rows - 1),
        keyed=section.flag("keyed", False),
        file=folder / file if file else None,
        rows_tensor=section.text("rows_tensor", None),
        keys_tensor=section.text("keys_tensor", None),
    )
    if table.keys_tensor and not table.keyed:
        raise ExportError(f"{section.path('keys_tensor')} is given, but {section.path('keyed')} is not true: say true")
    section.done()
    return table


def _token(section, kind, tables, size):
    features, where = [], section.path("features")
    for number, value in enumerate(section.list("features")):
        entry = Section(f"{where}[{number}]", value)
        name, table = entry.text("name"), entry.text("table")
        if table not in tables:
            raise ExportError(
                f"{entry.path('table')} is {table!r}, which is not among config.tables: {', '.join(tables)}"
            )
        key = entry.integer("candidate_key", None, least=-(2**63), most=2**63 - 1) if kind == "action" else None
        if key == NO_KEY:
            raise ExportError(f"{entry.path('candidate_key')} is -1, which means none: leave it out")
        features.append(Feature(name, table, kind, key))
        entry.done()
    if not features:
        raise ExportError(f"{where} is empty: name at least one feature, or leave out {section.where}")
    # Each user feature has a row of its own; the others share one.
    combine = "sum" if kind == "user" else section.text("combine", "sum", of=("sum", "concat"))
    dims = [tables[feature.table].dim for feature in features]
    if combine == "sum" and len(set(dims)) > 1:
        listed = ", ".join(f"{feature.name} {dim}" for feature, dim in zip(features, dims))
        hint = "use one width" if kind == "user" else 'use one width, or "combine": "concat"'
        raise ExportError(f"{where}: vectors of different widths can not be added ({listed}): {hint}")
    width = dims[0] if combine == "sum" else sum(dims)
    mlp = _mlp(section.path("mlp"), section.list("mlp", []), width)
    result = mlp[-1].size if mlp else width
    if result != size:
        raise ExportError(
            f"{section.where} gives rows of width {result}, but config.embedding_size is {size}: use tables of that "
            "width, or an mlp that ends in it"
        )
    section.done()
    return Token(tuple(features), combine, mlp, width)


def _mlp(where, values, width):
    steps = []
    for number, value in enumerate(values):
        at = f"{where}[{number}]"
        if isinstance(value, dict):
            entry = Section(at, value)
            width = entry.integer("linear")
            steps.append(Step("linear", width, entry.flag("bias", True)))
            entry.done()
        elif value in ACTIVATIONS or value in NORMS:
            steps.append(Step(value, width))
        else:
            known = ", ".join(ACTIVATIONS + NORMS)
            raise ExportError(f'{at} is {value!r}: it has to be {{"linear": width}} or one of {known}')
    return tuple(steps)


def _positions(section):
    if section is None:
        return None
    positions = Positions(section.text("counted", of=("from_start", "from_end")), section.integer("buckets"))
    section.done()
    return positions


def _times(section):
    if section is None:
        return None
    kind = section.text("kind", of=("before_request", "absolute"))
    relative = kind == "before_request"
    times = Times(
        kind=kind,
        buckets=section.integer("buckets"),
        bucket_seconds=section.number("bucket_seconds", 60.0, above=0)
        if relative
        else section.integer("bucket_seconds"),
        function=section.text("function", "sqrt", of=("sqrt", "log")) if relative else "linear",
        origin=0 if relative else section.integer("origin", 0, least=-(2**62), most=2**62),
        wrap=False if relative else section.flag("wrap", False),
    )
    section.done()
    return times


def _head(section, size):
    tasks = []
    for number, value in enumerate(section.list("tasks")):
        entry = Section(f"{section.path('tasks')}[{number}]", value)
        tasks.append(Task(entry.text("name"), entry.text("activation", "sigmoid", of=("sigmoid", "none", "softmax"))))
        entry.done()
    _no_twins(section.path("tasks"), [task.name for task in tasks])
    kinds = {task.activation for task in tasks}
    if "softmax" in kinds and len(kinds) > 1:
        raise ExportError(f"{section.path('tasks')}: softmax is over all of them: give it to every task or to none")
    mlp = _mlp(section.path("mlp"), section.list("mlp"), size)
    width = mlp[-1].size if mlp else size
    if not tasks or width != len(tasks):
        raise ExportError(
            f"{section.path('mlp')} gives {width} numbers a candidate and {section.path('tasks')} names {len(tasks)}: "
            "there has to be one task for each"
        )
    section.done()
    return {"head": mlp, "tasks": tuple(tasks)}


def _limits(section):
    limits = {key: section.integer(key) for key in ("max_history", "max_candidates")}
    section.done()
    return limits


def _checkpoint(section):
    rename = section.section("rename", {}).values
    for name, theirs in rename.items():
        if not isinstance(theirs, str):
            raise ExportError(f"{section.path('rename')}.{name} is {theirs!r}: it has to be the name of a tensor")
    ignore = section.list("ignore", [])
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise ExportError(f'{section.path("ignore")} is {ignore!r}: it has to be a list of patterns such as "loss.*"')
    checkpoint = Checkpoint(
        section.text("names", "pagoda", of=NAMES), section.text("prefix", None, empty=True), rename, tuple(ignore)
    )
    section.done()
    return checkpoint


def _check_features(config):
    _no_twins("config.tokens", [feature.name for feature in config.features])
    used = {feature.table for feature in config.features}
    for table in config.tables:
        if table not in used:
            raise ExportError(
                f"config.tables.{table} is used by no feature: remove it, or add the feature that uses it"
            )
    for feature in config.features:
        if feature.candidate_key is not None and config.interleaved:
            raise ExportError(
                f"candidate_key of {feature.name} is {feature.candidate_key}, but with interleaved actions a candidate "
                "is an item alone: leave it out"
            )
        # Of a keyed table that is known when its keys are read.
        table, key = config.tables[feature.table], feature.candidate_key
        if key is not None and not table.keyed and not 0 <= key < table.rows:
            raise ExportError(
                f"candidate_key of {feature.name} is {key}, but config.tables.{table.name} has rows 0 to "
                f"{table.rows - 1}: give the number of one of them"
            )
    flavour, names = config.block.flavour, config.checkpoint.names
    if names != "pagoda" and not names.startswith(flavour):
        raise ExportError(
            f"config.checkpoint.names is {names} and config.block.flavour is {flavour}: the layers of one code base "
            "are not those of the other. Make them agree"
        )


def _no_twins(where, names):
    for name in names:
        if names.count(name) > 1:
            raise ExportError(f"{where} has the name {name!r} {names.count(name)} times: each name may be used once")


def _without_duplicates(pairs):
    _no_twins("an object", [key for key, _ in pairs])
    return dict(pairs)
