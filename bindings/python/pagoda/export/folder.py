"""Makes a model folder whole or not at all, and gives it its version."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from .error import ExportError

FORMAT, MANIFEST = 1, "pagoda.json"


def write(out, force, kind, fill):
    """Makes the folder `out`. `fill` gets an empty folder, writes the files, and returns what pagoda.json is to say.

    Returns what pagoda.json says. `out` may exist only if it is empty, or with `force` if it is a model folder.
    """
    given, out = out, Path(out).resolve()
    if out.exists() and not out.is_dir():
        raise ExportError(f"{given} is a file: give the path of a folder that is to be made")
    if out.is_dir() and any(out.iterdir()) and not (force and (out / MANIFEST).is_file()):
        hint = "add --force to replace it" if (out / MANIFEST).is_file() else "give another path"
        raise ExportError(f"{given} exists and is not empty: {hint}")
    with _parents(out):
        # A mounted folder, and the one that the process is in, can not be replaced: their contents are.
        inside = out.is_dir() and (os.path.ismount(out) or out == Path.cwd())
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out if inside else out.parent))
        try:
            made.chmod(0o777 & ~_umask())
            manifest = _sealed(made, kind, fill(made))
            (_replace_contents if inside else _replace)(out, made)
            return manifest
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _parents(out):
    """Makes the folders above `out`; those that are new go again if the work fails."""
    new = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


def _replace(out, made):
    if not out.is_dir():
        os.replace(made, out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    os.replace(out, old)
    try:
        os.replace(made, out)
    except BaseException:
        os.replace(old, out)
        raise
    shutil.rmtree(old)


def _replace_contents(out, made):
    """pagoda.json goes first and comes last: without it this is no model folder."""
    (out / MANIFEST).unlink(missing_ok=True)
    for entry in out.iterdir():
        if entry != made:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in sorted(made.iterdir(), key=lambda entry: entry.name == MANIFEST):
        os.replace(entry, out / entry.name)


def _umask():
    # There is no way to ask for it alone.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def described(path):
    """A file's size and hash as pagoda.json has them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sealed(made, kind, manifest):
    """Writes pagoda.json. The version is its hash with zeros in its place; all files' hashes are in there."""
    text = json.dumps({"format": FORMAT, "kind": kind, "version": "0" * 64} | manifest, indent=2) + "\n"
    version = hashlib.sha256(text.encode()).hexdigest()
    text = text.replace("0" * 64, version, 1)
    (made / MANIFEST).write_bytes(text.encode())
    return json.loads(text)
