"""How a 2-D weight ``[rows, cols]`` lies in a shard as packed GEMM tiles (``docs/calbin.md``, "Packed tiles").

`TileFormat` says what a tile's fields are, `TileLayout` where they lie for one weight, `pack_codes` writes them. The
layout is shared by the compiler that writes tiles, the simulator that reads them and the reader that checks them; the
simulator decodes by its own code. A tile holds `n` consecutive rows, all columns::

    codes    n rows of `code_row_bytes`; columns past `cols` up to `cols_padded` are zero
    scales   w8: n f32, one per row; w4, w4z: n rows of `groups` bf16; bf16: none
    zeros    w4z: n rows of ceil(groups / 2) bytes, a 4-bit zero point per group, the even group in the low nibble
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
from calc.core.isa import DType, Tile

TILE_ALIGN = 64
"""Alignment in bytes of a tile, and of the end of its scales and of its bias."""

COLS_ALIGN = 32
"""`cols_padded` is a multiple of this many columns. It and `TILE_ALIGN` are the format's, the same for every target:
tiles are read by their layout alone."""

GROUPS = (32, 64, 128)
"""Group sizes along the columns of formats with a scale per group."""


@dataclass(frozen=True)
class TileFormat:
    """The fields of a packed tile.

    Attributes:
        name: as in the manifest.
        tile: as in GEMM records.
        dtype: element type of GEMM's operand b.
        bits: size of a code.
        scale: type of a scale.
        per: what has a scale of its own: a row, or a group of columns of a row.
        zero_point: whether codes are unsigned, with a 4-bit zero point per group.
    """

    name: str
    tile: Tile
    dtype: DType
    bits: int
    scale: Literal["f32", "bf16"] | None = None
    per: Literal["row", "group"] | None = None
    zero_point: bool = False

    @property
    def groups(self) -> tuple[int, ...]:
        """Group sizes it allows: 0 where it has no groups."""
        return GROUPS if self.per == "group" else (0,)

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale."""
        return {None: 0, "bf16": 2, "f32": 4}[self.scale]


BF16 = TileFormat("bf16", Tile.BF16, DType.BF16, 16)
W8 = TileFormat("w8", Tile.W8, DType.I8, 8, "f32", "row")
W4 = TileFormat("w4", Tile.W4, DType.U8, 4, "bf16", "group")
W4Z = TileFormat("w4z", Tile.W4Z, DType.U8, 4, "bf16", "group", zero_point=True)

FORMATS = {f.name: f for f in (BF16, W8, W4, W4Z)}
"""Every tile format by name."""


def align(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True)
class TileLayout:
    """Where codes, scales and bias of one weight's tiles are. Offsets and sizes are bytes.

    Attributes:
        fmt: name of the tile format.
        rows: N, output channels.
        cols: K, logical columns.
        tile_rows: rows of a full tile; the last tile may be short.
        group: columns per scale where the format has groups (one of `GROUPS`), else 0. The last may be short.
        bias: whether each tile carries a f32 bias per row.

    Raises:
        InternalError: dimensions below 1, or a group that does not fit the format.
    """

    fmt: str
    rows: int
    cols: int
    tile_rows: int
    group: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.fmt not in FORMATS:
            raise InternalError(f"no packed tile format {self.fmt!r}")
        if min(self.rows, self.cols, self.tile_rows) < 1:
            raise InternalError(f"a tile layout with a dimension below 1: {self}")
        if self.group not in self.format.groups:
            raise InternalError(f"group {self.group} does not fit format {self.fmt}")

    @property
    def format(self) -> TileFormat:
        """The tiles' fields."""
        return FORMATS[self.fmt]

    @property
    def cols_padded(self) -> int:
        """Kp: columns a code row holds."""
        return align(self.cols, COLS_ALIGN)

    @property
    def code_row_bytes(self) -> int:
        """Distance between code rows."""
        return self.cols_padded * self.format.bits // 8

    @property
    def groups(self) -> int:
        """Scales per row: none, one, or ``ceil(cols / group)``."""
        return {None: 0, "row": 1, "group": -(-self.cols // (self.group or 1))}[self.format.per]

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
        return n * self.groups * self.format.scale_itemsize

    def zeros_offset(self, n: int) -> int:
        """Start of the zero points, from the start of a tile of `n` rows: right after the scales."""
        return self.scales_offset(n) + self.scales_bytes(n)

    def zeros_bytes(self, n: int) -> int:
        """Size of the zero points of a tile of `n` rows, without padding."""
        return n * -(-self.groups // 2) if self.format.zero_point else 0

    def bias_offset(self, n: int) -> int:
        """Start of the bias, from the start of a tile of `n` rows (where the tile ends if it has no bias)."""
        return align(self.zeros_offset(n) + self.zeros_bytes(n), TILE_ALIGN)

    def tile_bytes(self, n: int) -> int:
        """Size of a tile of `n` rows, padding included."""
        return self.bias_offset(n) + (align(4 * n, TILE_ALIGN) if self.bias else 0)


@dataclass(frozen=True)
class Codes:
    """A weight ``[n, K]`` as a tile stores it.

    Attributes:
        values: codes ``[n, K]``: bf16, int8 (w8; w4 in -8..7) or uint8 (w4z in 0..15).
        scales: f32 ``[n]``, bf16 ``[n, groups]``, or None.
        zeros: zero points uint8 ``[n, groups]`` in 0..15, or None.
    """

    values: NDArray[np.generic]
    scales: NDArray[np.generic] | None = None
    zeros: NDArray[np.uint8] | None = None


def pack_codes(layout: TileLayout, codes: Codes, bias: NDArray[np.float32] | None) -> bytes:
    """One tile's bytes.

    Args:
        layout: of the weight.
        codes: of the tile's rows.
        bias: ``[n]`` where the layout has one.

    Raises:
        InternalError: scales, zero points or a bias where the layout has none, or the other way round; a code that does
            not fit.
    """
    fmt = layout.format
    given = (codes.scales is not None, codes.zeros is not None, bias is not None)
    if given != (fmt.scale is not None, fmt.zero_point, layout.bias):
        raise InternalError(f"scales, zero points and bias {given} do not fit a packed tile's layout: {layout}")
    n, k = codes.values.shape
    out = np.zeros(layout.tile_bytes(n), np.uint8)
    grid = np.zeros((n, layout.cols_padded), codes.values.dtype)
    grid[:, :k] = codes.values
    rows = out[: n * layout.code_row_bytes].reshape(n, layout.code_row_bytes)
    if fmt.bits == 4:
        rows[:] = pack_uint4(grid) if fmt.zero_point else pack_int4(grid)
    else:
        rows[:] = grid.view(np.uint8)
    fields = [(layout.scales_offset(n), codes.scales), (layout.bias_offset(n), bias)]
    if codes.zeros is not None:
        even = np.pad(codes.zeros, ((0, 0), (0, codes.zeros.shape[1] % 2)))
        fields.append((layout.zeros_offset(n), pack_uint4(even)))
    for at, field in fields:
        if field is not None:
            raw = np.ascontiguousarray(field).view(np.uint8).reshape(-1)
            out[at : at + raw.size] = raw
    return out.tobytes()


def pack_int4(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two's complement int4 codes, two per byte, the even column in the low nibble.

    Args:
        codes: ``[n, K]`` values in -8..7, K even.

    Returns:
        ``[n, K // 2]`` bytes.

    Raises:
        InternalError: a code outside int4 or an odd number of columns.
    """
    if codes.size and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise InternalError("an int4 code lies outside -8..7")
    return pack_uint4(codes.view(np.uint8) & np.uint8(15))


def pack_uint4(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unsigned 4-bit codes, two per byte, the even column in the low nibble.

    Args:
        codes: ``[n, K]`` values in 0..15, K even.

    Returns:
        ``[n, K // 2]`` bytes.

    Raises:
        InternalError: a code outside 0..15 or an odd number of columns.
    """
    if codes.shape[-1] % 2:
        raise InternalError(f"4-bit codes need an even number of columns, not {codes.shape[-1]}")
    if codes.size and int(codes.max()) > 15:
        raise InternalError("a 4-bit code lies outside 0..15")
    return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << 4), dtype=np.uint8)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The int4 codes of `pack_int4`: ``[n, K // 2]`` bytes to ``[n, K]`` values in -8..7."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.int8)
    out[..., 0::2] = (packed << 4).view(np.int8) >> 4
    out[..., 1::2] = packed.view(np.int8) >> 4
    return out
