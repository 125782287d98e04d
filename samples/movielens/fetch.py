"""Fetches MovieLens-100K: python fetch.py target/demo/movielens/data

The data is in the wheel of the package recbole, which pip finds by its name. Needs only Python and pip. The data is for
research, and we may not distribute it (README.md): so it is fetched, and never committed.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "recbole==1.2.0"
FOLDER = "recbole/dataset_example/ml-100k/"
# SHA-256 of the files from the wheel.
FILES = {
    "ml-100k.inter": "d4832a77576cb5a480517a9554eef1872331f1ba780ddcd3f4bf956d562ccfc2",
    "ml-100k.item": "d464074b022a10862d32e8885d298ad09464733be6effaf4bd26761995afea38",
}


class FetchError(Exception):
    """Says what went wrong and what to do."""


def fetch(out, package=PACKAGE, files=FILES):
    """Puts the files into the folder `out`, unless they are there already and intact."""
    if all((out / name).is_file() and digest((out / name).read_bytes()) == sha for name, sha in files.items()):
        return False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        unpack(download(package, Path(folder)), out, files)
    return True


def download(package, folder):
    """The path of the package's wheel, freshly downloaded into the folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Long enough for a slow connection, and short enough to report a missing one soon.
    command += ["--only-binary", ":all:", "--timeout", "30", "--retries", "1", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(
            f"pip could not download {package} ({last}). Is the package registry reachable from here? If not, put "
            f"{' and '.join(FILES)}, which are in that package's wheel under {FOLDER}, into the folder yourself"
        )
    return next(folder.glob("*.whl"))


def unpack(wheel, out, files=FILES):
    """Takes the files out of the wheel, each checked before it is written."""
    with zipfile.ZipFile(wheel) as archive:
        for name, sha in files.items():
            try:
                content = archive.read(FOLDER + name)
            except KeyError:
                raise FetchError(f"{wheel.name} has no {FOLDER}{name}: it is not the package that was asked for")
            if digest(content) != sha:
                raise FetchError(
                    f"{name} in {wheel.name} has the SHA-256 {digest(content)}, but {sha} was expected: it is not "
                    "what the model was trained on, and is left where it is"
                )
            partial = out / f".{name}.partial"
            partial.write_bytes(content)
            partial.replace(out / name)


def digest(content):
    return hashlib.sha256(content).hexdigest()


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Fetches MovieLens-100K out of the wheel of the package recbole.")
    parser.add_argument("out", type=Path, help="the folder to put ml-100k.inter and ml-100k.item into")
    given = parser.parse_args(arguments)
    try:
        fresh = fetch(given.out)
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    print(
        f"MovieLens-100K {'fetched into' if fresh else 'is already in'} {given.out} (for research use: see README.md)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
