"""python -m pagoda.export checkpoint config.json out_dir"""

import argparse
import json
import sys

from . import ExportError, export
from .model import MAX_MODEL_BYTES


def main(arguments=None):
    parser = argparse.ArgumentParser(
        "python -m pagoda.export", description="Makes a model folder that Pagoda serves out of a trained checkpoint."
    )
    weights = "the weights: a .safetensors file, or a .pt or .pth file if torch is installed"
    parser.add_argument("checkpoint", help=weights)
    parser.add_argument("config", help="what the model is: a JSON file, described in sdk/docs/model-folder.md")
    parser.add_argument("out_dir", help="the folder to make")
    parser.add_argument("--force", action="store_true", help="replace out_dir if it is a model folder already")
    parser.add_argument("--json", action="store_true", help="print what pagoda.json says")
    beside = "put the weights into a file beside model.onnx if they are more than this; default: about 2 GiB"
    parser.add_argument("--max-model-bytes", type=int, default=MAX_MODEL_BYTES, metavar="BYTES", help=beside)
    given = parser.parse_args(arguments)
    try:
        manifest = export(given.checkpoint, given.config, given.out_dir, given.force, given.max_model_bytes)
    except (ExportError, OSError) as error:
        print(f"pagoda.export: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(manifest))
        return 0
    kv, size = manifest["kv"], sum(file["bytes"] for file in manifest["files"].values())
    print(f"{given.out_dir}: version {manifest['version'][:16]}, {size:,} bytes in {len(manifest['files'])} files")
    tasks = ", ".join(task["name"] for task in manifest["tasks"])
    print(f"tasks {tasks}; {kv['layers']} layers, {kv['heads']} heads of {kv['head_size']}")
    if kv["cache"]:
        print(f"KV cache: {kv['bytes_per_token']:,} bytes for each row of history")
    else:
        print(f"no KV cache: {kv['reason']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
