"""Place: where weights, states and inputs and outputs lie in each chip's DRAM.

A chip's DRAM, from address 0: weight shard, states (in order of use, slot after slot), inputs and outputs (shared by
all sub-models), scratch for spilled activations (shared too). Every range starts on a multiple of 64 bytes, which the
target's alignment divides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from calc.core.errors import CapacityError, Problem
from calc.core.isa import Space
from calc.core.packing import TileLayout, align
from calc.core.schemes import Scheme
from calc.core.spec import ModelSpec
from calc.core.target import PLACED, Target, Tiling
from calc.core.tensors import RowsTensor
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.linear import LinearAttrs
from calc.kernels.lowering import ChipMemory, StateBuffer
from calc.kernels.program import Buffer, Packed, Plain
from calc.passes.base import Graph, StatePart
from calc.passes.lower import io_buffers
from calc.passes.pack import Placed

PAGE = 4096
"""Bytes on multiples of which a shard and the whole of a chip's memory end: the file's section alignment."""


@dataclass(frozen=True)
class Placement:
    """The whole board's memory.

    Attributes:
        chips: each chip's memory as the lowering sees it.
        weights: each chip's weights in shard order.
        parts: for a value that is a chip's part of a state, which part.
        state_bytes: bytes of states per chip.
        io_bytes: bytes of inputs and outputs, on each chip.
        capacity: tokens that a slot holds.
        slots: slots of the states.
        state_rows: what rows of a growing state are padded to.
    """

    chips: Mapping[int, ChipMemory]
    weights: Mapping[int, tuple[Placed, ...]]
    parts: Mapping[str, StatePart]
    state_bytes: Mapping[int, int]
    io_bytes: int
    capacity: int
    slots: int
    state_rows: int


def weight_handle(call: Call, formal: str, scheme: Scheme, target: Target, offset: int) -> Packed:
    """How a matrix weight is packed: as few tiles as the ring's slot allows, rows a multiple of the target's lanes."""
    shape = call.shape(formal)
    fmt, group = scheme.format.name, scheme.group
    rows, cols = shape[-2:]
    bias = isinstance(call.attrs, LinearAttrs) and call.attrs.bias
    multiple, limit = int(target.tiling.row_multiple.value), int(target.tiling.weight_tile.value)
    full = TileLayout(fmt, rows, cols, rows, group, bias)
    count = -(-full.nbytes // limit)
    while True:
        tile_rows = align(-(-rows // count), multiple)
        lay = TileLayout(fmt, rows, cols, tile_rows, group, bias)
        if lay.tile_bytes(min(tile_rows, rows)) <= limit:
            break
        if tile_rows == multiple:
            raise CapacityError(
                Problem(
                    "TILE_TOO_LARGE",
                    call.inputs[formal],
                    f"{multiple} rows of the weight do not fit a slot of the weight ring",
                    f"at most {limit} bytes",
                    str(lay.tile_stride),
                    "raise tiling.weight_tile in the target",
                )
            )
        count += 1
    return Packed(call.inputs[formal], offset, lay, scheme, shape[0] if len(shape) == 3 else 0)


def place(
    g: Graph,
    calls: Sequence[Call],
    target: Target,
    variants: Sequence[Variant],
    spec: ModelSpec,
    max_seq_len: int,
    slots: int,
) -> Placement:
    """Give addresses to everything that outlives a call.

    Args:
        g: one variant's partitioned graph (all variants use the same weights and states).
        calls: its calls, each on its chip.
        target: chips and capacities.
        variants: all static shapes, for the inputs and outputs.
        spec: the model, for the widths of inputs and outputs.
        max_seq_len: capacity of a slot in tokens.
        slots: slots of the states.

    Raises:
        CapacityError: DRAM_TOO_SMALL per chip, with what is missing and what would fit; TILE_TOO_LARGE.
    """
    placed: dict[int, dict[str, Placed]] = {c: {} for c in range(target.chips)}
    end = dict.fromkeys(placed, 0)
    for call in calls:
        for item in _weights_of(call, g, target, end[call.chip], max_seq_len, placed[call.chip]):
            placed[call.chip][item.handle.name] = item
            end[call.chip] = align(item.handle.offset + item.handle.nbytes, PLACED)
    io_bytes = max(io_buffers(v, spec, 0)[1] for v in variants)
    chips, state_bytes = {}, {}
    for chip, items in placed.items():
        shard = align(end[chip], PAGE)  # a chip without work has none
        states, at = _states(g, calls, chip, shard, max_seq_len, slots, target.tiling)
        state_bytes[chip] = at - shard
        handles = {n: p.handle for n, p in items.items()}
        # inputs and outputs are laid out per sub-model at lowering time, from the same base
        io = {"io": Buffer("io", Space.DRAM, io_bytes, base=at)}
        chips[chip] = ChipMemory(handles, shard, states, io, align(at + io_bytes, PLACED))
    out = Placement(
        chips,
        {c: tuple(p.values()) for c, p in placed.items()},
        g.parts,
        state_bytes,
        io_bytes,
        max_seq_len,
        slots,
        int(target.tiling.state_rows.value),
    )
    check_capacity(out, {}, target, max(v.seq for v in variants))
    return out


def dynamic_bytes(p: Placement, chip: int, scratch: int) -> int:
    """DRAM that a chip needs after its shard: states, inputs and outputs, scratch."""
    memory = p.chips[chip]
    return align(memory.scratch - memory.shard_bytes + scratch, PAGE)


def check_capacity(p: Placement, scratch: Mapping[int, int], target: Target, bucket: int) -> None:
    """Refuse what does not fit the chips' DRAM.

    Args:
        p: the placement.
        scratch: bytes of spilled activations per chip.
        target: capacities.
        bucket: the largest prefill bucket, for the hint.

    Raises:
        CapacityError: DRAM_TOO_SMALL per chip.
    """
    problems: list[tuple[int, Problem]] = []
    for chip, memory in p.chips.items():
        spilled = scratch.get(chip, 0)
        need = memory.shard_bytes + dynamic_bytes(p, chip, spilled)
        if need <= target.dram_bytes:
            continue
        what = (
            f"{need}: weights {memory.shard_bytes}, states {p.state_bytes[chip]} ({p.slots} slots of {p.capacity} "
            f"tokens), io {p.io_bytes}, scratch {spilled}"
        )
        fits = _tokens_that_fit(memory, p, target.dram_bytes - memory.shard_bytes - spilled)
        problems.append((fits, _too_small(chip, need, what, target)))
    if problems:
        hint = _what_fits(min(fits for fits, _ in problems), bucket)
        raise CapacityError([replace(problem, hint=hint) for _, problem in problems])


def _too_small(chip: int, need: int, what: str, target: Target) -> Problem:
    return Problem(
        "DRAM_TOO_SMALL",
        f"chip {chip}",
        f"{need - target.dram_bytes} bytes more DRAM are needed than the target has",
        f"at most {target.dram_bytes}",
        what,
    )


def _tokens_that_fit(memory: ChipMemory, p: Placement, room: int) -> int:
    """The capacity that the memory beside the shard has room for; states that do not grow stay as they are."""
    grows = [s for s in memory.states.values() if s.spec.growth != "fixed" and not s.ring]
    fixed = sum(s.buf.nbytes for s in memory.states.values()) - sum(s.buf.nbytes for s in grows)
    per_token = sum(p.slots * s.row_bytes for s in grows)
    tokens = (room // PAGE * PAGE - p.io_bytes - fixed) // max(1, per_token)
    return max(0, tokens // p.state_rows * p.state_rows)


def _what_fits(tokens: int, bucket: int) -> str:
    if not tokens:
        return "the weights alone do not fit: use a smaller scheme (--quant) or more chips"
    smaller = f" with --prefill {tokens}" if tokens < bucket else ""
    return f"--max-seq-len {tokens}{smaller} would fit"


def _states(
    g: Graph, calls: Sequence[Call], chip: int, base: int, capacity: int, slots: int, tiling: Tiling
) -> tuple[dict[str, StateBuffer], int]:
    """The states that a chip's calls use, each once, in order; by the graph input that stands for them."""
    out: dict[str, StateBuffer] = {}
    at, multiple = base, int(tiling.state_rows.value)
    for call in calls:
        if call.chip != chip:
            continue
        for formal, spec in registry()[call.op].states(call).items():
            value = call.inputs[formal]
            if value in out:
                continue  # another layer's
            part = g.parts.get(value)
            whole = spec if part is None else spec.model_copy(update={"name": part.state, "heads": part.total})
            rows = whole.rows(capacity, int(tiling.key_tile.value), multiple)
            size = slots * rows * whole.row_bytes(spec.heads)
            ring = whole.growth == "ring" and rows < align(capacity, multiple)
            out[value] = StateBuffer(whole, Buffer(whole.name, Space.DRAM, size, base=at), spec.heads, rows, ring)
            at = align(at + size, PLACED)
    return out, at


def weight_bytes(calls: Sequence[Call], g: Graph, target: Target) -> dict[str, int]:
    """Bytes of every packed weight in a shard, by name.

    Raises:
        CapacityError: TILE_TOO_LARGE for each weight that no slot of the ring holds.
    """
    out: dict[str, int] = {}
    problems: dict[str, Problem] = {}
    for call in calls:
        for formal in registry()[call.op].weights(call.attrs):
            name = call.inputs[formal]
            try:
                out[name] = weight_handle(call, formal, g.schemes[name], target, 0).nbytes
            except CapacityError as e:
                problems[name] = e.problems[0]
    if problems:
        raise CapacityError(problems.values())
    return out


def _weights_of(
    call: Call, g: Graph, target: Target, at: int, max_seq_len: int, have: Mapping[str, Placed]
) -> list[Placed]:
    out: list[Placed] = []
    kernel = registry()[call.op]
    matrices, vectors = kernel.weights(call.attrs), kernel.vectors(call.attrs)
    for formal, name in call.inputs.items():
        if name in have or any(p.handle.name == name for p in out):
            continue
        if formal in matrices:
            handle = weight_handle(call, formal, call.schemes[formal], target, at)
            bias = g.weights[call.inputs[f"b{formal[1:]}"]] if handle.layout.bias else None
            out.append(Placed(handle, g.weights[name], bias))
        elif formal in vectors:
            ref = g.weights[name]
            if formal in ("cos", "sin"):
                # tables are exported long enough for a padded bucket; the NPU reads valid positions only
                ref = RowsTensor(ref, 0, min(max_seq_len, ref.shape[0]))
            out.append(Placed(Plain(name, at, ref.shape), ref, None))
        else:
            continue
        at = align(out[-1].handle.offset + out[-1].handle.nbytes, PLACED)
    return out
