"""Makes a model folder whole or not at all, and gives it its version."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from .error import ExportError

FORMAT = 1


def write(out, force, kind, fill):
    """Makes the folder `out`. `fill` gets an empty folder, writes the files, and returns what pagoda.json is to say.

    Returns what pagoda.json says. `out` may exist only if it is empty, or with `force` if it is a model folder.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file: give the path of a folder that is to be made")
    if out.is_dir() and any(out.iterdir()) and not (force and (out / "pagoda.json").is_file()):
        hint = "add --force to replace it" if (out / "pagoda.json").is_file() else "give another path"
        raise ExportError(f"{out} exists and is not empty: {hint}")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made.chmod(0o755)
        manifest = _sealed(made, kind, fill(made))
        if out.is_dir() and any(out.iterdir()):
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            os.replace(out, old)
            os.replace(made, out)
            shutil.rmtree(old)
        else:
            os.replace(made, out)
        return manifest
    finally:
        shutil.rmtree(made, ignore_errors=True)


def described(path):
    """A file's size and hash as pagoda.json has them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sealed(made, kind, manifest):
    """Writes pagoda.json. The version is its hash with zeros in its place; all files' hashes are in there."""
    text = json.dumps({"format": FORMAT, "kind": kind, "version": "0" * 64} | manifest, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    text = text.replace("0" * 64, version, 1)
    (made / "pagoda.json").write_bytes(text.encode())
    return json.loads(text)
