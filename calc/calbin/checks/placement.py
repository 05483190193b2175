"""Where bytes are: sections in the file; arrays, files and weights inside sections."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from calc.calbin.codec import Path
from calc.calbin.layout import (
    ALIGN,
    ENTRY_HOLE,
    HEADER_BYTES,
    HINT,
    INT_MAX,
    MAX_HOLE,
    WEIGHT_ALIGN,
    Header,
    chunk_count,
)
from calc.calbin.manifest import WeightDesc
from calc.calbin.report import Context
from calc.core.packing import FORMATS, TileLayout, align
from calc.core.tensors import DTYPES

Span = tuple[int, int, Path]
"""Start, end and the field that declares it."""


def check_sections(ctx: Context, data: memoryview, header: Header) -> None:
    """CALBIN_MISALIGNED, CALBIN_OUTSIDE, CALBIN_OVERLAP, CALBIN_HOLE, CALBIN_CHUNKS, CALBIN_PADDING."""
    end = HEADER_BYTES
    for i, section in enumerate(ctx.manifest.sections):
        path: Path = ("sections", i)
        start = align(end, ALIGN)
        if section.offset % ALIGN:
            expected = f"a multiple of {ALIGN}"
            ctx.report.add(
                "CALBIN_MISALIGNED",
                (*path, "offset"),
                "a section is misaligned",
                expected=expected,
                got=section.offset,
                hint=HINT,
            )
        elif section.offset < start:
            what = "a section overlaps what comes before it"
            ctx.report.add("CALBIN_OVERLAP", (*path, "offset"), what, expected=start, got=section.offset, hint=HINT)
        elif section.offset > start:
            what = "bytes before a section belong to nothing"
            ctx.report.add("CALBIN_HOLE", (*path, "offset"), what, expected=start, got=section.offset, hint=HINT)
        if section.offset + section.nbytes > header.manifest_offset:
            what = "a section runs into the manifest or past the end of the file"
            expected = f"an end of at most {header.manifest_offset}"
            ctx.report.add(
                "CALBIN_OUTSIDE",
                (*path, "nbytes"),
                what,
                expected=expected,
                got=section.offset + section.nbytes,
                hint=HINT,
            )
        if len(section.chunks) != chunk_count(section.nbytes):
            what = "the number of chunk digests does not fit the size"
            ctx.report.add(
                "CALBIN_CHUNKS",
                (*path, "chunks"),
                what,
                expected=chunk_count(section.nbytes),
                got=len(section.chunks),
                hint=HINT,
            )
        if section.kind == "weights" and section.nbytes % ALIGN:
            what = "a weights section does not fill whole pages"
            ctx.report.add(
                "CALBIN_MISALIGNED",
                (*path, "nbytes"),
                what,
                expected=f"a multiple of {ALIGN}",
                got=section.nbytes,
                hint=HINT,
            )
        ctx.report.raise_if_any()
        _check_zero(ctx, data, end, start, path)
        end = section.offset + section.nbytes
    if align(end, ALIGN) != header.manifest_offset:
        what = "bytes before the manifest belong to nothing"
        ctx.report.add(
            "CALBIN_HOLE", ("sections",), what, expected=align(end, ALIGN), got=header.manifest_offset, hint=HINT
        )
        ctx.report.raise_if_any()
    _check_zero(ctx, data, end, header.manifest_offset, ("sections",))


def _check_zero(ctx: Context, data: memoryview, start: int, end: int, path: Path) -> None:
    padding = bytes(data[start:end])
    if padding.count(0) != len(padding):
        at = next(i for i, b in enumerate(padding) if b)
        what = "padding is not zero"
        ctx.report.add("CALBIN_PADDING", path, what, expected="0", got=padding[at], hint=HINT, offset=start + at)


def check_entries(ctx: Context, data: memoryview) -> None:
    """Arrays and files: CALBIN_ARRAY_BYTES, CALBIN_MISALIGNED and what `_check_spans` finds."""
    m = ctx.manifest
    spans: dict[str, list[Span]] = {s.name: [] for s in m.sections if s.kind in ("golden", "tokenizer", "graph")}
    for i, array in enumerate(m.arrays):
        path: Path = ("arrays", i)
        item = DTYPES[array.dtype].itemsize
        if prod(array.shape) * item != array.nbytes:
            what = "an array's size is not that of its shape and dtype"
            ctx.report.add(
                "CALBIN_ARRAY_BYTES", (*path, "nbytes"), what, expected=prod(array.shape) * item, got=array.nbytes
            )
        if array.offset % item:
            what = "an array is misaligned"
            ctx.report.add(
                "CALBIN_MISALIGNED", (*path, "offset"), what, expected=f"a multiple of {item}", got=array.offset
            )
        if m.golden is not None:
            spans[m.golden.section].append((array.offset, array.offset + array.nbytes, path))
    index = {s.name: i for i, s in enumerate(m.sections)}
    for i, file in enumerate(m.files):
        spans[file.section].append((file.offset, file.offset + file.nbytes, ("files", i)))
    for name, found in spans.items():
        section = ctx.sections[name]
        content = data[section.offset : section.offset + section.nbytes]
        _check_spans(ctx, found, section.nbytes, ENTRY_HOLE, ("sections", index[name]))
        ctx.report.raise_if_any()
        end = 0
        for start, stop, path in sorted(found, key=_start):
            _check_zero_inside(ctx, content, end, start, path, section.offset)
            end = max(end, stop)
        _check_zero_inside(ctx, content, end, section.nbytes, ("sections", index[name]), section.offset)


def _check_zero_inside(ctx: Context, content: memoryview, start: int, end: int, path: Path, base: int) -> None:
    if any(content[start:end]):
        at = next(i for i in range(start, end) if content[i])
        what = "a byte between entries is not zero"
        ctx.report.add("CALBIN_PADDING", path, what, expected="0", got=content[at], offset=base + at)


def _start(span: Span) -> tuple[int, int]:
    return span[0], span[1]


def _check_spans(ctx: Context, spans: Iterable[Span], size: int, hole: int, whole: Path) -> None:
    """CALBIN_OUTSIDE, CALBIN_OVERLAP, CALBIN_HOLE: spans lie inside `size` bytes, apart, closer than `hole`."""
    end = 0
    for start, stop, path in sorted(spans, key=_start):
        if stop > size:
            ctx.report.add(
                "CALBIN_OUTSIDE", path, "it ends past what holds it", expected=f"an end of at most {size}", got=stop
            )
        if start < end:
            ctx.report.add(
                "CALBIN_OVERLAP", path, "it overlaps another entry", expected=f"a start of at least {end}", got=start
            )
        elif start - end >= hole:
            what = f"{start - end} bytes before it belong to nothing"
            ctx.report.add("CALBIN_HOLE", path, what, expected=f"fewer than {hole}", got=start - end)
        end = max(end, stop)
    if size - end >= hole:
        what = f"{size - end} bytes at the end belong to nothing"
        ctx.report.add("CALBIN_HOLE", whole, what, expected=f"fewer than {hole}", got=size - end)


def check_weights(ctx: Context) -> None:
    """CALBIN_SHARD_SIZE, CALBIN_MISALIGNED, those of `check_weight` and `_check_spans`."""
    m = ctx.manifest
    spans: dict[int, list[Span]] = {shard.chip: [] for shard in m.shards}
    for i, weight in enumerate(m.weights):
        path: Path = ("weights", i)
        check_weight(ctx, weight, path)
        if weight.offset % WEIGHT_ALIGN:
            expected = f"a multiple of {WEIGHT_ALIGN}"
            ctx.report.add(
                "CALBIN_MISALIGNED", (*path, "offset"), "a weight is misaligned", expected=expected, got=weight.offset
            )
        spans[weight.chip].append((weight.offset, weight.offset + weight.nbytes, path))
    for i, shard in enumerate(m.shards):
        section = ctx.sections[shard.section]
        if align(shard.nbytes, ALIGN) != section.nbytes:
            what = "the shard does not have its section's size"
            expected = f"more than {section.nbytes - ALIGN}, at most {section.nbytes}"
            ctx.report.add("CALBIN_SHARD_SIZE", ("shards", i, "nbytes"), what, expected=expected, got=shard.nbytes)
        _check_spans(ctx, spans[shard.chip], shard.nbytes, MAX_HOLE, ("shards", i))


def check_weight(ctx: Context, weight: WeightDesc, path: Path) -> None:
    """CALBIN_WEIGHT_SHAPE, CALBIN_WEIGHT_BYTES, CALBIN_WEIGHT_FORMAT for one weight."""
    shape, padded = weight.shape, weight.padded_shape
    if (
        len(shape) != len(padded)
        or not shape
        or min(shape) < 1
        or any(p < s for p, s in zip(padded, shape, strict=True))
    ):
        what = "the padded shape does not hold the logical one"
        ctx.report.add("CALBIN_WEIGHT_SHAPE", (*path, "padded_shape"), what, expected=f"at least {shape}", got=padded)
        return
    if prod(padded) > INT_MAX:
        ctx.report.add(
            "CALBIN_WEIGHT_SHAPE",
            (*path, "padded_shape"),
            "the number of elements overflows",
            expected="at most 2**62",
            got=padded,
        )
        return
    if weight.format == "f32":
        expected = prod(padded) * 4
        if weight.experts and shape[0] != weight.experts:
            what = "a plain weight of experts has them as its first axis"
            ctx.report.add("CALBIN_WEIGHT_SHAPE", (*path, "experts"), what, expected=shape[0], got=weight.experts)
    else:
        layout = tile_layout(weight)
        if layout is None or (weight.experts and len(shape) == 3 and shape[0] != weight.experts):
            what = "a packed weight needs rows and columns, tile_rows, and a group size its format has"
            got = (
                f"{weight.format} {shape}, tile_rows {weight.tile_rows}, group {weight.group}, experts {weight.experts}"
            )
            ctx.report.add("CALBIN_WEIGHT_FORMAT", path, what, got=got)
            return
        if padded[-1] != layout.cols_padded:
            what = "the code rows have another padded width"
            ctx.report.add(
                "CALBIN_WEIGHT_SHAPE", (*path, "padded_shape"), what, expected=layout.cols_padded, got=padded[-1]
            )
        expected = layout.nbytes * max(1, weight.experts)
    if weight.nbytes != expected:
        what = "the weight's size is not that of its shape and format (codes, scales, bias and padding)"
        ctx.report.add("CALBIN_WEIGHT_BYTES", (*path, "nbytes"), what, expected=expected, got=weight.nbytes)


def tile_layout(weight: WeightDesc) -> TileLayout | None:
    """The tiles of a packed weight (of one expert where it has experts), None if its fields do not describe one."""
    shape, fmt = weight.shape, FORMATS.get(weight.format)
    fits = len(shape) == 2 or (len(shape) == 3 and weight.experts)
    if fmt is None or not fits or weight.group not in fmt.groups or weight.tile_rows < 1 or min(shape) < 1:
        return None
    return TileLayout(fmt.name, shape[-2], shape[-1], weight.tile_rows, weight.group, weight.bias)
