"""The machine: chips with memories, links between them, and programs run in three modes over one control loop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import CSR_STRIDE, CSRS, Op
from calc.core.target import Target
from calc.sim import control
from calc.sim.control import Dispatch
from calc.sim.engines import compile_instruction
from calc.sim.memory import Bytes, FastMemory, TileCache
from calc.sim.program import Code, Ins, decode
from calc.sim.strict import StrictMemory
from calc.sim.timing import Clock, Counters

Mode = Literal["fast", "strict"]
Links = dict[tuple[int, int], deque[Any]]


def csr_file(values: Mapping[str, Sequence[int]]) -> list[int]:
    """The CSR file for a call: arrays by name, one element per sequence."""
    out = [0] * (CSR_STRIDE * len(CSRS))
    for name, array in values.items():
        base = CSRS.index(name) * CSR_STRIDE
        out[base : base + len(array)] = [int(v) for v in array]
    return out


def interleave(runs: Mapping[int, Iterator[int]]) -> None:
    """Run the chips' programs until all have halted; each runs until it waits for a message.

    Raises:
        RuntimeFault: SIM_LINK_DEADLOCK when every chip waits and none has moved.
    """
    pending = dict(runs)
    before: dict[int, int] = {}
    while pending:
        now: dict[int, int] = {}
        for chip in list(pending):
            try:
                now[chip] = next(pending[chip])
            except StopIteration:
                del pending[chip]
        if pending and now == before:
            raise RuntimeFault(
                Problem("SIM_LINK_DEADLOCK", f"chips {sorted(pending)}", "wait for messages that nobody sends")
            )
        before = now


class LoadedProgram:
    """One sub-model's programs on all its chips, bound to the machine's memories."""

    def __init__(
        self, machine: Machine, records: Mapping[int, NDArray[np.void]], nodes: Mapping[int, Sequence[str]]
    ) -> None:
        self.machine = machine
        self.chips: dict[int, tuple[Code, list[Dispatch | None]]] = {}
        for chip, recs in records.items():
            code = decode(recs)
            mem = machine.memories[chip]
            table = [self._bind(ins, mem, nodes[chip]) for ins in code.ins]
            self.chips[chip] = (code, table)

    @staticmethod
    def _bind(ins: Ins, mem: FastMemory, nodes: Sequence[str]) -> Dispatch | None:
        strict = mem if isinstance(mem, StrictMemory) else None
        node = nodes[ins.node] if ins.node < len(nodes) else "?"
        if ins.op in (Op.WAIT, Op.SIGNAL):
            if strict is None:
                return None
            move = strict.wait if ins.op == Op.WAIT else strict.signal

            def order(regs: list[int]) -> None:
                strict.begin(ins.engine, ins.pc, node)
                move(ins.engine, ins.imm[0], ins.imm[1])

            return order
        if ins.op < Op.LOAD:
            return None
        run = compile_instruction(ins, mem)
        if strict is None:
            return run

        def checked(regs: list[int]) -> None:
            strict.begin(ins.engine, ins.pc, node)
            run(regs)

        return checked

    def run(self, csr: Sequence[int]) -> None:
        """Execute the sub-model once.

        Raises:
            RuntimeFault: what strict mode finds; SIM_OUT_OF_BOUNDS and the faults of loops and links in every mode.
        """
        m = self.machine
        m.links.clear()  # a call that failed may have left messages
        for mem in m.memories.values():
            if isinstance(mem, StrictMemory):
                mem.reset_order()
        runs = {}
        for chip, (code, table) in self.chips.items():
            mem = m.memories[chip]
            runs[chip] = control.run(code, table, csr, _sload(mem), lambda ins, c=chip: bool(m.links[(ins.imm[0], c)]))  # type: ignore[misc]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            interleave(runs)
        if left := {f"{a} to {b}": len(queue) for (a, b), queue in m.links.items() if queue}:
            raise RuntimeFault(Problem("SIM_LINK_LEFT", "links", "messages that nobody receives", got=str(left)))
        for chip in self.chips:
            mem = m.memories[chip]
            if isinstance(mem, StrictMemory):
                mem.finish()


def _sload(mem: FastMemory) -> Callable[[Ins, list[int]], int]:
    def read(ins: Ins, regs: list[int]) -> int:
        if isinstance(mem, StrictMemory):
            mem.begin(ins.engine, ins.pc, "control")
        return int(mem.read(ins.operands["a"])(regs, ())[()])

    return read


class Machine:
    """Chips, memories and links.

    Args:
        sram: bytes of SRAM per chip.
        shards: each chip's weights (mapped, read-only).
        dynamic: bytes of DRAM each chip needs after its shard.
        mode: fast or strict.
        cache_bytes: budget of decoded weight tiles in fast mode.
    """

    def __init__(
        self, sram: int, shards: Mapping[int, Bytes], dynamic: Mapping[int, int], mode: Mode, cache_bytes: int = 4 << 30
    ) -> None:
        self.mode = mode
        self.links: Links = defaultdict(deque)
        kind = StrictMemory if mode == "strict" else FastMemory
        cache = TileCache(cache_bytes)
        self.memories = {c: kind(c, sram, shards[c], dynamic[c], cache) for c in shards}
        for chip, mem in self.memories.items():
            mem.links = self.links
            mem.chip = chip

    def load(self, records: Mapping[int, NDArray[np.void]], nodes: Mapping[int, Sequence[str]]) -> LoadedProgram:
        """Bind a sub-model's programs."""
        return LoadedProgram(self, records, nodes)


def time_programs(target: Target, records: Mapping[int, NDArray[np.void]], csr: Sequence[int]) -> Counters:
    """Run the programs without data on the target's clock.

    Args:
        target: rates and start costs.
        records: program per chip.
        csr: the call's CSR file.

    Returns:
        Counters over all chips; `cycles` when the last chip is done, without the host's time per call.
    """
    count = Counters()
    links: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    runs, clocks = {}, []
    for chip, recs in records.items():
        code = decode(recs)
        clock = Clock(chip, target, links, count)
        table = [clock.dispatcher(i) if i.op >= Op.WAIT else None for i in code.ins]
        runs[chip] = control.run(code, table, csr, clock.sload, clock.ready)
        clocks.append(clock)
    interleave(runs)
    count.cycles = max(c.finished for c in clocks)
    count.busy = dict(count.busy)
    return count
