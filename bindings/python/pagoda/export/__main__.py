"""pagoda-export source out_dir, for a language model; pagoda-export checkpoint config.json out_dir, for a ranking model"""

import argparse
import contextlib
import json
import signal
import sys
import threading

from . import ExportError, export, export_language_model, llm
from .model import MAX_MODEL_BYTES

USAGE = """%(prog)s source out_dir [--compute TYPE] [--weights FORM] [--kv FORMAT] [--max-context N] [--form FORM]
       [--force] [--json]
       %(prog)s checkpoint config.json out_dir [--max-model-bytes BYTES] [--force] [--json]"""
DESCRIPTION = """Makes a model folder that Pagoda serves. Two paths make one of a language model: source is a Hugging Face
folder or a .gguf file. Three paths make one of a ranking model: checkpoint is a .safetensors file, or a .pt or .pth file if
torch is installed, and config.json says what the model is (sdk/docs/model-folder.md)."""


def main(arguments=None):
    given = _arguments(arguments)
    try:
        with _stopped_by_signals():
            manifest = _exported(given)
    except (ExportError, OSError) as error:
        print(f"pagoda.export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        print(f"pagoda.export: stopped by {signal.Signals(number).name}; nothing was written", file=sys.stderr)
        return 128 + number
    if given.json:
        print(json.dumps(manifest))
        return 0
    size = sum(file["bytes"] for file in manifest["files"].values())
    out = given.paths[-1]
    print(f"{out}: version {manifest['version'][:16]}, {size:,} bytes in {len(manifest['files'])} files")
    print(*(_ranking_model if manifest["kind"] == "rank" else _language_model)(manifest), sep="\n")
    return 0


@contextlib.contextmanager
def _stopped_by_signals():
    """What would end the process at once, a closed terminal or `docker stop`, ends it as Ctrl-C does: nothing is left behind."""

    def stop(number, _):
        raise KeyboardInterrupt(number)

    # A signal that is ignored, as SIGHUP under nohup, stays so.
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in heeded} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments(arguments):
    parser = argparse.ArgumentParser("pagoda-export", usage=USAGE, description=DESCRIPTION)
    parser.add_argument("paths", nargs="+", metavar="path", help="source and out_dir, or checkpoint, config.json and out_dir")
    parser.add_argument("--force", action="store_true", help="replace out_dir if it is a model folder already")
    parser.add_argument("--json", action="store_true", help="print what pagoda.json says")
    of = parser.add_argument_group("language models")
    of.add_argument("--compute", choices=llm.COMPUTE, help="the type of activations and native weights; default: f32")
    weights = "quantise matrices in blocks of 32, or not; a GGUF file's own q4_0, q4_1 and q8_0 stay exact; default: native"
    of.add_argument("--weights", choices=llm.WEIGHTS, help=weights)
    of.add_argument("--kv", choices=llm.KV, help="the format of the KV cache's pages; default: native, which is --compute")
    of.add_argument("--max-context", type=int, metavar="N", help="the longest sequence to serve; default: the model's own")
    form = "paged: with Pagoda's operators; functional: standard operators alone, for any ONNX Runtime; default: paged"
    of.add_argument("--form", choices=llm.FORMS, help=form)
    of = parser.add_argument_group("ranking models")
    beside = "put the weights into a file beside model.onnx if they are more than this; default: about 2 GiB"
    of.add_argument("--max-model-bytes", type=int, metavar="BYTES", help=beside)
    given = parser.parse_args(arguments)
    if len(given.paths) not in (2, 3):
        parser.error(f"{len(given.paths)} path{'s' * (len(given.paths) > 1)}: give source and out_dir, or checkpoint, "
                     "config.json and out_dir")
    ranking = len(given.paths) == 3
    others = ["max_model_bytes"] if not ranking else ["compute", "weights", "kv", "max_context", "form"]
    for name in others:
        if getattr(given, name) is not None:
            kind, paths = ("language", "three paths export a ranking model") if ranking else (
                "ranking", "two paths export a language model")
            parser.error(f"--{name.replace('_', '-')} is for {kind} models, and {paths}")
    return given


def _exported(given):
    if len(given.paths) == 3:
        most = MAX_MODEL_BYTES if given.max_model_bytes is None else given.max_model_bytes
        return export(*given.paths, given.force, most)
    options = {name: getattr(given, name) for name in ("compute", "weights", "kv", "max_context", "form")}
    options = {name: value for name, value in options.items() if value is not None}
    return export_language_model(*given.paths, given.force, **options)


def _ranking_model(manifest):
    kv = manifest["kv"]
    tasks = ", ".join(task["name"] for task in manifest["tasks"])
    yield f"tasks {tasks}; {kv['layers']} layers, {kv['heads']} heads of {kv['head_size']}"
    if kv["cache"]:
        yield f"KV cache: {kv['bytes_per_token']:,} bytes for each row of history"
    else:
        yield f"no KV cache: {kv['reason']}"


def _language_model(manifest):
    kv, heads = manifest["kv"], manifest["attention"]["heads"]
    yield (
        f"{manifest['architecture']}: {kv['layers']} layers, {heads} heads over {kv['heads']} of {kv['head_size']}, vocabulary "
        f"{manifest['vocab_size']:,}, context {manifest['limits']['max_context']:,}"
    )
    yield f"compute {manifest['compute']}, weights {manifest['weights']}"
    yield f"KV cache: {kv['bytes_per_token']:,} bytes for each token ({kv['format']})"
    if "form" in manifest:
        yield f"{manifest['form']} form: standard operators alone, which any ONNX Runtime runs"


if __name__ == "__main__":
    sys.exit(main())
