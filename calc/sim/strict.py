"""Strict mode: every byte is copied and every access checked.

SRAM and unwritten KV hold NaN patterns. Order between engines is followed with vector clocks: a WAIT receives the
clock its SIGNAL sent, and two accesses to one granule of memory of which at least one writes must be ordered by them.
That finds every missing semaphore, whatever the timing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import RING_FREE, DType, Engine, Space
from calc.sim.memory import (
    NP,
    Access,
    Bytes,
    DecodedTile,
    FastMemory,
    Operand,
    Regs,
    TileCache,
    TileSpec,
    decode_tile,
    extent,
)

GRANULE = 16
"""Bytes per race-detection cell: every buffer and row starts on a multiple of it."""

POISON = 0xFF
"""Byte of memory that nobody wrote: NaN as BF16 and FP32, -1 as an integer."""

ENGINES = len(Engine)


class Shadow:
    """Account of one memory: which bytes were written, and when each engine last read and wrote each granule."""

    def __init__(self, nbytes: int) -> None:
        cells = -(-nbytes // GRANULE)
        self.written = np.zeros(nbytes, np.bool_)
        self.reads = np.zeros((ENGINES, cells), np.int32)
        self.writes = np.zeros((ENGINES, cells), np.int32)


class StrictMemory(FastMemory):
    """Memories of one chip with every check on."""

    strict = True

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

    def reset_order(self) -> None:
        """A call starts: SRAM holds nothing, everything before is done."""
        self.sram[:] = POISON
        self.shadow[Space.SRAM] = Shadow(len(self.sram))
        for s in self.shadow.values():
            s.reads[:] = 0
            s.writes[:] = 0
        self.clocks[:] = 0
        self.sent.clear()

    def begin(self, engine: int, pc: int, node: str = "") -> None:
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

    def _cells(self, base: int, shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> NDArray[np.int64]:
        """Granules touched, each once."""
        span = itemsize
        dims = sorted(((s, n) for n, s in zip(shape, steps, strict=False) if n > 1 and s != 0), key=lambda p: abs(p[0]))
        outer = []
        for s, n in dims:
            if 0 < s <= span:
                span = s * (n - 1) + span
            else:
                outer.append((s, n))
        starts = np.array([base], np.int64)
        for s, n in outer:
            starts = (starts[:, None] + s * np.arange(n, dtype=np.int64)).ravel()
        first, last = starts // GRANULE, (starts + span - 1) // GRANULE
        width = int((last - first).max()) + 1
        cells = first[:, None] + np.arange(width)
        return np.unique(cells[cells <= last[:, None]])

    def _ordered(self, shadow: Shadow, cells: NDArray[np.int64], *, write: bool) -> None:
        clock = self.clocks[self.engine][:, None]
        accounts = [("written", shadow.writes)] + ([("read", shadow.reads)] if write else [])
        for verb, account in accounts:
            late = account[:, cells] > clock
            if late.any():
                other = int(np.argmax(late.any(axis=1)))
                raise RuntimeFault(
                    Problem(
                        "SIM_RACE",
                        self.where,
                        f"{'writes' if write else 'reads'} what {Engine(other).name} has {verb}, without a semaphore",
                        got=f"byte {int(cells[np.argmax(late[other])]) * GRANULE}",
                        hint="a WAIT or a SIGNAL is missing, or two buffers overlap",
                    )
                )
        (shadow.writes if write else shadow.reads)[self.engine, cells] = self.clocks[self.engine, self.engine]

    def _checked(self, op: Operand, *, reads: bool, writes: bool) -> Access:
        dt = NP[op.dtype]

        def access(regs: Regs, shape: tuple[int, ...]) -> NDArray[np.generic]:
            steps = op.steps[: len(shape)]
            mem, base, shadow = self._locate(op, regs, shape)
            if min(shape, default=1) <= 0:
                return np.zeros(tuple(max(0, n) for n in shape), dt)
            if shadow is not None:
                cells = self._cells(base, shape, steps, dt.itemsize)
                marks = as_strided(shadow.written[base:], (*shape, dt.itemsize), (*steps, 1))
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
