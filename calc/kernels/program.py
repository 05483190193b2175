"""What a program is made of before it has addresses.

Registers, buffers, views, instructions and loops, and the handles of weights. Kernels name these through the emitter
(`emit.py`); the passes give them addresses, order and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from calc.core.isa import ITEMSIZE, DType, Engine, Op, Space, Tile
from calc.core.optable import spec_of
from calc.core.packing import TileLayout
from calc.core.schemes import Scheme


@dataclass(frozen=True)
class Reg:
    """A scalar register."""

    index: int


Dim = int | Reg
Term = tuple[Reg, int]


@dataclass(eq=False)
class Buffer:
    """A range of SRAM or DRAM.

    Attributes:
        manual: its users synchronise themselves (the weight ring, read-only weights).
        base: address, once assigned; weights, states, inputs and outputs have it from the start.
        first, last: first and last step of the program that uses it; with `live_ranges`, during which it is live.
    """

    name: str
    space: Space
    nbytes: int
    manual: bool = False
    base: int | None = None
    first: int = -1
    last: int = -1

    def touch(self, step: int) -> None:
        """Extend the live range to `step`."""
        self.first = step if self.first < 0 else min(self.first, step)
        self.last = max(self.last, step)


@dataclass(frozen=True)
class View:
    """Elements of a buffer: `steps[j]` bytes apart along dimension j, from `offset` plus register terms."""

    buf: Buffer
    dtype: DType
    steps: tuple[int, ...]
    offset: int = 0
    terms: tuple[Term, ...] = ()

    def at(self, offset: int = 0, *terms: Term) -> View:
        """The same elements, moved by `offset` bytes and register terms."""
        return replace(self, offset=self.offset + offset, terms=self.terms + terms)

    def stepped(self, *steps: int) -> View:
        """The same start with other steps."""
        return replace(self, steps=steps)


@dataclass(eq=False)
class Instr:
    """One record before encoding."""

    op: Op
    engine: Engine
    node: int
    dims: tuple[Dim, ...] = ()
    sub: int = 0
    tile: Tile = Tile.NONE
    flags: int = 0
    imm: tuple[int, ...] = ()
    fimm: tuple[float, ...] = ()
    operands: dict[str, View] = field(default_factory=dict)

    def reads(self) -> list[Buffer]:
        """Buffers whose contents the instruction uses."""
        return [self.operands[n].buf for n in spec_of(self.op).uses(self.operands, self.flags)]

    def writes(self) -> list[Buffer]:
        """Buffers the instruction changes."""
        return [self.operands[n].buf for n in spec_of(self.op).changes(self.operands, self.flags)]


@dataclass(eq=False)
class LoopNode:
    """A loop and its body."""

    reg: Reg
    count: Dim
    node: int
    body: list[Instr | LoopNode] = field(default_factory=list)


@dataclass(frozen=True)
class Packed:
    """A weight in a chip's shard as the lowering sees it: where it is and how it is packed.

    `offset` is relative to the shard; `experts` weights of `layout` lie `expert_stride` bytes apart.
    """

    name: str
    offset: int
    layout: TileLayout
    scheme: Scheme
    experts: int = 0

    @property
    def expert_stride(self) -> int:
        """Distance between experts, bytes."""
        return self.layout.nbytes

    @property
    def nbytes(self) -> int:
        """Size in the shard, bytes."""
        return self.layout.nbytes * max(self.experts, 1)


@dataclass(frozen=True)
class Plain:
    """A small weight in the shard, row-major f32 (norm weights, biases, RoPE tables)."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the shard, bytes."""
        size = 4
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class TileRef:
    """The tile a sink is called for: `rows` of it start at column ``first + index * step`` of the output."""

    rows: int
    first: int
    term: tuple[Reg, int] | None

    def columns(self, itemsize: int) -> tuple[int, tuple[Term, ...]]:
        """Offset and register terms of the tile's first output column, for elements of `itemsize` bytes."""
        terms = () if self.term is None else ((self.term[0], self.term[1] * itemsize),)
        return self.first * itemsize, terms


def dense(buf: Buffer, dtype: DType, *shape: int) -> View:
    """A row-major view of the whole buffer."""
    steps, size = [], ITEMSIZE[dtype]
    for n in reversed(shape):
        steps.append(size)
        size *= n
    return View(buf, dtype, tuple(reversed(steps)))
