"""Blocks: how many rows of a call the SRAM works on at once, and where activations leave it.

A prefill's rows are worked through in blocks. The calls of a *region* share a loop over blocks: every block streams the
region's weights once. Keys and values of earlier blocks are in the state already, so a causal model is right block by
block. What a later region reads is spilled to DRAM.

Candidates are compared on the target's rates: the whole graph in one region (nothing is spilled, the widest call sets
the block); regions between places where each chip hands on a single value, such as the residual stream between a
layer's attention and its FFN; a region per call. The cheapest is taken; of equals the one that moves fewer bytes.
"""

from __future__ import annotations

from collections import Counter
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
        weight_bytes: bytes of packed weights that a full bucket streams.
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
        The plan, which was probed last, and all candidates, it among them.

    Raises:
        SramTooSmallError: SRAM_TOO_SMALL when not even the smallest block fits: what is missing for the best plan.
    """
    everything = whole(calls)
    if _refusal(probe, everything) is None:
        plan = _priced(everything, variant, target, weight_bytes)
        return plan, (plan,)
    unit = int(target.tiling.block_rows.value)
    kinds = _cuts(calls) if variant.seq > 1 else {}
    found = []
    for kind, cuts in kinds.items():
        sized = _settled(_sized(calls, kind, cuts, variant, unit, probe), unit, probe)
        if sized is not None:
            found.append(_priced(sized, variant, target, weight_bytes))
    if not found:
        least = [everything, *(_smallest(calls, kind, cuts, unit) for kind, cuts in kinds.items())]
        refusals = [e for e in (_refusal(probe, p) for p in least) if e is not None]
        raise min(refusals, key=lambda e: e.missing)
    return min(found, key=lambda p: (p.cycles, p.weight_bytes + p.spill_bytes)), tuple(found)


def _refusal(probe: Probe, plan: Plan) -> SramTooSmallError | None:
    try:
        probe(plan)
    except SramTooSmallError as e:
        return e
    return None


# -- candidates -------------------------------------------------------------------------------------------------------


Cuts = frozenset[int]
"""Places between calls: i is before the call at index i."""


def _cuts(calls: Sequence[Call]) -> dict[str, Cuts]:
    """The candidates by kind: nowhere, where a chip hands on one value only (a residual stream), everywhere."""
    last: dict[str, int] = {}
    for i, c in enumerate(calls):
        last.update(dict.fromkeys(c.inputs.values(), i))
    narrow = set()
    alive: dict[str, int] = {}
    for i, c in enumerate(calls):
        if all(n == 1 for n in Counter(alive.values()).values()):
            narrow.add(i)
        alive.update({v: c.chip for v in c.outputs if v in last})
        alive = {v: chip for v, chip in alive.items() if last[v] > i}
    return {"whole": frozenset(), "narrow": frozenset(narrow), "calls": frozenset(range(len(calls)))}


def _runs(calls: Sequence[Call], cuts: Cuts) -> Iterator[tuple[Call, ...]]:
    """The calls in regions: cut where it is asked for and where the kind of row changes."""
    run: list[Call] = []
    for i, call in enumerate(calls):
        # what crosses chips does so within one loop: both sides must count the same rows; and the few rows that there
        # are one per sequence stay in SRAM
        if run and not registry()[call.op].crosses:
            domain = row_domain(call)
            if row_domain(run[-1]) != domain or (domain == "tokens" and i in cuts):
                yield tuple(run)
                run = []
        run.append(call)
    if run:
        yield tuple(run)


def _sized(calls: Sequence[Call], kind: str, cuts: Cuts, variant: Variant, unit: int, probe: Probe) -> Plan | None:
    """Each region with the largest block that fits it alone; None where a region has none."""
    sizes: dict[tuple[object, ...], int] = {}
    regions: list[Region] = []
    for run in _runs(calls, cuts):
        if row_domain(run[0]) == "sequences":
            regions.append(Region(run))
            continue
        few = _distinct(run)
        key = tuple(_signature(c) for c in few)
        if key not in sizes:
            sizes[key] = _largest(few, variant, unit, probe)
        if not sizes[key]:
            return None
        regions.append(Region(run, sizes[key]))
    return Plan(tuple(regions), kind)


def _smallest(calls: Sequence[Call], kind: str, cuts: Cuts, unit: int) -> Plan:
    """The plan that needs least of the SRAM: blocks as small as they get."""
    return Plan(
        tuple(Region(run, None if row_domain(run[0]) == "sequences" else unit) for run in _runs(calls, cuts)),
        kind,
    )


def _settled(plan: Plan | None, unit: int, probe: Probe) -> Plan | None:
    """The plan, its blocks made smaller until all of it fits: regions share the SRAM's fragmentation."""
    while plan is not None and _refusal(probe, plan) is not None:
        largest = max(r.block or 0 for r in plan.regions)
        if largest <= unit:
            return None
        less = [r if r.block is None else replace(r, block=min(r.block, largest - unit)) for r in plan.regions]
        plan = replace(plan, regions=tuple(less))
    return plan


def _largest(calls: Sequence[Call], variant: Variant, unit: int, probe: Probe) -> int:
    """The largest block that fits, evened out over the bucket; 0 where not even the smallest does."""

    def fits(block: int) -> bool:
        return _refusal(probe, Plan((Region(tuple(calls), block),))) is None

    low, high = 1, max(2, variant.seq // unit + 1)  # in multiples: low fits, high does not
    if not fits(low * unit):
        return 0
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle * unit):
            low = middle
        else:
            high = middle
    count = -(-variant.seq // (low * unit))
    return min(low * unit, align(-(-variant.seq // count), unit))


def _signature(call: Call) -> tuple[object, ...]:
    """What the SRAM a call needs depends on."""
    shapes = tuple(call.shapes[v] for v in (*call.inputs.values(), *call.outputs))
    return call.op, call.chip, call.attrs, tuple(call.schemes.items()), shapes


def _distinct(calls: Sequence[Call]) -> list[Call]:
    """The calls without layers that look like two before: they need the same SRAM.

    Two, since what several layers share (tables of positions) is live from the first to the last that uses it. What a
    dropped layer would have made is read from the layer that stands for it.
    """
    layers: dict[tuple[int, int], list[Call]] = {}
    for c in calls:
        if c.layer is not None:
            layers.setdefault((c.layer, c.chip), []).append(c)
    seen: dict[tuple[object, ...], list[list[Call]]] = {}
    keep: set[int] = set()
    instead: dict[str, str] = {}
    for group in layers.values():
        like = seen.setdefault(tuple(_signature(c) for c in group), [])
        if len(like) < 2:
            like.append(group)
            keep.update(id(c) for c in group)
        for c, other in zip(group, like[-1], strict=True):
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
    moves = _moves(plan, variant)
    for region, moved in zip(plan.regions, moves, strict=True):
        read = region.blocks(variant.seq) * sum(
            weight_bytes.get(c.inputs[f], 0)
            for c in region.calls
            for f in registry()[c.op].weights(c.attrs)
            if f not in registry()[c.op].gathers
        )
        macs = sum(registry()[c.op].work(c, rows, variant.seq).macs for c in region.calls)
        weights, spills = weights + read, spills + moved
        cycles += max((read + moved) / target.rates.dram.value, macs / target.rates.mac_bf16.value)
    return replace(plan, weight_bytes=weights, spill_bytes=spills, cycles=round(cycles))


def _moves(plan: Plan, variant: Variant) -> list[int]:
    """Bytes that each region stores for later ones and loads of what earlier ones have stored."""
    home: dict[str, tuple[int, Call]] = {}
    out = [0] * len(plan.regions)
    stored: set[str] = set()
    for i, region in enumerate(plan.regions):
        loaded: set[str] = set()
        for c in region.calls:
            for formal, name in c.inputs.items():
                at, maker = home.get(name, (i, c))
                if at == i or plan.regions[at].block is None:
                    continue
                size = (4 if getattr(maker.attrs, "partial", False) else 2) * _elements(maker.shapes[name])
                if name not in stored:
                    out[at] += size
                    stored.add(name)
                if maker.chip == c.chip and name not in loaded:
                    # of an input that a kernel picks rows of, one row of each sequence comes back
                    out[i] += size // variant.seq if formal in registry()[c.op].by_row else size
                    loaded.add(name)
            home.update(dict.fromkeys(c.outputs, (i, c)))
    return out


def _elements(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
