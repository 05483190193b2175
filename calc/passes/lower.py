"""Lower: a sub-model's calls to one program per chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import CapacityError, Problem
from calc.core.isa import ITEMSIZE, DType, Engine, Op, Space
from calc.core.target import Target
from calc.core.variant import Variant
from calc.kernels import registry
from calc.kernels.base import Call
from calc.kernels.emit import Emitter
from calc.kernels.lowering import Act, Choices, KvBuffers, Lowering, weight_region
from calc.kernels.program import Buffer, Packed, Plain
from calc.passes.allocate import allocate
from calc.passes.encode import encode
from calc.passes.sync import Sync

KV_TILE = 512
"""Keys per attention tile at most, for batch 1 decode; prefill's score budget makes it smaller."""


@dataclass(frozen=True)
class ChipMemory:
    """One chip's DRAM as the lowering sees it: handles of its weights, KV per layer, inputs and outputs."""

    weights: Mapping[str, Packed | Plain]
    shard_bytes: int
    kv: Mapping[int, KvBuffers]
    io: Mapping[str, Buffer]


@dataclass(frozen=True)
class ChipProgram:
    """A chip's program: records, names of the source nodes, SRAM use and the SRAM buffers' places and live ranges."""

    records: NDArray[np.void]
    nodes: tuple[str, ...]
    sram_peak: int
    buffers: tuple[Buffer, ...]


def lower(
    calls: Sequence[Call],
    chip_of: Mapping[str, int],
    variant: Variant,
    chips: Mapping[int, ChipMemory],
    target: Target,
) -> dict[int, ChipProgram]:
    """Write the programs.

    Args:
        calls: the fused graph's nodes in topological order.
        chip_of: the chip each call (by name) runs on.
        variant: the static shape.
        chips: each chip's memory.
        target: tile sizes and SRAM.

    Returns:
        A program for each chip.

    Raises:
        CapacityError: SRAM_TOO_SMALL for each chip whose activations do not fit.
    """
    parts = {}
    for chip, mem in chips.items():
        em = Emitter(
            weight_region("weights", mem.shard_bytes, 0),
            int(target.tiling.weight_ring.value),
            int(target.tiling.weight_tile.value),
        )
        choices = Choices(int(target.tiling.score_tile.value), KV_TILE)
        parts[chip] = Lowering(em, variant, mem.weights, mem.kv, mem.io, choices)
    producer: dict[str, int] = {}
    kernels = registry()
    for call in calls:
        chip = chip_of[call.name]
        low = parts[chip]
        low.em.source(call.name)
        for value in call.inputs.values():
            home = producer.get(value)
            if home is not None and home != chip and value not in low.acts:
                _transfer(parts[home], low, value, home, chip)
        with low.em.scope():
            kernels[call.op].lower(low, call)
        for value in call.outputs:
            producer[value] = chip
    out: dict[int, ChipProgram] = {}
    problems: list[Problem] = []
    for chip, low in parts.items():
        try:
            out[chip] = _finish(low, variant, chip, target)
        except CapacityError as e:
            problems += e.problems
    if problems:
        raise CapacityError(problems)
    return out


def _transfer(src: Lowering, dst: Lowering, value: str, home: int, chip: int) -> None:
    act = src.act(value)
    src.em.source(f"{value}:send")
    src.em.op(Op.SEND, Engine.LINK, (src.rows, act.width), imm=(chip,), a=act.view)
    to = Act(dst.em.sram(value, dst.max_rows * act.row_bytes), act.width, act.dtype)
    dst.em.op(Op.RECV, Engine.LINK, (dst.rows, act.width), imm=(home,), dst=to.view)
    dst.acts[value] = to


def _finish(low: Lowering, variant: Variant, chip: int, target: Target) -> ChipProgram:
    em = low.em
    hint = (
        "compile with a smaller --prefill bucket (longer prompts are run in chunks)"
        if variant.role == "prefill"
        else "compile with a smaller --batch"
    )
    peak = allocate(em.buffers, target.sram_bytes, f"{variant.name} chip {chip}", hint)
    records = encode(Sync().run(em.body))
    used = tuple(b for b in em.buffers if b.base is not None)
    return ChipProgram(records, tuple(em.nodes), peak, used)


def io_buffers(variant: Variant, vocab: int, base: int) -> tuple[dict[str, Buffer], int]:
    """Input and output buffers of a sub-model from DRAM address `base` on, and the end of them."""
    out: dict[str, Buffer] = {}
    at = base
    for name, n, dtype in (
        ("input_ids", variant.batch * variant.seq, DType.I32),
        ("logits", variant.batch * vocab, DType.F32),
    ):
        out[name] = Buffer(name, Space.DRAM, n * ITEMSIZE[dtype], base=at)
        at += -(-n * ITEMSIZE[dtype] // 64) * 64
    return out, at
