"""Pack: weights to the bytes of a shard, a tile at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import InternalError
from calc.core.numerics import quant_groups_int4, quant_rows_int8, to_bf16
from calc.core.packing import TileLayout, pack_int4

F32 = NDArray[np.float32]


def pack_tile(layout: TileLayout, values: F32, bias: F32 | None) -> bytes:
    """One tile: rows ``values`` [n, K] and their bias [n] in the layout's format.

    Raises:
        InternalError: a bias where the layout has none, or the other way round.
    """
    if (bias is not None) != layout.bias:
        raise InternalError("a packed tile's bias does not fit its layout")
    n, k = values.shape
    out = np.zeros(layout.tile_bytes(n), np.uint8)
    codes = np.zeros((n, layout.cols_padded), np.int8)
    rows = out[: n * layout.code_row_bytes].reshape(n, layout.code_row_bytes)
    at = layout.scales_offset(n)
    if layout.fmt == "bf16":
        rows[:, : 2 * k] = to_bf16(values).view(np.uint8)
    elif layout.fmt == "w8":
        codes[:, :k], scale = quant_rows_int8(values)
        rows[:] = codes.view(np.uint8)
        out[at : at + 4 * n] = scale.view(np.uint8)
    else:
        codes[:, :k], scales = quant_groups_int4(values, layout.group)
        rows[:] = pack_int4(codes)
        raw = np.ascontiguousarray(scales).view(np.uint8).reshape(-1)
        out[at : at + raw.size] = raw
    if bias is not None:
        at = layout.bias_offset(n)
        out[at : at + 4 * n] = np.ascontiguousarray(bias, np.float32).view(np.uint8)
    return out.tobytes()


def pack_rows(layout: TileLayout, values: F32, bias: F32 | None = None) -> bytes:
    """A whole weight that is already in memory: its tiles one after another."""
    cuts = [t * layout.tile_rows for t in range(layout.tiles)] + [layout.rows]
    return b"".join(pack_tile(layout, values[a:b], None if bias is None else bias[a:b]) for a, b in pairwise(cuts))


def pack_plain(values: NDArray[np.generic]) -> bytes:
    """A plain f32 array."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()
