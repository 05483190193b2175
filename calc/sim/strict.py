"""Strict mode: every byte is copied and every access checked.

SRAM and unwritten KV hold NaN patterns. Order between engines is followed with vector clocks: a WAIT receives the
clock its SIGNAL sent, and two accesses to one granule of memory of which at least one writes must be ordered by them.
That finds every missing semaphore, whatever the timing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import RING_FREE, DType, Engine, Op, Space
from calc.sim.memory import (
    NP,
    Access,
    Bytes,
    DecodedTile,
    FastMemory,
    Run,
    TileCache,
    TileSpec,
    decode_tile,
    extent,
)
from calc.sim.program import Ins, Operand, Regs

GRANULE = 16
"""Bytes per race-detection cell: every buffer and row starts on a multiple of it."""

POISON = 0xFF
"""Byte of memory that nobody wrote: NaN as BF16 and FP32, -1 as an integer."""

ENGINES = len(Engine)


class Shadow:
    """Account of one memory: which bytes were written, and when each engine last read and wrote each granule."""

    def __init__(self, nbytes: int) -> None:
        self.cells = -(-nbytes // GRANULE)
        self.written = np.zeros(nbytes, np.bool_)
        self.clear_order()

    def clear_order(self) -> None:
        """Nobody has read or written in this call. New pages of zeros cost only where they are used."""
        self.reads = np.zeros((ENGINES, self.cells), np.int32)
        self.writes = np.zeros((ENGINES, self.cells), np.int32)


Grid = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Equally long runs: where the first starts, counts and strides outermost first; the last pair is the run itself."""


@dataclass(frozen=True)
class Footprint:
    """What an access touches, relative to the granule its address lies in.

    Attributes:
        marks: runs of bytes.
        cells: runs of granules; None where they do not lie on a grid of granules.
        scattered: their numbers then, else empty.
    """

    marks: Grid
    cells: Grid | None
    scattered: NDArray[np.int64]


@lru_cache(maxsize=4096)
def footprint(lead: int, shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> Footprint:
    """The bytes and granules of elements `itemsize` bytes long.

    Args:
        lead: address modulo `GRANULE`.
        shape: counts, all positive.
        steps: bytes between elements along each dimension, of either sign.
        itemsize: bytes of an element.
    """
    start, runs, span = _runs(lead, shape, steps, itemsize, 0)
    marks = (start, (*(n for _, n in runs), span), (*(s for s, _ in runs), 1))
    # a gap shorter than a granule holds no whole granule: for granules such runs are one
    start, runs, span = _runs(lead, shape, steps, itemsize, GRANULE - 1)
    first, last = start // GRANULE, (start + span - 1) // GRANULE
    if all(s % GRANULE == 0 for s, _ in runs):
        counts, strides = tuple(n for _, n in runs), tuple(s // GRANULE for s, _ in runs)
        grid = (first, (*counts, last - first + 1), (*strides, 1))
        return Footprint(marks, grid, np.empty(0, np.int64))
    starts = np.array([start], np.int64)
    for s, n in runs:
        starts = (starts[:, None] + s * np.arange(n, dtype=np.int64)).ravel()
    starts.sort()
    low, high = starts // GRANULE, (starts + span - 1) // GRANULE
    # all runs are equally long, so in order of their starts they end in order too: each adds what the last has not
    low[1:] = np.maximum(low[1:], high[:-1] + 1)
    counts_of = np.maximum(high - low + 1, 0)
    ends = np.cumsum(counts_of)
    cells = np.repeat(low - (ends - counts_of), counts_of) + np.arange(ends[-1])
    return Footprint(marks, None, cells)


def _runs(
    lead: int, shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int, gap: int
) -> tuple[int, list[tuple[int, int]], int]:
    """Where the first run starts, (stride, count) of the runs outermost first, and a run's length.

    Runs at most `gap` bytes apart are joined.
    """
    start, span = lead, itemsize
    outer: list[tuple[int, int]] = []
    dims = [(s, n) for n, s in zip(shape, steps, strict=False) if n > 1 and s != 0]
    for s, n in sorted(dims, key=lambda d: abs(d[0])):
        start += min(0, s * (n - 1))
        if abs(s) <= span + gap:
            span += abs(s) * (n - 1)
        else:
            outer.append((abs(s), n))
    return start, outer[::-1], span


def _select(account: NDArray[Any], grid: Grid, origin: int) -> NDArray[Any]:
    """The part of an account ``[..., cells]`` on a grid from `origin`, as a view."""
    first, counts, strides = grid
    at = origin + first
    if len(counts) == 1:
        return account[..., at : at + counts[0]]
    cell, lead = account.itemsize, account.ndim - 1
    shape, steps = (*account.shape[:lead], *counts), (*account.strides[:lead], *(s * cell for s in strides))
    return np.ndarray(shape, account.dtype, account, at * cell, steps)


class Cells:
    """The granules of one access: a view of an account where they lie on a grid, else their numbers."""

    def __init__(self, touched: Footprint, origin: int) -> None:
        self.grid = touched.cells
        self.origin = origin
        self.numbers = touched.scattered + origin if self.grid is None else touched.scattered
        self.dims = 1 if self.grid is None else len(self.grid[1])

    def of(self, account: NDArray[np.int32]) -> NDArray[np.int32]:
        """Their part of an account ``[engines, cells]``."""
        return account[:, self.numbers] if self.grid is None else _select(account, self.grid, self.origin)

    def note(self, account: NDArray[np.int32], clock: np.int32) -> None:
        """Write a clock into their part of one engine's account ``[cells]``."""
        if self.grid is None:
            account[self.numbers] = clock
        else:
            _select(account, self.grid, self.origin)[...] = clock

    def number(self, index: int) -> int:
        """The number of the granule at a flat index of what `of` gave."""
        if self.grid is None:
            return int(self.numbers[index])
        first, counts, strides = self.grid
        where = np.unravel_index(index, counts)
        return self.origin + first + sum(int(i) * s for i, s in zip(where, strides, strict=True))


class StrictMemory(FastMemory):
    """Memories of one chip with every check on."""

    def __init__(self, chip: int, sram: int, shard: Bytes, dynamic: int, cache: TileCache) -> None:
        super().__init__(chip, sram, shard, dynamic, cache)
        self.sram[:] = POISON
        self.dynamic[:] = POISON
        self.shadow = {Space.SRAM: Shadow(sram), Space.DRAM: Shadow(dynamic)}
        self.where = ""
        self.engine = 0
        self.clocks = np.zeros((ENGINES, ENGINES), np.int32)
        self.sent: dict[int, deque[NDArray[np.int32]]] = defaultdict(deque)

    # -- order -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A call starts: SRAM holds nothing, everything before is done."""
        self.sram[:] = POISON
        self.shadow[Space.SRAM] = Shadow(len(self.sram))
        self.shadow[Space.DRAM].clear_order()
        self.clocks[:] = 0
        self.sent.clear()

    def order(self, ins: Ins, node: str) -> Run:
        move = {Op.WAIT: self.wait, Op.SIGNAL: self.signal}[Op(ins.op)]
        engine, pc, semaphore, count = ins.engine, ins.pc, ins.imm[0], ins.imm[1]

        def run(regs: Regs) -> None:
            self.begin(engine, pc, node)
            move(engine, semaphore, count)

        return run

    def data(self, ins: Ins, node: str, run: Run) -> Run:
        engine, pc = ins.engine, ins.pc

        def checked(regs: Regs) -> None:
            self.begin(engine, pc, node)
            run(regs)

        return checked

    def sload(self, ins: Ins, regs: Regs) -> int:
        self.begin(ins.engine, ins.pc, "control")
        return super().sload(ins, regs)

    def begin(self, engine: int, pc: int, node: str) -> None:
        """A record is dispatched to an engine: it comes after everything the control engine has done."""
        self.engine = engine
        self.where = f"chip {self.chip} instruction {pc} ({Engine(engine).name}) of {node}"
        np.maximum(self.clocks[engine], self.clocks[Engine.CTL], out=self.clocks[engine])
        self.clocks[engine, engine] += 1

    def signal(self, engine: int, semaphore: int, count: int) -> None:
        """SIGNAL: hand the engine's clock to the next `count` waits."""
        for _ in range(count):
            self.sent[semaphore].append(self.clocks[engine].copy())

    def wait(self, engine: int, semaphore: int, count: int) -> None:
        """WAIT: take the clocks of the next `count` signals.

        Raises:
            RuntimeFault: SIM_DEADLOCK when nobody signals.
        """
        for _ in range(count):
            if not self.sent[semaphore]:
                raise RuntimeFault(
                    Problem(
                        "SIM_DEADLOCK",
                        self.where,
                        f"waits on semaphore {semaphore}, which nothing signals",
                        hint="a SIGNAL is missing",
                    )
                )
            np.maximum(self.clocks[engine], self.sent[semaphore].popleft(), out=self.clocks[engine])

    def finish(self) -> None:
        """The program has halted: every signal was waited for.

        Raises:
            RuntimeFault: SIM_SEMAPHORE_LEFT.
        """
        left = {s: len(q) for s, q in self.sent.items() if q and s != RING_FREE}
        if left:
            raise RuntimeFault(
                Problem("SIM_SEMAPHORE_LEFT", f"chip {self.chip}", "signals that nothing waits for", got=str(left))
            )

    # -- access ------------------------------------------------------------------------------------------------------

    def _locate(self, op: Operand, regs: Regs, shape: tuple[int, ...]) -> tuple[Bytes, int, Shadow | None]:
        address = op.address(regs)
        steps = op.steps[: len(shape)]
        low, high = extent(shape, steps, NP[op.dtype].itemsize)
        if op.space == Space.SRAM:
            mem, base, shadow = self.sram, address, self.shadow[Space.SRAM]
        elif address < self.split:
            mem, base, shadow = self.shard, address, None
        else:
            mem, base, shadow = self.dynamic, address - self.split, self.shadow[Space.DRAM]
        if min(shape, default=1) > 0 and (base + low < 0 or base + high > len(mem)):
            raise RuntimeFault(
                Problem(
                    "SIM_OUT_OF_BOUNDS",
                    self.where,
                    f"an access lies outside {Space(op.space).name}",
                    f"0..{len(mem)}",
                    f"{base + low}..{base + high}",
                )
            )
        return mem, base, shadow

    def _ordered(self, shadow: Shadow, cells: Cells, *, write: bool) -> None:
        clock = self.clocks[self.engine].reshape(-1, *[1] * cells.dims)
        accounts = [("written", shadow.writes)] + ([("read", shadow.reads)] if write else [])
        for verb, account in accounts:
            late = cells.of(account) > clock
            if late.any():
                late = late.reshape(ENGINES, -1)
                other = int(np.argmax(late.any(axis=1)))
                raise RuntimeFault(
                    Problem(
                        "SIM_RACE",
                        self.where,
                        f"{'writes' if write else 'reads'} what {Engine(other).name} has {verb}, without a semaphore",
                        got=f"byte {cells.number(int(np.argmax(late[other]))) * GRANULE}",
                        hint="a WAIT or a SIGNAL is missing, or two buffers overlap",
                    )
                )
        cells.note((shadow.writes if write else shadow.reads)[self.engine], self.clocks[self.engine, self.engine])

    def _checked(self, op: Operand, *, reads: bool, writes: bool) -> Access:
        dt = NP[op.dtype]

        def access(regs: Regs, shape: tuple[int, ...]) -> NDArray[np.generic]:
            steps = op.steps[: len(shape)]
            mem, base, shadow = self._locate(op, regs, shape)
            if min(shape, default=1) <= 0:
                return np.zeros(tuple(max(0, n) for n in shape), dt)
            if shadow is not None:
                origin = base // GRANULE
                touched = footprint(base % GRANULE, shape, steps, dt.itemsize)
                cells = Cells(touched, origin)
                marks = _select(shadow.written, touched.marks, origin * GRANULE)
                if reads:
                    self._ordered(shadow, cells, write=False)
                    if not marks.all():
                        raise RuntimeFault(
                            Problem(
                                "SIM_UNINITIALISED",
                                self.where,
                                f"reads {Space(op.space).name} that nothing has written",
                                got=f"from byte {base}",
                            )
                        )
                if writes:
                    self._ordered(shadow, cells, write=True)
                    marks[...] = True
            elif writes:
                raise RuntimeFault(Problem("SIM_READ_ONLY", self.where, "writes the weight shard"))
            return np.ndarray(shape, dt, mem, base, steps)

        return access

    def read(self, op: Operand) -> Access:
        return self._checked(op, reads=True, writes=False)

    def write(self, op: Operand) -> Access:
        return self._checked(op, reads=False, writes=True)

    def update(self, op: Operand) -> Access:
        return self._checked(op, reads=True, writes=True)

    def load_tile(self, dst: Operand, src: Operand, nbytes: int) -> Callable[[Regs], None]:
        to, frm = self.write(dst), self.read(src)

        def run(regs: Regs) -> None:
            data = frm(regs, (nbytes,))
            to(regs, (nbytes,))[...] = data

        return run

    def tile(self, op: Operand, spec: TileSpec) -> Callable[[Regs], DecodedTile]:
        raw = self.read(Operand(op.space, DType.U8, op.base, op.terms, (1, 0, 0, 0)))

        def run(regs: Regs) -> DecodedTile:
            return decode_tile(np.ascontiguousarray(raw(regs, (spec.nbytes,))).view(np.uint8), spec)

        return run

    def host_write(self, address: int, data: NDArray[np.generic]) -> None:
        super().host_write(address, data)
        a = address - self.split
        self.shadow[Space.DRAM].written[a : a + data.nbytes] = True
