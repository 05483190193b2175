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

BLOCK_MULTIPLE = 16
"""Rows of a block are a multiple of this: the lanes that a block of queries fills."""

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
        outlive: where the plan is a piece of the whole, the values that the rest reads.
    """

    regions: tuple[Region, ...]
    kind: str = "whole"
    weight_bytes: int = 0
    spill_bytes: int = 0
    cycles: int = 0
    outlive: frozenset[str] = frozenset()


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
    refusals: list[SramTooSmallError] = []
    everything = _priced(whole(calls), variant, target, weight_bytes)
    try:
        probe(whole(_distinct(calls)))  # cheap, and tells nearly always
        probe(everything)
    except SramTooSmallError as e:
        if variant.seq == 1:
            raise
        refusals.append(e)
    else:
        return everything, (everything,)
    found: list[Plan] = []
    for kind, cut in (("whole", _cut_never), ("halves", _cut_halves), ("calls", _cut_always)):
        try:
            found.append(_priced(_sized(calls, kind, cut, variant, probe), variant, target, weight_bytes))
        except SramTooSmallError as e:
            refusals.append(e)
    while found:
        best = min(found, key=_cost)
        try:
            probe(best)
        except SramTooSmallError as e:
            refusals.append(e)
            found.remove(best)
            smaller = _smaller(best)
            if smaller is not None:
                found.append(_priced(smaller, variant, target, weight_bytes))
        else:
            return best, tuple(found)
    raise min(refusals, key=lambda e: e.missing)


def _cost(plan: Plan) -> tuple[int, int]:
    return plan.cycles, plan.weight_bytes + plan.spill_bytes


def _smaller(plan: Plan) -> Plan | None:
    """The plan with the next smaller blocks, None where they are the smallest.

    What a region needs was found on the layers that differ; all of them together may need a little more, since what
    the first one makes lives until the last one has read it.
    """
    largest = max((r.block for r in plan.regions if r.block is not None), default=0)
    if largest <= BLOCK_MULTIPLE:
        return None
    regions = tuple(replace(r, block=largest - BLOCK_MULTIPLE) if r.block == largest else r for r in plan.regions)
    return replace(plan, regions=regions)


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


def _sized(calls: Sequence[Call], kind: str, cut: Callable[[Call, Call], bool], variant: Variant, probe: Probe) -> Plan:
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
            inside = {id(c) for c in run}
            outlive = frozenset(v for c in calls if id(c) not in inside for v in c.inputs.values())
            try:
                sizes[key] = _largest(few, variant, probe, outlive)
            except SramTooSmallError as e:
                refusals.append(e)
                sizes[key] = 0
        regions.append(Region(run, sizes[key]))
    if refusals:
        raise max(refusals, key=lambda e: e.missing)
    return Plan(tuple(regions), kind)


def _largest(calls: Sequence[Call], variant: Variant, probe: Probe, outlive: frozenset[str]) -> int:
    """The largest block that fits, evened out over the bucket.

    Raises:
        SramTooSmallError: not even the smallest does.
    """

    def fits(block: int) -> SramTooSmallError | None:
        try:
            probe(Plan((Region(tuple(calls), block),), outlive=outlive))
        except SramTooSmallError as e:
            return e
        return None

    low, high = 1, max(1, variant.seq // BLOCK_MULTIPLE)  # in multiples: low fits, high does not
    refusal = fits(low * BLOCK_MULTIPLE)
    if refusal is not None:
        raise refusal
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle * BLOCK_MULTIPLE) is None:
            low = middle
        else:
            high = middle
    count = -(-variant.seq // (low * BLOCK_MULTIPLE))
    return min(low * BLOCK_MULTIPLE, align(-(-variant.seq // count), BLOCK_MULTIPLE))


def _signature(call: Call) -> tuple[object, ...]:
    """What the SRAM a call needs depends on."""
    shapes = tuple(call.shapes[v] for v in (*call.inputs.values(), *call.outputs))
    return call.op, call.chip, str(sorted(call.attrs.items())), shapes


def _distinct(calls: Sequence[Call]) -> list[Call]:
    """The calls with the first and the last of layers that look alike: those between need the same SRAM.

    What a dropped layer would have made is read from the first one. What all of them share (RoPE tables) lives from
    the first to the last.
    """
    layers: dict[tuple[int, int], list[Call]] = {}
    for c in calls:
        if c.layer is not None:
            layers.setdefault((c.layer, c.chip), []).append(c)
    alike: dict[tuple[object, ...], list[list[Call]]] = {}
    for group in layers.values():
        alike.setdefault(tuple(_signature(c) for c in group), []).append(group)
    keep: set[int] = set()
    instead: dict[str, str] = {}
    for first, *others in alike.values():
        keep.update(id(c) for group in (first, *others[-1:]) for c in group)
        for group in others[:-1]:
            for c, other in zip(group, first, strict=True):
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
                size = (4 if maker.attrs.get("partial") else 2) * _elements(maker.shapes[name])
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
