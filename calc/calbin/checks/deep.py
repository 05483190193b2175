"""What needs the shards' bytes: scales, biases and what lies between weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from calc.calbin.checks.placement import tile_layout
from calc.calbin.codec import Path
from calc.calbin.manifest import WeightDesc
from calc.calbin.report import Context
from calc.core.packing import TileLayout
from calc.core.tensors import DTYPES


def check_shards(ctx: Context, data: memoryview) -> None:
    """CALBIN_SCALE, CALBIN_BIAS, CALBIN_PADDING for every weight.

    Memory: the scales of one expert of one weight.
    """
    m = ctx.manifest
    starts = {shard.chip: ctx.sections[shard.section].offset for shard in m.shards}
    by_chip: dict[int, list[tuple[int, WeightDesc]]] = {shard.chip: [] for shard in m.shards}
    for i, weight in enumerate(m.weights):
        by_chip[weight.chip].append((i, weight))
    for k, shard in enumerate(m.shards):
        base, end = starts[shard.chip], 0
        for i, weight in sorted(by_chip[shard.chip], key=lambda entry: entry[1].offset):
            start = base + weight.offset
            content = data[start : start + weight.nbytes]
            path: Path = ("weights", i)
            _check_hole(ctx, data, base + end, start, path)
            end = weight.offset + weight.nbytes
            layout = tile_layout(weight)
            if layout is not None:
                _check_tiles(ctx, weight, layout, np.frombuffer(content, dtype=np.uint8), start, path)
        _check_hole(ctx, data, base + end, base + ctx.sections[shard.section].nbytes, ("shards", k))


def _check_hole(ctx: Context, data: memoryview, start: int, end: int, path: Path) -> None:
    hole = bytes(data[start:end])
    if hole.count(0) != len(hole):
        at = next(i for i, b in enumerate(hole) if b)
        what = "a byte between weights is not zero"
        ctx.report.add("CALBIN_PADDING", path, what, expected="0", got=hole[at], offset=start + at)


def _check_tiles(
    ctx: Context, weight: WeightDesc, layout: TileLayout, content: NDArray[np.uint8], start: int, path: Path
) -> None:
    """Look at full tiles at once, then at the short one."""
    full = layout.rows // layout.tile_rows
    tail = layout.rows - full * layout.tile_rows
    for expert in range(max(1, weight.experts)):
        for tiles, first, rows in ((full, 0, layout.tile_rows), (1, full, tail)):
            if not tiles or not rows:
                continue
            at = expert * layout.nbytes + layout.tile_offset(first)
            _check_block(ctx, layout, content[at:], (tiles, rows), start + at, (path, expert))


def _check_block(
    ctx: Context,
    layout: TileLayout,
    content: NDArray[np.uint8],
    shape: tuple[int, int],
    start: int,
    where: tuple[Path, int],
) -> None:
    """Check `tiles` tiles of `rows` rows, `layout.tile_stride` bytes apart from the start of `content`."""
    tiles, rows = shape
    path, expert = where
    fields = [("CALBIN_BIAS", "bias", layout.bias_offset(rows), 4 * rows if layout.bias else 0, DTYPES["f32"])]
    scale_dtype = DTYPES["f32"] if layout.format.scale == "f32" else np.dtype(ml_dtypes.bfloat16)
    fields.append(("CALBIN_SCALE", "scale", layout.scales_offset(rows), layout.scales_bytes(rows), scale_dtype))
    for code, name, offset, nbytes, dtype in fields:
        if not nbytes:
            continue
        view = np.lib.stride_tricks.as_strided(
            content[offset:], (tiles, nbytes), (layout.tile_stride, 1), writeable=False
        )
        values = np.ascontiguousarray(view).view(dtype).astype(np.float32)
        good = np.isfinite(values)
        if name == "scale":
            good &= values >= np.finfo(np.float32).tiny
        if not good.all():
            tile, k = (int(x) for x in np.argwhere(~good)[0])
            what = f"expert {expert}, tile {tile}, {name} {k} is not finite" + (
                ", positive and normal" if name == "scale" else ""
            )
            at = start + tile * layout.tile_stride + offset + k * dtype.itemsize
            ctx.report.add(code, path, what, expected="a normal number", got=float(values[tile, k]), offset=at)
