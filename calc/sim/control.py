"""The control engine: walks a program, runs its scalar records, dispatches the rest. Shared by every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from calc.core.errors import Problem, RuntimeFault
from calc.core.isa import REGISTERS, Op
from calc.core.opspec import FIRST_QUEUED
from calc.sim.program import Code, Ins

ITERATION_CAP = 1 << 24
"""Loop iterations a program may run per call: far above any real one, so that a damaged bound cannot hang the host."""

Dispatch = Callable[[list[int]], None]


def run(
    program: Code,
    dispatch: Sequence[Dispatch | None],
    csr: Sequence[int],
    sload: Callable[[Ins, list[int]], int],
    ready: Callable[[Ins], bool],
) -> Iterator[int]:
    """Run one program to its HALT.

    Args:
        program: the decoded program.
        dispatch: for each data record what executes it; None for records this mode skips.
        csr: control registers.
        sload: reads one i32 from SRAM for a SLOAD record.
        ready: whether a RECV's message has arrived.

    Yields:
        the records dispatched so far, whenever a RECV has to wait for another chip: waiting without progress shows.

    Raises:
        RuntimeFault: SIM_STEP_CAP, SIM_DIVISION.
    """
    regs = [0] * REGISTERS
    counts: list[int] = []
    iterations = done = 0
    pc = 0
    loop, end, salu, csrr, op_sload, recv, halt = Op.LOOP, Op.END, Op.SALU, Op.CSRR, Op.SLOAD, Op.RECV, Op.HALT
    queued = FIRST_QUEUED
    code, partner, ops, scalars = program.ins, program.partner, program.ops, program.scalars
    while True:
        op = ops[pc]
        if op >= queued:
            f = dispatch[pc]
            done += 1
            if op == recv:
                while not ready(code[pc]):
                    yield done
            if f is not None:
                f(regs)
        elif op == salu:
            fn, rd, ra, b, imm = scalars[pc]
            try:
                regs[rd] = fn(regs[ra], b if imm else regs[b])
            except ZeroDivisionError as e:
                raise RuntimeFault(Problem("SIM_DIVISION", f"instruction {pc}", "scalar division by zero")) from e
        elif op == loop:
            ins = code[pc]
            n = ins.shape(regs)[0]
            if n <= 0:
                pc = partner[pc] + 1
                continue
            iterations += n
            if iterations > ITERATION_CAP:
                raise RuntimeFault(
                    Problem(
                        "SIM_STEP_CAP",
                        f"instruction {pc}",
                        "the program's loops run too long",
                        str(ITERATION_CAP),
                        str(iterations),
                    )
                )
            regs[ins.imm[0]] = 0
            counts.append(n)
        elif op == end:
            start = partner[pc]
            rd = code[start].imm[0]
            regs[rd] += 1
            if regs[rd] < counts[-1]:
                pc = start + 1
                continue
            counts.pop()
        elif op == csrr:
            imm3 = code[pc].imm
            regs[imm3[0]] = csr[imm3[1] + (regs[imm3[2]] if imm3[2] >= 0 else 0)]
        elif op == op_sload:
            regs[code[pc].imm[0]] = sload(code[pc], regs)
        elif op == halt:
            return
        pc += 1
