"""The calbin's first page and the numbers of the format (``docs/calbin.md``).

A file is: one header page, sections in order, the manifest. Sections and manifest start on multiples of `ALIGN`;
the bytes between them are zero and fewer than `ALIGN`; the manifest ends the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from calc.core.errors import FormatError, Problem, VersionError
from calc.core.packing import align

MAGIC = b"\x89CALBIN\n"
"""First 8 bytes. The high bit and the line feed show a transfer in text mode."""

FORMAT = (1, 0)
"""Major and minor that this package writes; it reads every minor of this major."""

RUNTIME_VERSION = (1, 0)
"""Version of the bundled runtime, compared with `Compatibility.runtime_min`."""

DRIVER_VERSION = (1, 0)
"""Version of the driver interface the bundled runtime speaks, compared with `Compatibility.driver_min`."""

KNOWN_FEATURES = 0
"""Required-features bits this reader understands. Calbin 1.0 defines none."""

HEADER_BYTES = 4096
ALIGN = 4096
CHUNK = 64 * 1024 * 1024
"""Bytes of a section that share one chunk digest."""

MANIFEST_MAX_BYTES = 64 * 1024 * 1024
MANIFEST_MAX_VALUES = 1_000_000
MANIFEST_MAX_DEPTH = 16
INT_MAX = 2**62
"""No integer of the manifest is larger in magnitude, so sums of two never leave 64 bits."""

MAX_RANK = 8
MAX_CHIPS = 64
WEIGHT_ALIGN = 64
"""Weights start on multiples of this inside their shard."""
MAX_HOLE = 4096
"""Neighbours inside a shard are closer than this; the bytes between them are zero."""
ENTRY_HOLE = 64
"""Neighbouring arrays and files inside a section are closer than this; the bytes between them are zero."""
MAX_STEPS = 2**40
"""Records a program may execute as far as its constant loop counts tell."""

_STRUCT = struct.Struct("<8sHHIQQQ32s")
FIELD_OFFSETS = {
    "magic": 0,
    "major": 8,
    "minor": 10,
    "header_bytes": 12,
    "features": 16,
    "manifest_offset": 24,
    "manifest_nbytes": 32,
    "manifest_sha256": 40,
    "reserved": 72,
}
"""Byte offset of each header field; `reserved` runs to the end of the page and is zero."""


@dataclass(frozen=True)
class Header:
    """The first page. Offsets and sizes are bytes from the start of the file."""

    version: tuple[int, int]
    manifest_offset: int
    manifest_nbytes: int
    manifest_sha256: bytes
    features: int = 0

    def pack(self) -> bytes:
        """The page's `HEADER_BYTES` bytes."""
        head = _STRUCT.pack(
            MAGIC,
            *self.version,
            HEADER_BYTES,
            self.features,
            self.manifest_offset,
            self.manifest_nbytes,
            self.manifest_sha256,
        )
        return head.ljust(HEADER_BYTES, b"\0")


def chunk_count(nbytes: int) -> int:
    """Chunk digests that a section of `nbytes` bytes has."""
    return -(-nbytes // CHUNK)


def version_text(version: tuple[int, int]) -> str:
    """``1.0`` for ``(1, 0)``."""
    return f"{version[0]}.{version[1]}"


def parse_header(page: bytes, size: int) -> Header:
    """The header of a file of `size` bytes whose first bytes are `page`.

    Args:
        page: the first `HEADER_BYTES` bytes, or fewer if the file is shorter.
        size: the file's size.

    Raises:
        FormatError: CALBIN_SHORT, CALBIN_MAGIC, CALBIN_BYTE_ORDER, CALBIN_VERSION_ZERO, CALBIN_HEADER_BYTES,
            CALBIN_RESERVED, CALBIN_MANIFEST_RANGE, CALBIN_TRUNCATED, CALBIN_TRAILING.
        VersionError: CALBIN_VERSION, CALBIN_FEATURE.
    """
    if size < HEADER_BYTES or len(page) < HEADER_BYTES:
        raise _bad(
            "CALBIN_SHORT",
            "magic",
            "the file is shorter than a header",
            f"at least {HEADER_BYTES} bytes",
            f"{size} bytes",
        )
    magic, major, minor, header_bytes, features, offset, nbytes, digest = _STRUCT.unpack_from(page)
    if magic != MAGIC:
        raise _bad("CALBIN_MAGIC", "magic", "this is not a calbin", MAGIC.hex(), magic.hex())
    if int.from_bytes(page[12:16], "big") == HEADER_BYTES:
        raise _bad("CALBIN_BYTE_ORDER", "header_bytes", "the header's bytes are swapped", "little endian", "big endian")
    if major == 0:
        raise _bad(
            "CALBIN_VERSION_ZERO",
            "major",
            "format 0 was never released",
            version_text(FORMAT),
            version_text((major, minor)),
        )
    if major != FORMAT[0]:
        raise VersionError(
            Problem(
                "CALBIN_VERSION",
                "header.major",
                "the file has another major format version",
                expected=f"{FORMAT[0]}.x",
                got=version_text((major, minor)),
                hint="install a calc that reads this version, or compile the model again with this one",
                offset=FIELD_OFFSETS["major"],
            )
        )
    if header_bytes != HEADER_BYTES:
        raise _bad(
            "CALBIN_HEADER_BYTES", "header_bytes", "the header has another length", str(HEADER_BYTES), str(header_bytes)
        )
    if features & ~KNOWN_FEATURES:
        raise VersionError(
            Problem(
                "CALBIN_FEATURE",
                "header.features",
                "the file requires a feature that this reader does not know",
                expected=f"bits within {KNOWN_FEATURES:#x}",
                got=f"{features:#x}",
                hint=f"install a calc newer than format {version_text(FORMAT)}",
                offset=FIELD_OFFSETS["features"],
            )
        )
    reserved = page[FIELD_OFFSETS["reserved"] : HEADER_BYTES]
    if reserved.count(0) != len(reserved):
        at = FIELD_OFFSETS["reserved"] + next(i for i, b in enumerate(reserved) if b)
        raise FormatError(
            Problem(
                "CALBIN_RESERVED",
                "header.reserved",
                "a reserved byte is set",
                expected="0",
                got=str(page[at]),
                hint=HINT,
                offset=at,
            )
        )
    _check_manifest_range(offset, nbytes, size)
    return Header((major, minor), offset, nbytes, digest, features)


HINT = "the file is damaged or was not written by calc: copy it again or compile again"


def _bad(code: str, name: str, what: str, expected: str, got: str) -> FormatError:
    return FormatError(
        Problem(code, f"header.{name}", what, expected=expected, got=got, hint=HINT, offset=FIELD_OFFSETS[name])
    )


def _check_manifest_range(offset: int, nbytes: int, size: int) -> None:
    if not 0 < nbytes <= MANIFEST_MAX_BYTES:
        raise _bad(
            "CALBIN_MANIFEST_RANGE",
            "manifest_nbytes",
            "the manifest's length is out of range",
            f"1 to {MANIFEST_MAX_BYTES}",
            str(nbytes),
        )
    if offset < HEADER_BYTES or offset != align(offset, ALIGN):
        raise _bad(
            "CALBIN_MANIFEST_RANGE",
            "manifest_offset",
            "the manifest does not start on a page after the header",
            f"a multiple of {ALIGN}, at least {HEADER_BYTES}",
            str(offset),
        )
    if offset + nbytes > size:
        raise _bad(
            "CALBIN_TRUNCATED",
            "manifest_offset",
            "the manifest ends past the end of the file",
            f"a file of {offset + nbytes} bytes",
            f"{size} bytes",
        )
    if offset + nbytes < size:
        raise FormatError(
            Problem(
                "CALBIN_TRAILING",
                "file",
                "bytes follow the manifest",
                expected=f"a file of {offset + nbytes} bytes",
                got=f"{size} bytes",
                hint=HINT,
                offset=offset + nbytes,
            )
        )
