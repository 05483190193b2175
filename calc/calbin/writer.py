"""Writes a calbin: sections stream out, then the manifest, then the header; the file appears whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from calc.calbin.codec import encode
from calc.calbin.layout import ALIGN, CHUNK, FORMAT, HEADER_BYTES, MANIFEST_MAX_BYTES, Header
from calc.calbin.manifest import Manifest, Section, SectionKind
from calc.calbin.validate import validate
from calc.core.errors import CalcError, DiskError, InternalError, Problem
from calc.core.packing import align

Writable = bytes | bytearray | memoryview | NDArray[np.generic]
"""What a section takes: an array is written row-major, little endian."""

_BUFFER_BYTES = 1 << 20


class SectionWriter:
    """Appends to the section that is open. Offsets are bytes from the section's start."""

    def __init__(self, out: CalbinWriter, name: str, kind: SectionKind, offset: int) -> None:
        self._out = out
        self._name = name
        self._kind: SectionKind = kind
        self._offset = offset
        self._nbytes = 0
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunks: list[str] = []

    def tell(self) -> int:
        """Bytes written so far: where the next write lands."""
        return self._nbytes

    def write(self, data: Writable) -> int:
        """Append `data` and answer where it starts.

        Raises:
            DiskError: DISK_FULL, DISK_WRITE.
        """
        start = self._nbytes
        view = _bytes_of(data)
        while len(view):
            part = view[: CHUNK - self._nbytes % CHUNK]
            self._out._write(part)
            self._whole.update(part)
            self._chunk.update(part)
            self._nbytes += len(part)
            if self._nbytes % CHUNK == 0:
                self._end_chunk()
            view = view[len(part) :]
        return start

    def align(self, to: int) -> int:
        """Append zero bytes up to a multiple of `to` and answer the position."""
        self.write(bytes(align(self._nbytes, to) - self._nbytes))
        return self._nbytes

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()

    def _finish(self) -> Section:
        if self._kind == "weights":
            self.align(ALIGN)
        if self._nbytes % CHUNK:
            self._end_chunk()
        return Section(
            name=self._name,
            kind=self._kind,
            offset=self._offset,
            nbytes=self._nbytes,
            sha256=self._whole.hexdigest(),
            chunks=tuple(self._chunks),
        )


class CalbinWriter:
    """Writes one calbin next to its final place and renames it there when `finish` has succeeded.

    ::

        with CalbinWriter(path) as w:
            with w.section("weights.0", "weights") as s:
                offset = s.write(data)
            w.finish(lambda sections: Manifest(..., sections=sections))

    The bytes depend on what is written alone. A `weights` section is padded with zeros to whole pages, so that no page
    holds weights and something else. If the block raises, nothing is left behind.

    Args:
        path: the file to make; it is replaced if it exists.
        reserve: bytes the file will need, where known; checked against the free space before anything is written.

    Raises:
        DiskError: DISK_FULL, DISK_WRITE.
    """

    def __init__(self, path: Path, reserve: int = 0) -> None:
        self.path = Path(path)
        self._reserve = reserve
        self._temp = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
        self._file: BinaryIO | None = None
        self._position = 0
        self._open: SectionWriter | None = None
        self._sections: list[Section] = []
        self._done = False

    def __enter__(self) -> CalbinWriter:
        with self._disk(self._reserve):
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if self._reserve > shutil.disk_usage(self.path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            descriptor = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(descriptor, "w+b", buffering=_BUFFER_BYTES)
            self._write(bytes(HEADER_BYTES))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self._abandon()
            if kind is None:
                raise InternalError(f"{self.path}: the writer was left without finish()")

    @contextmanager
    def section(self, name: str, kind: SectionKind) -> Iterator[SectionWriter]:
        """Open the next section; only one is open at a time. Names are unique.

        Raises:
            InternalError: another section is open, or has this name.
            DiskError: DISK_FULL, DISK_WRITE.
        """
        if self._open is not None or self._done:
            raise InternalError(f"section {name!r} was opened inside another one or after finish()")
        if any(s.name == name for s in self._sections):
            raise InternalError(f"two sections are named {name!r}")
        self._pad()
        self._open = SectionWriter(self, name, kind, self._position)
        yield self._open
        self._sections.append(self._open._finish())
        self._open = None

    def finish(self, build: Callable[[tuple[Section, ...]], Manifest]) -> Manifest:
        """Write manifest and header, check what was written and put the file in its place.

        Args:
            build: makes the manifest from the sections' descriptions, in the order they were written.

        Raises:
            InternalError: the result would not be a valid calbin; the text lists why.
            DiskError: DISK_FULL, DISK_WRITE.
        """
        if self._open is not None or self._done or self._file is None:
            raise InternalError("finish() inside a section, or twice")
        manifest = build(tuple(self._sections))
        raw = encode(manifest.model_dump())
        if len(raw) > MANIFEST_MAX_BYTES:
            raise InternalError(f"a manifest of {len(raw)} bytes exceeds {MANIFEST_MAX_BYTES}")
        self._pad()
        header = Header(FORMAT, self._position, len(raw), hashlib.sha256(raw).digest())
        self._write(raw)
        with self._disk(0):
            self._file.flush()
            os.pwrite(self._file.fileno(), header.pack(), 0)
            os.fsync(self._file.fileno())
            self._check()
            self._file.close()
            self._temp.replace(self.path)
            self._done = True
            _sync_directory(self.path.parent)
        return manifest

    def _check(self) -> None:
        if self._file is None:
            raise InternalError("the file is not open")
        view = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            validate(view, len(view), deep=False)
        except CalcError as e:
            raise InternalError(f"the compiler made a calbin that no reader would take:\n{e}") from e

    def _pad(self) -> None:
        self._write(bytes(align(self._position, ALIGN) - self._position))

    def _write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            raise InternalError("the writer is used outside its with block")
        with self._disk(len(data)):
            self._file.write(data)
        self._position += len(data)

    def _abandon(self) -> None:
        if self._file is not None:
            # Closing flushes what is buffered, which may fail again on the disk that is full.
            with suppress(OSError):
                self._file.close()
            with suppress(FileNotFoundError):
                self._temp.unlink()

    @contextmanager
    def _disk(self, more: int) -> Iterator[None]:
        """Turn the operating system's refusals into `DiskError`."""
        try:
            yield
        except OSError as e:
            raise DiskError(self._problem(e, more)) from e

    def _problem(self, e: OSError, more: int) -> Problem:
        needed = self._position + more
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            try:
                free = f"{shutil.disk_usage(self.path.parent).free} bytes are free"
            except OSError:
                free = "the free space cannot be read"
            return Problem(
                "DISK_FULL",
                str(self.path),
                "there is no room for the calbin",
                expected=f"room for at least {needed} bytes",
                got=f"{free}; {e.strerror}",
                hint="free some space, lift the quota or file size limit, or write to another disk",
            )
        return Problem(
            "DISK_WRITE",
            str(self.path),
            "the calbin cannot be written",
            got=e.strerror or str(e),
            hint="check that the directory exists and may be written to",
        )


def _bytes_of(data: Writable) -> memoryview:
    if isinstance(data, np.ndarray):
        little = data.astype(data.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
