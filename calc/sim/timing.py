"""The clock: turns what a program counts (MACs, elements, bytes) into cycles at a target's rates.

Engines run in parallel, each in order; WAIT and SIGNAL carry times; the two DMA queues share the chip's DRAM bus.
No data is touched. Values that a program computes from data (routed experts) are taken as even routing: the formula
stands in the SLOAD record.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import ITEMSIZE, DType, Engine, Fn, Op
from calc.core.target import Target
from calc.sim.control import Dispatch
from calc.sim.program import Ins

SPECIAL = frozenset({Fn.DIV, Fn.EXP, Fn.EXPSUB, Fn.RSQRT, Fn.TANH, Fn.SIGMOID, Fn.SILU, Fn.GELU, Fn.GELU_TANH})
"""Functions at the vector engine's special rate."""


@dataclass
class Counters:
    """What one call did. Busy cycles are per engine; `cycles` is when the last chip finished, host time excluded."""

    macs: int = 0
    vector_ops: int = 0
    dram_bytes: int = 0
    link_bytes: int = 0
    instructions: int = 0
    cycles: int = 0
    busy: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda k: self.busy[k]) if self.busy else "none"


class Clock:
    """Times one chip's program while the control engine walks it."""

    def __init__(self, chip: int, target: Target, links: dict[tuple[int, int], deque[int]], counters: Counters) -> None:
        self.chip = chip
        r, c = target.rates, target.costs
        self.dram, self.link = r.dram.value, r.link.value
        self.mac: dict[int, float] = {
            DType.I8: r.mac_int8.value,
            DType.BF16: r.mac_bf16.value,
            DType.F32: r.mac_f32.value,
        }
        self.vec, self.special = r.vector.value, r.vector_special.value
        self.start = {
            k: int(getattr(c, k).value) for k in ("dma_start", "matrix_start", "vector_start", "link_start", "dispatch")
        }
        self.links = links
        self.count = counters
        self.now = [0] * len(Engine)
        self.bus = 0
        self.signals: dict[int, deque[int]] = defaultdict(deque)

    def dispatcher(self, ins: Ins) -> Dispatch:
        """What the control engine calls for a data or semaphore record."""
        if ins.op == Op.WAIT:
            return self._wait(ins)
        if ins.op == Op.SIGNAL:
            return self._signal(ins)
        cost = self._cost(ins)
        engine = ins.engine
        step = self.start["dispatch"]

        def run(regs: list[int]) -> None:
            self.now[0] += step
            self.count.instructions += 1
            cycles, bus = cost(regs)
            begin = max(self.now[engine], self.now[0])
            if bus:
                begin = max(begin, self.bus)
                self.bus = begin + cycles
                self.count.busy["dram"] += cycles
            else:
                self.count.busy[Engine(engine).name.lower()] += cycles
            self.now[engine] = begin + cycles
            if ins.op == Op.SEND:
                self.links[(self.chip, ins.imm[0])].append(self.now[engine])
            elif ins.op == Op.RECV:
                self.now[engine] = max(self.now[engine], self.links[(ins.imm[0], self.chip)].popleft())

        return run

    def sload(self, ins: Ins, regs: list[int]) -> int:
        """The value the program would read under even routing; the control engine has waited for it."""
        _, m, x, y, _, d = ins.imm
        self.now[0] += self.start["dispatch"]
        return m * (regs[x] if x >= 0 else 1) * (regs[y] if y >= 0 else 1) // d

    def ready(self, ins: Ins) -> bool:
        """Whether the other chip has sent."""
        return bool(self.links[(ins.imm[0], self.chip)])

    @property
    def finished(self) -> int:
        """When the last engine is done."""
        return max(self.now)

    def _wait(self, ins: Ins) -> Dispatch:
        engine, sem, n = ins.engine, ins.imm[0], ins.imm[1]

        def run(regs: list[int]) -> None:
            queue = self.signals[sem]
            if len(queue) < n:
                raise RuntimeFault(
                    Problem(
                        "SIM_DEADLOCK",
                        f"chip {self.chip} instruction {ins.pc}",
                        f"waits on semaphore {sem}, which nothing signals",
                    )
                )
            for _ in range(n):
                self.now[engine] = max(self.now[engine], queue.popleft())

        return run

    def _signal(self, ins: Ins) -> Dispatch:
        engine, sem, n = ins.engine, ins.imm[0], ins.imm[1]

        def run(regs: list[int]) -> None:
            self.signals[sem].extend([max(self.now[engine], self.now[0])] * n)

        return run

    def _cost(self, ins: Ins) -> Callable[[list[int]], tuple[int, bool]]:
        shape, count = ins.shape, self.count
        if ins.op in (Op.LOAD, Op.STORE, Op.LOADG):
            size = ITEMSIZE[ins.operands["dst"].dtype]
            start, rate = self.start["dma_start"], self.dram

            def dma(regs: list[int]) -> tuple[int, bool]:
                nbytes = size * math.prod(shape(regs))
                count.dram_bytes += nbytes
                return (start + math.ceil(nbytes / rate) if nbytes else 0), True

            return dma
        if ins.op in (Op.SEND, Op.RECV):
            operand = ins.operands["a" if ins.op == Op.SEND else "dst"]
            size = ITEMSIZE[operand.dtype]
            sends = ins.op == Op.SEND

            def link(regs: list[int]) -> tuple[int, bool]:
                nbytes = size * math.prod(shape(regs))
                if not sends:
                    return 0, False
                count.link_bytes += nbytes
                return self.start["link_start"] + math.ceil(nbytes / self.link), False

            return link
        if ins.op == Op.GEMM:
            rate, start = self.mac[ins.operands["a"].dtype], self.start["matrix_start"]

            def gemm(regs: list[int]) -> tuple[int, bool]:
                macs = math.prod(shape(regs))
                count.macs += macs
                return (start + math.ceil(macs / rate) if macs else 0), False

            return gemm
        rate = (
            self.special if (ins.op == Op.VMAP and ins.sub in SPECIAL) or ins.op in (Op.VTOPK, Op.VBUCKET) else self.vec
        )
        start = self.start["vector_start"]

        def vector(regs: list[int]) -> tuple[int, bool]:
            elements = math.prod(shape(regs))
            count.vector_ops += elements
            return (start + math.ceil(elements / rate) if elements else 0), False

        return vector
