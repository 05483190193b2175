"""The machine: chips with memories, links between them, and programs run in three modes over one control loop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import CSR_STRIDE, CSRS
from calc.core.optable import spec_of
from calc.core.target import Target
from calc.sim import control
from calc.sim.control import Dispatch
from calc.sim.engines import compile_instruction
from calc.sim.memory import Bytes, FastMemory, TileCache
from calc.sim.program import Code, Ins, Program, decoded
from calc.sim.strict import StrictMemory
from calc.sim.timing import Clock, Counters

Mode = Literal["fast", "strict"]
Links = dict[tuple[int, int], deque[Any]]
_MEMORIES: dict[Mode, type[FastMemory]] = {"fast": FastMemory, "strict": StrictMemory}


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

    def __init__(self, machine: Machine, programs: Mapping[int, Program], nodes: Mapping[int, Sequence[str]]) -> None:
        self.machine = machine
        self.chips: dict[int, tuple[Code, list[Dispatch | None]]] = {}
        for chip, program in programs.items():
            code = decoded(program)
            mem = machine.memories[chip]
            self.chips[chip] = (code, [_bind(ins, mem, nodes[chip]) for ins in code.ins])

    @property
    def code(self) -> dict[int, Code]:
        """The decoded program per chip."""
        return {chip: code for chip, (code, _) in self.chips.items()}

    def run(self, csr: Sequence[int]) -> None:
        """Execute the sub-model once.

        Raises:
            RuntimeFault: what strict mode finds; SIM_OUT_OF_BOUNDS and the faults of loops and links in every mode.
        """
        m = self.machine
        m.links.clear()  # a call that failed may have left messages
        for mem in m.memories.values():
            mem.start()
        runs = {}
        for chip, (code, table) in self.chips.items():
            mem = m.memories[chip]
            runs[chip] = control.run(code, table, csr, mem.sload, lambda ins, c=chip: bool(m.links[(ins.imm[0], c)]))  # type: ignore[misc]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            interleave(runs)
        if left := {f"{a} to {b}": len(queue) for (a, b), queue in m.links.items() if queue}:
            raise RuntimeFault(Problem("SIM_LINK_LEFT", "links", "messages that nobody receives", got=str(left)))
        for chip in self.chips:
            m.memories[chip].finish()


def _bind(ins: Ins, mem: FastMemory, nodes: Sequence[str]) -> Dispatch | None:
    """What executes a record on a memory; None for what the control engine runs or the mode skips."""
    spec = spec_of(ins.op)
    if spec.is_scalar:
        return None
    node = nodes[ins.node] if ins.node < len(nodes) else "?"
    return mem.data(ins, node, compile_instruction(ins, mem)) if spec.is_data else mem.order(ins, node)


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
        kind = _MEMORIES[mode]
        cache = TileCache(cache_bytes)
        self.memories = {c: kind(c, sram, shards[c], dynamic[c], cache) for c in shards}
        for chip, mem in self.memories.items():
            mem.links = self.links
            mem.chip = chip

    def load(self, programs: Mapping[int, Program], nodes: Mapping[int, Sequence[str]]) -> LoadedProgram:
        """Bind a sub-model's programs."""
        return LoadedProgram(self, programs, nodes)


class TimedProgram:
    """One sub-model's programs on all its chips, bound to a target's clock: decoded once, timed for any call.

    Args:
        target: rates and start costs.
        programs: program per chip.
    """

    def __init__(self, target: Target, programs: Mapping[int, Program]) -> None:
        self.count = Counters()
        self.links: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.chips: dict[int, tuple[Code, Clock, list[Dispatch | None]]] = {}
        for chip, program in programs.items():
            code, clock = decoded(program), Clock(chip, target, self.links, self.count)
            table = [None if spec_of(i.op).is_scalar else clock.dispatcher(i) for i in code.ins]
            self.chips[chip] = (code, clock, table)

    @property
    def code(self) -> dict[int, Code]:
        """The decoded program per chip."""
        return {chip: code for chip, (code, _, _) in self.chips.items()}

    @property
    def records(self) -> int:
        """Records over all chips: what keeping it costs memory for."""
        return sum(len(code.ins) for code, _, _ in self.chips.values())

    def run(self, csr: Sequence[int]) -> Counters:
        """Time one call.

        Args:
            csr: the call's CSR file.

        Returns:
            Counters over all chips; `cycles` when the last chip is done, without the host's time per call.

        Raises:
            RuntimeFault: SIM_DEADLOCK, SIM_LINK_DEADLOCK, and the faults of loops.
        """
        self.count.clear()
        self.links.clear()
        runs = {}
        for chip, (code, clock, table) in self.chips.items():
            clock.clear()
            runs[chip] = control.run(code, table, csr, clock.sload, clock.ready)
        interleave(runs)
        cycles = max(clock.finished for _, clock, _ in self.chips.values())
        return replace(self.count, cycles=cycles, busy=dict(self.count.busy))


def time_programs(target: Target, programs: Mapping[int, Program], csr: Sequence[int]) -> Counters:
    """Run the programs once without data on the target's clock; see `TimedProgram`."""
    return TimedProgram(target, programs).run(csr)
