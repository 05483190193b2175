"""Verifiers: the legal form of what each stage hands on. They check with code of their own, not with the stage's.

A model can be wrong, and the stage says so to its user; what these find is our bug (`InternalError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from calc.core.errors import InternalError
from calc.core.target import Target
from calc.kernels import registry
from calc.kernels.base import Call
from calc.passes.base import Graph
from calc.passes.lower import ChipProgram
from calc.passes.place import Placement


def verify_calls(where: str, g: Graph, calls: Sequence[Call]) -> None:
    """Fused: every value is made once, before it is read, and every matrix is a weight of the checkpoint.

    Raises:
        InternalError: with the node and the value.
    """
    inputs = {v.name for v in g.model.graph.inputs}
    made: set[str] = set()
    for c in calls:
        for formal, value in c.inputs.items():
            if value not in made and value not in inputs and value not in g.weights:
                raise InternalError(f"{where}: {c.name} reads {formal} = {value}, which nothing has made before it")
        for value in c.outputs:
            if value in made:
                raise InternalError(f"{where}: {c.name} makes {value}, which was made before")
            made.add(value)
        for formal in registry()[c.op].weights(c.attrs):
            if c.inputs[formal] not in g.weights:
                raise InternalError(f"{where}: {c.name} takes {formal} = {c.inputs[formal]}, which is no weight")
    for out in g.model.graph.outputs:
        if out.name not in made:
            raise InternalError(f"{where}: nothing makes the output {out.name}")


def verify_chips(where: str, calls: Sequence[Call], chips: int) -> None:
    """Partitioned: every call is on a chip of the board, and reads what its own chip has made.

    Raises:
        InternalError: with the node.
    """
    home: dict[str, int] = {}
    for c in calls:
        if not 0 <= c.chip < chips:
            raise InternalError(f"{where}: {c.name} runs on chip {c.chip} of {chips}")
        for value in c.inputs.values():
            if home.get(value, c.chip) != c.chip and not registry()[c.op].crosses:
                raise InternalError(f"{where}: {c.name} on chip {c.chip} reads {value} of chip {home[value]}")
        home.update(dict.fromkeys(c.outputs, c.chip))


def verify_schemes(where: str, g: Graph, calls: Sequence[Call]) -> None:
    """Quantized: every matrix has one scheme, the same in the graph's table and on its nodes.

    Raises:
        InternalError: with the weight.
    """
    for c in calls:
        for formal in registry()[c.op].weights(c.attrs):
            name = c.inputs[formal]
            if g.schemes.get(name) != c.schemes.get(formal):
                got = f"{c.schemes.get(formal)}, not {g.schemes.get(name)}"
                raise InternalError(f"{where}: {c.name} computes {name} as {got}")


def verify_placement(p: Placement) -> None:
    """Placed: on each chip weights lie in the shard, states, inputs and outputs behind it, and nothing overlaps.

    Raises:
        InternalError: with what overlaps.
    """
    for chip, m in p.chips.items():
        ranges = [(h.offset, h.offset + h.nbytes, h.name) for h in m.weights.values()]
        if any(end > m.shard_bytes for _, end, _ in ranges):
            raise InternalError(f"chip {chip}: a weight ends past the shard")
        states = [(s.buf.base or 0, (s.buf.base or 0) + s.buf.nbytes, s.buf.name) for s in m.states.values()]
        io = m.io["io"]
        rest = sorted([*states, (io.base or 0, (io.base or 0) + io.nbytes, "io"), (m.scratch, m.scratch, "scratch")])
        ranges = [*sorted(ranges), (m.shard_bytes, m.shard_bytes, "the shard's end"), *rest]
        for (_, end, first), (start, _, second) in pairwise(ranges):
            if start < end:
                raise InternalError(f"chip {chip}: {second} at {start} overlaps {first}, which ends at {end}")


def verify_program(where: str, program: ChipProgram, target: Target) -> None:
    """Lowered: buffers that are live at one time lie apart, inside the SRAM.

    Raises:
        InternalError: with the buffers.
    """
    if program.sram_peak > target.sram_bytes:
        raise InternalError(f"{where}: a peak of {program.sram_peak} bytes in {target.sram_bytes} of SRAM")
    alive = sorted(program.buffers, key=lambda b: b.base or 0)
    active: list[tuple[int, int, int, str]] = []  # (end, first, last, name) of buffers that a later one may overlap
    for b in alive:
        base = b.base or 0
        active = [a for a in active if a[0] > base]
        for _, first, last, name in active:
            if first <= b.last and b.first <= last:
                raise InternalError(f"{where}: {b.name} lies on {name} while both are live")
        active.append((base + b.nbytes, b.first, b.last, b.name))
