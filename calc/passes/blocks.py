"""Blocks: how many rows of a call the SRAM works on at once, and where activations leave it.

A prefill's rows are worked through in blocks. The calls of a *region* share a loop over blocks: every block streams the
region's weights once. Keys and values of earlier blocks are in the state already, so a causal model is right block by
block. What a later region reads is spilled to DRAM.

Candidates are compared on the target's rates: the whole graph in one region (nothing is spilled, the widest call sets
the block), a region per half of a layer, and a region per call. The cheapest is taken; of equals the one that reads
fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from calc.core.packing import align
from calc.core.target import Target
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.passes.allocate import SramTooSmallError

Probe = Callable[["Plan"], None]
"""Lowers under a plan, as far as the SRAM; raises SramTooSmallError where it does not fit."""


@dataclass(frozen=True)
class Region:
    """Calls that share a loop over blocks of `block` rows; None: all rows at once."""

    calls: tuple[Call, ...]
    block: int | None = None

    def blocks(self, rows: int) -> int:
        """How often the loop runs for a call of `rows` rows, and so how often the region's weights are read."""
        return 1 if self.block is None else -(-rows // self.block)


@dataclass(frozen=True)
class Plan:
    """The regions of a sub-model, in order.

    Attributes:
        regions: see `Region`.
        kind: which candidate it is.
        weight_bytes: bytes of weights that a full bucket reads.
        spill_bytes: bytes of activations that a full bucket writes to DRAM and reads back.
        cycles: what that and the MACs take at the target's rates, engines overlapping.
    """

    regions: tuple[Region, ...]
    kind: str = "whole"
    weight_bytes: int = 0
    spill_bytes: int = 0
    cycles: int = 0


def row_domain(call: Call) -> str:
    """Whether a call has a row per token (tokens) or per sequence (sequences): what its first output's rank says."""
    return "tokens" if len(call.shapes[call.outputs[0]]) >= 3 else "sequences"


def whole(calls: Sequence[Call]) -> Plan:
    """All rows of the bucket at once."""
    return Plan((Region(tuple(calls)),))


def plan_blocks(
    calls: Sequence[Call], variant: Variant, target: Target, weight_bytes: Mapping[str, int], probe: Probe
) -> tuple[Plan, tuple[Plan, ...]]:
    """Choose regions and block sizes.

    Args:
        calls: of all chips, in order.
        variant: the static shape.
        target: rates, to compare candidates.
        weight_bytes: bytes of each weight in its shard, by name.
        probe: see `Probe`.

    Returns:
        The plan, and every candidate that fits.

    Raises:
        SramTooSmallError: SRAM_TOO_SMALL when not even the smallest block fits: what is missing for the best plan.
    """
    try:
        probe(_priced(whole(_distinct(calls)), variant, target, weight_bytes))
    except SramTooSmallError as e:
        if variant.seq == 1:
            raise
        refusals = [e]
    else:
        plan = _priced(whole(calls), variant, target, weight_bytes)
        return plan, (plan,)
    found: list[Plan] = []
    for kind, cut in (("whole", _cut_never), ("halves", _cut_halves), ("calls", _cut_always)):
        try:
            sized = _sized(calls, kind, cut, variant, target, probe)
        except SramTooSmallError as e:
            refusals.append(e)
            continue
        found.append(_priced(sized, variant, target, weight_bytes))
    if not found:
        raise min(refusals, key=lambda e: e.missing)
    return min(found, key=lambda p: (p.cycles, p.weight_bytes + p.spill_bytes)), tuple(found)


# -- candidates -------------------------------------------------------------------------------------------------------


def _cut_never(before: Call, call: Call) -> bool:
    return False


def _cut_halves(before: Call, call: Call) -> bool:
    """At layer borders, and after what an attention's output goes through."""
    return before.layer != call.layer or _half(before) != _half(call)


def _cut_always(before: Call, call: Call) -> bool:
    return True


def _half(call: Call) -> str:
    return "ffn" if ".mlp" in call.name or call.op in ("Glu", "Moe") else "mix"


def _runs(calls: Sequence[Call], cut: Callable[[Call, Call], bool]) -> Iterator[tuple[Call, ...]]:
    run: list[Call] = []
    for call in calls:
        # what crosses chips does so within one loop: both sides must count the same rows; and the few rows that there
        # are one per sequence stay in SRAM
        if run and not registry()[call.op].crosses and _apart(run[-1], call, cut):
            yield tuple(run)
            run = []
        run.append(call)
    if run:
        yield tuple(run)


def _apart(before: Call, call: Call, cut: Callable[[Call, Call], bool]) -> bool:
    domain = row_domain(call)
    return row_domain(before) != domain or (domain == "tokens" and cut(before, call))


def _sized(
    calls: Sequence[Call],
    kind: str,
    cut: Callable[[Call, Call], bool],
    variant: Variant,
    target: Target,
    probe: Probe,
) -> Plan:
    """Each region with the largest block that fits."""
    sizes: dict[tuple[object, ...], int] = {}
    regions: list[Region] = []
    refusals: list[SramTooSmallError] = []
    for run in _runs(calls, cut):
        if row_domain(run[0]) == "sequences":
            regions.append(Region(run))
            try:
                probe(Plan((Region(run),)))
            except SramTooSmallError as e:
                refusals.append(e)
            continue
        few = _distinct(run)
        key = tuple(_signature(c) for c in few)
        if key not in sizes:
            try:
                sizes[key] = _largest(few, variant, target, probe)
            except SramTooSmallError as e:
                refusals.append(e)
                sizes[key] = 0
        regions.append(Region(run, sizes[key]))
    if refusals:
        raise max(refusals, key=lambda e: e.missing)
    return Plan(tuple(regions), kind)


def _largest(calls: Sequence[Call], variant: Variant, target: Target, probe: Probe) -> int:
    """The largest block that fits, evened out over the bucket.

    Raises:
        SramTooSmallError: not even the smallest does.
    """

    def fits(block: int) -> SramTooSmallError | None:
        try:
            probe(Plan((Region(tuple(calls), block),)))
        except SramTooSmallError as e:
            return e
        return None

    multiple = int(target.tiling.block_rows.value)
    low, high = 1, max(1, variant.seq // multiple)  # in multiples: low fits, high does not
    refusal = fits(low * multiple)
    if refusal is not None:
        raise refusal
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle * multiple) is None:
            low = middle
        else:
            high = middle
    count = -(-variant.seq // (low * multiple))
    return min(low * multiple, align(-(-variant.seq // count), multiple))


def _signature(call: Call) -> tuple[object, ...]:
    """What the SRAM a call needs depends on."""
    shapes = tuple(call.shapes[v] for v in (*call.inputs.values(), *call.outputs))
    return call.op, call.chip, call.attrs, tuple(call.schemes.items()), shapes


def _distinct(calls: Sequence[Call]) -> list[Call]:
    """The calls without layers that look like one before: they need the same SRAM.

    What a dropped layer would have made is read from the layer that stands for it.
    """
    layers: dict[tuple[int, int], list[Call]] = {}
    for c in calls:
        if c.layer is not None:
            layers.setdefault((c.layer, c.chip), []).append(c)
    seen: dict[tuple[object, ...], list[Call]] = {}
    keep: set[int] = set()
    instead: dict[str, str] = {}
    for group in layers.values():
        look = tuple(_signature(c) for c in group)
        stands = seen.setdefault(look, group)
        if stands is group:
            keep.update(id(c) for c in group)
        for c, other in zip(group, stands, strict=True):
            instead.update(zip(c.outputs, other.outputs, strict=True))
    out = []
    for c in calls:
        if c.layer is None or id(c) in keep:
            inputs = {f: instead.get(v, v) for f, v in c.inputs.items()}
            shapes = {**c.shapes, **{inputs[f]: c.shapes[v] for f, v in c.inputs.items()}}
            out.append(replace(c, inputs=inputs, shapes=shapes))
    return out


# -- cost -------------------------------------------------------------------------------------------------------------


def _priced(plan: Plan, variant: Variant, target: Target, weight_bytes: Mapping[str, int]) -> Plan:
    """The plan with its weight and spill bytes, and their time beside the MACs'."""
    rows = variant.batch * variant.seq
    weights = spills = 0
    cycles = 0.0
    made: dict[str, int] = {}
    spilled: set[str] = set()
    for i, region in enumerate(plan.regions):
        read = region.blocks(variant.seq) * sum(
            weight_bytes.get(name, 0) for c in region.calls for name in dict.fromkeys(c.inputs.values())
        )
        moved = 0
        for c in region.calls:
            for name in c.inputs.values():
                home = made.get(name)
                if home is not None and home != i and plan.regions[home].block is not None:
                    size = 2 * _elements(c.shapes[name])
                    moved += size + (0 if name in spilled else size)
                    spilled.add(name)
            made.update(dict.fromkeys(c.outputs, i))
        macs = sum(registry()[c.op].work(c, rows, variant.seq).macs for c in region.calls)
        weights, spills = weights + read, spills + moved
        cycles += max((read + moved) / target.rates.dram.value, macs / target.rates.mac_bf16.value)
    return replace(plan, weight_bytes=weights, spill_bytes=spills, cycles=round(cycles))


def _elements(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
