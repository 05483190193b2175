"""DRAM and SRAM: everything fits, and nothing that lives at the same time overlaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator

from calc.calbin.codec import Path
from calc.calbin.manifest import ChipPart, MemoryRegion, SubModel
from calc.calbin.report import Context

Span = tuple[int, int, Path, str]
"""Start, end, the field that declares it, and what it is."""


def overlaps(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans that overlap: each span with the furthest-reaching one before it."""
    furthest: Span | None = None
    for span in sorted(spans, key=lambda s: (s[0], s[1])):
        if furthest is not None and span[0] < furthest[1]:
            yield furthest, span
        if furthest is None or span[1] > furthest[1]:
            furthest = span


def check_dram(ctx: Context) -> None:
    """CALBIN_DRAM: regions fit and do not overlap; shards, states and tensors lie inside regions and apart."""
    m = ctx.manifest
    regions: dict[int, list[Span]] = defaultdict(list)
    for i, region in enumerate(m.dram):
        path: Path = ("dram", i)
        if region.space != "dram":
            ctx.report.add(
                "CALBIN_DRAM",
                (*path, "space"),
                "the DRAM map has a region elsewhere",
                expected="dram",
                got=region.space,
            )
        if region.offset + region.nbytes > m.target.dram_bytes:
            what = "a region ends past the chip's DRAM"
            expected = f"an end of at most {m.target.dram_bytes}"
            ctx.report.add("CALBIN_DRAM", (*path, "nbytes"), what, expected=expected, got=region.offset + region.nbytes)
        regions[region.chip].append((region.offset, region.offset + region.nbytes, path, f"region {region.name}"))
    for spans in regions.values():
        spans.sort(key=lambda s: s[0])
        _report_overlaps(ctx, spans)
    owned = _owned(ctx)
    for chip, spans in owned.items():
        spans.sort(key=lambda s: s[0])
        _report_overlaps(ctx, spans)
        for span in spans:
            _check_inside(ctx, span, regions[chip])
    for i, sub in enumerate(m.submodels):
        _check_tensors(ctx, sub, ("submodels", i), regions, owned)


def _report_overlaps(ctx: Context, spans: list[Span]) -> None:
    for first, second in overlaps(spans):
        what = f"{second[3]} overlaps {first[3]} in DRAM"
        ctx.report.add("CALBIN_DRAM", second[2], what, expected=f"a start of at least {first[1]}", got=second[0])


def _owned(ctx: Context) -> dict[int, list[Span]]:
    """Shards and states by chip: nothing else may lie where they are."""
    m = ctx.manifest
    owned: dict[int, list[Span]] = defaultdict(list)
    for i, shard in enumerate(m.shards):
        if shard.nbytes:
            owned[shard.chip].append(
                (shard.dram_offset, shard.dram_offset + shard.nbytes, ("shards", i), f"shard {shard.chip}")
            )
    for i, state in enumerate(m.states.states):
        for j, part in enumerate(state.parts):
            end = part.offset + state.part_bytes(part, m.states.slots)
            path: Path = ("states", "states", i, "parts", j, "offset")
            owned[part.chip].append((part.offset, end, path, f"state {state.name}"))
    return owned


def _check_inside(ctx: Context, span: Span, regions: list[Span]) -> None:
    at = bisect_right(regions, span[0], key=lambda s: s[0]) - 1
    if at < 0 or span[1] > regions[at][1]:
        what = f"{span[3]} does not lie inside a region of the chip's DRAM map"
        expected = f"an end of at most {regions[at][1]}" if at >= 0 else "a region"
        ctx.report.add("CALBIN_DRAM", span[2], what, expected=expected, got=f"{span[0]} to {span[1]}")


def _check_tensors(
    ctx: Context, sub: SubModel, path: Path, regions: dict[int, list[Span]], owned: dict[int, list[Span]]
) -> None:
    own: dict[int, list[Span]] = defaultdict(list)
    states = {s.name for s in ctx.manifest.states.states}
    chips = {part.chip for part in sub.chip_map}
    for side, tensors in (("inputs", sub.inputs), ("outputs", sub.outputs)):
        for j, tensor in enumerate(tensors):
            at = tensor.at
            if at.chip is None or at.offset is None:
                continue
            span: Span = (at.offset, at.offset + at.nbytes, (*path, side, j, "at"), f"tensor {tensor.name}")
            if at.chip not in chips:
                expected = sorted(chips)
                ctx.report.add(
                    "CALBIN_INDEX", span[2], "a tensor is on a chip the sub-model lacks", expected=expected, got=at.chip
                )
                continue
            _check_inside(ctx, span, regions[at.chip])
            if tensor.name not in states:
                own[at.chip].append(span)
    for chip, spans in own.items():
        _report_overlaps(ctx, spans)
        taken = owned[chip]
        for span in spans:
            before = bisect_left(taken, span[1], key=lambda s: s[0]) - 1
            if before >= 0 and taken[before][1] > span[0]:
                what = f"{span[3]} overlaps {taken[before][3]} in DRAM"
                ctx.report.add(
                    "CALBIN_DRAM", span[2], what, expected=f"a start of at least {taken[before][1]}", got=span[0]
                )


def check_parts(ctx: Context) -> None:
    """CALBIN_SRAM for every chip of every sub-model."""
    for i, sub in enumerate(ctx.manifest.submodels):
        for j, part in enumerate(sub.chip_map):
            _check_part(ctx, part, ("submodels", i, "chip_map", j))


def _check_part(ctx: Context, part: ChipPart, path: Path) -> None:
    target = ctx.manifest.target
    size = {"sram": target.sram_bytes, "dram": target.dram_bytes}
    if part.sram_peak > target.sram_bytes:
        what = "the program needs more SRAM than the chip has"
        ctx.report.add(
            "CALBIN_SRAM", (*path, "sram_peak"), what, expected=f"at most {target.sram_bytes}", got=part.sram_peak
        )
    by_space: dict[str, list[tuple[MemoryRegion, Path]]] = {"sram": [], "dram": []}
    for k, region in enumerate(part.regions):
        at: Path = (*path, "regions", k)
        if region.chip != part.chip:
            ctx.report.add(
                "CALBIN_SRAM",
                (*at, "chip"),
                "a region is on another chip than its program",
                expected=part.chip,
                got=region.chip,
            )
        if region.first > region.last:
            ctx.report.add(
                "CALBIN_SRAM",
                at,
                "a region ends before it begins",
                expected=f"a last of at least {region.first}",
                got=region.last,
            )
            continue
        if region.offset + region.nbytes > size[region.space]:
            what = f"region {region.name} ends past the chip's {region.space.upper()}"
            expected = f"an end of at most {size[region.space]}"
            ctx.report.add("CALBIN_SRAM", (*at, "nbytes"), what, expected=expected, got=region.offset + region.nbytes)
        by_space[region.space].append((region, at))
    for regions in by_space.values():
        _check_live(ctx, regions)


def _check_live(ctx: Context, regions: list[tuple[MemoryRegion, Path]]) -> None:
    """Sweep over the steps; those alive are kept apart and sorted by address, so a newcomer has two neighbours."""
    events = [(r.first, 1, k) for k, (r, _) in enumerate(regions)] + [
        (r.last + 1, 0, k) for k, (r, _) in enumerate(regions)
    ]
    alive: list[tuple[int, int, int]] = []
    for _, starts, k in sorted(events):
        region, path = regions[k]
        entry = (region.offset, region.offset + region.nbytes, k)
        at = bisect_left(alive, entry)
        if not starts:
            if at < len(alive) and alive[at] == entry:
                del alive[at]
            continue
        for neighbour in alive[max(at - 1, 0) : at + 1]:
            if neighbour[0] < entry[1] and entry[0] < neighbour[1]:
                other = regions[neighbour[2]][0]
                what = f"regions {other.name} and {region.name} overlap while both are live"
                got = f"{entry[0]} to {entry[1]} and {neighbour[0]} to {neighbour[1]} from step {region.first}"
                ctx.report.add("CALBIN_SRAM", path, what, expected="disjoint ranges", got=got)
                break
        else:
            insort(alive, entry)
