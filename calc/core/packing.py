"""How a 2-D weight ``[rows, cols]`` lies in a shard as packed GEMM tiles (``docs/calbin.md``, "Packed tiles").

Pure arithmetic, shared by the compiler that writes tiles, the simulator that reads them and the reader that checks
them. A tile holds `n` consecutive rows, all columns::

    codes    n rows of `code_row_bytes`; columns past `cols` up to `cols_padded` are zero
    scales   w8: n f32, one per row; w4: n rows of `groups` bf16; bf16: none
             zero padding up to a multiple of 64
    bias     n f32 where the weight has a bias, zero padding up to a multiple of 64

Every tile starts on a multiple of 64 bytes and all tiles are `tile_stride` apart. The last tile is compact: its
scales and bias follow its own number of rows. Multi-byte values are little endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import InternalError

PackedFormat = Literal["bf16", "w8", "w4"]

TILE_ALIGN = 64
"""Alignment in bytes of a tile, and of the end of its scales and of its bias."""

COLS_ALIGN = 32
"""`cols_padded` is a multiple of this many columns."""

W4_GROUPS = (32, 64, 128)
"""Group sizes along the columns that w4 allows."""


def align(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True)
class TileLayout:
    """Where codes, scales and bias of one weight's tiles are. Offsets and sizes are bytes.

    Attributes:
        fmt: code format; w8 is int8 with a scale per row, w4 is int4 with a scale per row and group of columns.
        rows: N, output channels.
        cols: K, logical columns.
        tile_rows: rows of a full tile; the last tile may be short.
        group: columns per scale for w4 (one of `W4_GROUPS`), else 0. The last group may be short.
        bias: whether each tile carries a f32 bias per row.

    Raises:
        InternalError: dimensions below 1, or a group that does not fit the format.
    """

    fmt: PackedFormat
    rows: int
    cols: int
    tile_rows: int
    group: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.fmt not in ("bf16", "w8", "w4"):
            raise InternalError(f"no packed tile format {self.fmt!r}")
        if min(self.rows, self.cols, self.tile_rows) < 1:
            raise InternalError(f"a tile layout with a dimension below 1: {self}")
        if (self.group in W4_GROUPS) != (self.fmt == "w4") or (self.fmt != "w4" and self.group != 0):
            raise InternalError(f"group {self.group} does not fit format {self.fmt}")

    @property
    def cols_padded(self) -> int:
        """Kp: columns a code row holds."""
        return align(self.cols, COLS_ALIGN)

    @property
    def code_row_bytes(self) -> int:
        """Distance between code rows."""
        if self.fmt == "bf16":
            return 2 * self.cols_padded
        return self.cols_padded if self.fmt == "w8" else self.cols_padded // 2

    @property
    def groups(self) -> int:
        """Scales per row: 0 for bf16, 1 for w8, ``ceil(cols / group)`` for w4."""
        if self.fmt == "w4":
            return -(-self.cols // self.group)
        return 1 if self.fmt == "w8" else 0

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale: f32 for w8, bf16 for w4, 0 for bf16."""
        return {"bf16": 0, "w8": 4, "w4": 2}[self.fmt]

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.rows // self.tile_rows)

    @property
    def tile_stride(self) -> int:
        """Distance between tiles: the size of a full one."""
        return self.tile_bytes(self.tile_rows)

    @property
    def nbytes(self) -> int:
        """Size of the whole weight, a multiple of 64."""
        last = self.tiles - 1
        return last * self.tile_stride + self.tile_bytes(self.rows_of(last))

    def rows_of(self, tile: int) -> int:
        """Rows in tile number `tile`."""
        return min(self.tile_rows, self.rows - tile * self.tile_rows)

    def tile_offset(self, tile: int) -> int:
        """Start of tile number `tile`, from the weight's start."""
        return tile * self.tile_stride

    def scales_offset(self, n: int) -> int:
        """Start of the scales, from the start of a tile of `n` rows."""
        return n * self.code_row_bytes

    def scales_bytes(self, n: int) -> int:
        """Size of the scales of a tile of `n` rows, without padding."""
        return n * self.groups * self.scale_itemsize

    def bias_offset(self, n: int) -> int:
        """Start of the bias, from the start of a tile of `n` rows (where the tile ends if it has no bias)."""
        return align(self.scales_offset(n) + self.scales_bytes(n), TILE_ALIGN)

    def tile_bytes(self, n: int) -> int:
        """Size of a tile of `n` rows, padding included."""
        return self.bias_offset(n) + (align(4 * n, TILE_ALIGN) if self.bias else 0)


def pack_int4(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two's complement int4 codes, two per byte, the even column in the low nibble.

    Args:
        codes: ``[n, K]`` values in -8..7, K even.

    Returns:
        ``[n, K // 2]`` bytes.

    Raises:
        InternalError: a code outside int4 or an odd number of columns.
    """
    if codes.shape[-1] % 2:
        raise InternalError(f"int4 codes need an even number of columns, not {codes.shape[-1]}")
    if codes.size and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise InternalError("an int4 code lies outside -8..7")
    nibbles = codes.view(np.uint8) & 0x0F
    return np.asarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), dtype=np.uint8)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The int4 codes of `pack_int4`: ``[n, K // 2]`` bytes to ``[n, K]`` values in -8..7."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.int8)
    out[..., 0::2] = (packed << 4).view(np.int8) >> 4
    out[..., 1::2] = packed.view(np.int8) >> 4
    return out
