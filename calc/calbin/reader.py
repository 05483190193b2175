"""Opens a calbin: lazily, through one file descriptor and one read-only map."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from calc.calbin.checks.digests import check_section
from calc.calbin.layout import HEADER_BYTES, parse_header
from calc.calbin.manifest import Manifest, Section
from calc.calbin.validate import validate
from calc.core.errors import DiskError, FormatError, Problem, RuntimeFault
from calc.core.isa import RECORD
from calc.core.tensors import DTYPES

Progress = Callable[[str, int, int], None]
"""Called with a section's name, the bytes done and the bytes to do."""


class Calbin:
    """An open, validated calbin. What it answers are views of the map: nothing is copied, no weight is read early.

    Attributes:
        path: where it was opened.
        manifest: the validated manifest.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._map: mmap.mmap | None = mapped
        self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        self._sections = {s.name: s for s in manifest.sections}

    def __enter__(self) -> Calbin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Views that are still in use stay valid; the map ends with the last of them."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self._map = None

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._all().size

    def section(self, name: str) -> memoryview:
        """A section's bytes.

        Raises:
            RuntimeFault: CALBIN_NO_SUCH, CALBIN_CLOSED.
        """
        return self._range(self._section(name)).data

    def program(self, submodel: str, chip: int) -> NDArray[np.void]:
        """The records one chip runs in a sub-model: ``[instructions]`` of `RECORD`.

        Raises:
            RuntimeFault: CALBIN_NO_SUCH, CALBIN_CLOSED.
        """
        for sub in self.manifest.submodels:
            for part in sub.chip_map:
                if sub.name == submodel and part.chip == chip:
                    return self._range(self._section(part.program)).view(RECORD)
        raise self._no_such("program", f"{submodel} on chip {chip}", [s.name for s in self.manifest.submodels])

    def shard(self, chip: int) -> NDArray[np.uint8]:
        """One chip's weights: ``[nbytes]`` uint8, to be placed at the shard's `dram_offset`.

        Raises:
            RuntimeFault: CALBIN_NO_SUCH, CALBIN_CLOSED.
        """
        for shard in self.manifest.shards:
            if shard.chip == chip:
                return self._range(self._section(shard.section))[: shard.nbytes]
        raise self._no_such("shard", f"chip {chip}", [str(s.chip) for s in self.manifest.shards])

    def array(self, name: str) -> NDArray[np.generic]:
        """A golden array in its own dtype (bf16 through ml_dtypes) and shape.

        Raises:
            RuntimeFault: CALBIN_NO_SUCH, CALBIN_CLOSED.
        """
        golden = self.manifest.golden
        for entry in self.manifest.arrays if golden is not None else ():
            if entry.name == name and golden is not None:
                data = self._range(self._section(golden.section))[entry.offset : entry.offset + entry.nbytes]
                return data.view(DTYPES[entry.dtype]).reshape(entry.shape)
        raise self._no_such("golden array", name, [a.name for a in self.manifest.arrays])

    def file(self, name: str) -> bytes:
        """A file's content (the tokenizer, a graph).

        Raises:
            RuntimeFault: CALBIN_NO_SUCH, CALBIN_CLOSED.
        """
        for entry in self.manifest.files:
            if entry.name == name:
                return self._range(self._section(entry.section))[entry.offset : entry.offset + entry.nbytes].tobytes()
        raise self._no_such("file", name, [f.name for f in self.manifest.files])

    def verify_digests(self, progress: Progress | None = None) -> None:
        """Read everything and compare each section's and each chunk's digest.

        Args:
            progress: told after each chunk.

        Raises:
            FormatError: CALBIN_DIGEST, one problem for each damaged chunk, with section, chunk and offset.
            RuntimeFault: CALBIN_CLOSED.
        """
        data = self._all().data
        done, total = 0, sum(s.nbytes for s in self.manifest.sections)
        problems: list[Problem] = []
        for section in self.manifest.sections:
            for nbytes, found in check_section(data, section):
                problems += found
                done += nbytes
                if progress is not None:
                    progress(section.name, done, total)
        if problems:
            raise FormatError(problems)

    def _all(self) -> NDArray[np.uint8]:
        if self._map is None:
            raise RuntimeFault(
                Problem("CALBIN_CLOSED", str(self.path), "the calbin is used after close()", hint="open it again")
            )
        return self._bytes

    def _range(self, section: Section) -> NDArray[np.uint8]:
        return self._all()[section.offset : section.offset + section.nbytes]

    def _section(self, name: str) -> Section:
        if name not in self._sections:
            raise self._no_such("section", name, list(self._sections))
        return self._sections[name]

    def _no_such(self, kind: str, name: str, known: list[str]) -> RuntimeFault:
        return RuntimeFault(
            Problem(
                "CALBIN_NO_SUCH",
                str(self.path),
                f"the calbin has no such {kind}",
                expected=", ".join(known[:20]) or "none at all",
                got=name,
                hint="calc inspect lists what the file holds",
            )
        )


def open_calbin(path: Path | str, *, deep: bool = False) -> Calbin:
    """Open and validate a calbin. Header, manifest and programs are checked; no page of a shard is read.

    The path is resolved once. What was checked is what is mapped, even if another file takes its name meanwhile.

    Args:
        path: the file.
        deep: also read the shards: every digest, every scale.

    Raises:
        FormatError: CALBIN_NOT_FOUND, CALBIN_NOT_A_FILE, CALBIN_CHANGED, or the file is damaged.
        VersionError: it needs another reader, runtime, driver or ISA.
        DiskError: DISK_READ.
    """
    path = Path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise _cannot_open(path, e) from e
    except ValueError as e:
        raise FormatError(
            Problem("CALBIN_NOT_FOUND", repr(path), "not a path", got=str(e), hint="check the path")
        ) from e
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            what = "a calbin is a regular file, this is something else"
            raise FormatError(
                Problem("CALBIN_NOT_A_FILE", str(path), what, got=stat.filemode(before.st_mode), hint="check the path")
            )
        mapped = _map(path, descriptor, before.st_size)
        mapped.madvise(mmap.MADV_RANDOM)
        manifest = validate(memoryview(mapped), before.st_size, deep=deep)
        mapped.madvise(mmap.MADV_NORMAL)
        after = os.fstat(descriptor)
    except OSError as e:
        raise _cannot_open(path, e) from e
    finally:
        os.close(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _changed(path)
    return Calbin(path, mapped, manifest)


def _map(path: Path, descriptor: int, size: int) -> mmap.mmap:
    if size < HEADER_BYTES:
        parse_header(os.pread(descriptor, size, 0), size)
    try:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    except ValueError as e:
        # The file shrank after fstat.
        raise _changed(path) from e


def _changed(path: Path) -> FormatError:
    return FormatError(
        Problem(
            "CALBIN_CHANGED",
            str(path),
            "the file was written to while it was being opened",
            hint="wait until its writer has finished, then open it again; replace a calbin by rename, never in place",
        )
    )


def _cannot_open(path: Path, e: OSError) -> FormatError | DiskError:
    got = e.strerror or str(e)
    if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return FormatError(
            Problem("CALBIN_NOT_FOUND", str(path), "there is no such file", got=got, hint="check the path")
        )
    if e.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
        what = "a calbin is a regular file, this is something else"
        return FormatError(Problem("CALBIN_NOT_A_FILE", str(path), what, got=got, hint="check the path"))
    hint = "check the file's permissions and the disk's health"
    return DiskError(Problem("DISK_READ", str(path), "the file cannot be read", got=got, hint=hint))
