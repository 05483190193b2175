"""Every fault of the simulator that a sound artefact cannot cause, from programs of a few records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import calc
from calc.calbin.reader import open_calbin
from calc.core.errors import InternalError, RuntimeFault, VerificationError
from calc.core.isa import Alu, DType, Engine, Flag, Op, Space
from calc.core.target import load_target
from calc.kernels.program import Buffer, Instr, LoopNode, Reg, View
from calc.passes.encode import encode
from calc.sim.control import ITERATION_CAP
from calc.sim.engines import compile_instruction
from calc.sim.machine import Machine, csr_file, time_programs
from calc.sim.program import decode
from calc.sim.runtime import Device, Step
from tests.field.conftest import Compiled

MODES = ("fast", "strict")
CSR = csr_file({})
SRAM, DRAM = 4096, 8192


def salu(sub: Alu, a: int, b: int, out: int = 1, *, imm: bool = True) -> Instr:
    return Instr(Op.SALU, Engine.CTL, 0, sub=sub, flags=Flag.IMM if imm else 0, imm=(out, a, b))


def view(space: Space, base: int, dtype: DType, *steps: int) -> View:
    return View(Buffer("b", space, 64, base=base), dtype, steps)


def move(op: Op, dst: View, a: View, count: int) -> Instr:
    return Instr(op, Engine.ADMA, 0, (count,), operands={"dst": dst, "a": a})


def run(programs: Sequence[list[Instr | LoopNode]], mode: str) -> Machine:
    """Run one program per chip; DRAM is written throughout."""
    shards = {c: np.zeros(64, np.uint8) for c in range(len(programs))}
    machine = Machine(SRAM, shards, dict.fromkeys(shards, DRAM - 64), mode)
    for memory in machine.memories.values():
        memory.host_write(64, np.ones(DRAM - 64, np.uint8))
    records = {c: encode(p) for c, p in enumerate(programs)}
    machine.load(records, dict.fromkeys(records, ("node",))).run(CSR)
    return machine


def fault(body: list[Instr | LoopNode], mode: str) -> RuntimeFault:
    with pytest.raises(RuntimeFault) as caught:
        run([body], mode)
    return caught.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sub", [Alu.DIV, Alu.CDIV, Alu.MOD])
def test_scalar_division_by_zero(mode: str, sub: Alu) -> None:
    error = fault([salu(Alu.ADD, 0, 7), salu(sub, 1, 0)], mode)
    assert error.codes == ("SIM_DIVISION",)
    assert error.problems[0].where == "instruction 1"
    assert fault([salu(sub, 1, 5, imm=False)], mode).codes == ("SIM_DIVISION",)


@pytest.mark.parametrize("mode", MODES)
def test_loops_without_end(mode: str) -> None:
    endless: list[Instr | LoopNode] = [LoopNode(Reg(2), 2**31 - 1, 0)]
    assert fault(endless, mode).codes == ("SIM_STEP_CAP",)
    counted = [salu(Alu.ADD, 0, 2**40), LoopNode(Reg(2), Reg(1), 0)]
    assert fault(counted, mode).codes == ("SIM_STEP_CAP",)
    nested: list[Instr | LoopNode] = [LoopNode(Reg(3), ITERATION_CAP, 0, [])]
    with pytest.raises(RuntimeFault):
        run([[LoopNode(Reg(2), 1, 0), *nested]], mode)
    run([[LoopNode(Reg(2), -5, 0, [salu(Alu.DIV, 0, 0)])]], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("space", "base", "count"),
    [
        (Space.SRAM, SRAM - 4, 2),
        (Space.SRAM, SRAM, 1),
        (Space.SRAM, -4, 1),
        (Space.DRAM, DRAM - 4, 2),
        (Space.DRAM, 2**50, 1),
        (Space.DRAM, 60, 2),
    ],
)
def test_accesses_outside_of_a_memory(mode: str, space: Space, base: int, count: int) -> None:
    """Also one that begins in the shard and ends behind it."""
    there, sram = view(space, base, DType.F32, 4), view(Space.SRAM, 0, DType.F32, 4)
    error = fault([move(Op.LOAD, sram, there, count)], mode)
    assert error.codes == ("SIM_OUT_OF_BOUNDS",), error
    assert error.problems[0].where


@pytest.mark.parametrize("mode", MODES)
def test_an_access_of_nothing_is_allowed_anywhere(mode: str) -> None:
    sram = view(Space.SRAM, 0, DType.F32, 4)
    run([[move(Op.LOAD, sram, view(Space.DRAM, 64, DType.F32, 4), 0)]], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_its_table(mode: str, index: int) -> None:
    ids, out = view(Space.SRAM, 0, DType.I32, 4), view(Space.SRAM, 64, DType.F32, 16, 4)
    table = view(Space.DRAM, 128, DType.F32, 16, 4)
    body: list[Instr | LoopNode] = [
        move(Op.LOAD, ids, view(Space.DRAM, 1024, DType.I32, 4), 1),
        Instr(Op.LOADG, Engine.ADMA, 0, (1, 4), imm=(4,), operands={"dst": out, "a": table, "b": ids}),
    ]
    machine = Machine(SRAM, {0: np.zeros(64, np.uint8)}, {0: DRAM - 64}, mode)
    memory = machine.memories[0]
    memory.host_write(64, np.ones(DRAM - 64, np.uint8))
    program = machine.load({0: encode(body)}, {0: ("node",)})
    memory.host_write(1024, np.array([3], np.int32))
    program.run(CSR)
    memory.host_write(1024, np.array([index], np.int32))
    with pytest.raises(RuntimeFault) as caught:
        program.run(CSR)
    assert caught.value.codes == ("SIM_BAD_INDEX",)
    assert caught.value.problems[0].expected == "0..3"


def test_the_host_reads_and_writes_within_dram() -> None:
    memory = Machine(SRAM, {0: np.zeros(64, np.uint8)}, {0: 128}, "fast").memories[0]
    memory.host_write(64, np.zeros(32, np.float32))
    for call in (
        lambda: memory.host_write(188, np.zeros(2, np.float32)),
        lambda: memory.host_write(0, np.zeros(1, np.float32)),
        lambda: memory.host_read(190, DType.F32, (1,)),
        lambda: memory.host_read(-4, DType.F32, (1,)),
    ):
        with pytest.raises(RuntimeFault) as caught:
            call()
        assert caught.value.codes == ("SIM_OUT_OF_BOUNDS",)


def send(to: int) -> Instr:
    return Instr(Op.SEND, Engine.LINK, 0, (1,), imm=(to,), operands={"a": view(Space.DRAM, 64, DType.F32, 4)})


def receive(frm: int) -> Instr:
    return Instr(Op.RECV, Engine.LINK, 0, (1,), imm=(frm,), operands={"dst": view(Space.SRAM, 0, DType.F32, 4)})


@pytest.mark.parametrize("mode", MODES)
def test_chips_that_wait_for_each_other(mode: str) -> None:
    run([[send(1), receive(1)], [receive(0), send(0)]], mode)
    for programs in ([[receive(1)], [receive(0)]], [[receive(1)], []], [[send(1), receive(2)], [receive(0)], []]):
        with pytest.raises(RuntimeFault) as caught:
            run(programs, mode)
        assert caught.value.codes == ("SIM_LINK_DEADLOCK",)


@pytest.mark.parametrize("mode", MODES)
def test_messages_that_do_not_meet(mode: str) -> None:
    with pytest.raises(RuntimeFault) as caught:
        run([[send(1), send(1)], [receive(0)]], mode)
    assert caught.value.codes == ("SIM_LINK_LEFT",)
    assert caught.value.problems[0].got == "{'0 to 1': 1}"
    for other in (
        Instr(Op.RECV, Engine.LINK, 0, (2,), imm=(0,), operands={"dst": view(Space.SRAM, 0, DType.F32, 4)}),
        Instr(Op.RECV, Engine.LINK, 0, (1,), imm=(0,), operands={"dst": view(Space.SRAM, 0, DType.BF16, 2)}),
    ):
        with pytest.raises(RuntimeFault) as caught:
            run([[send(1)], [other]], mode)
        assert caught.value.codes == ("SIM_LINK_MISMATCH",)


def test_the_clock_finds_deadlocks_too() -> None:
    target = load_target("calculet-1chip")
    wait = Instr(Op.WAIT, Engine.VEC, 0, imm=(9, 1))
    with pytest.raises(RuntimeFault) as caught:
        time_programs(target, {0: encode([wait])}, CSR)
    assert caught.value.codes == ("SIM_DEADLOCK",)
    with pytest.raises(RuntimeFault) as caught:
        time_programs(target, {0: encode([receive(1)]), 1: encode([])}, CSR)
    assert caught.value.codes == ("SIM_LINK_DEADLOCK",)
    signal = Instr(Op.SIGNAL, Engine.MAT, 0, imm=(9, 1))
    assert time_programs(target, {0: encode([signal, wait])}, CSR).cycles >= 0


def test_loops_that_do_not_match() -> None:
    for ops, what in (((Op.END,), "END without LOOP"), ((Op.LOOP, Op.LOOP, Op.END), "LOOP without END")):
        records = encode([Instr(op, Engine.CTL, 0, (1,)) for op in ops])
        with pytest.raises(RuntimeFault) as caught:
            decode(records)
        assert caught.value.codes == ("SIM_BAD_PROGRAM",)
        assert caught.value.problems[0].what == what


def test_an_opcode_without_a_handler_is_our_bug() -> None:
    (ins, _) = decode(encode([Instr(Op.VMAP, Engine.VEC, 0, (1,))])).ins
    object.__setattr__(ins, "op", 99)
    with pytest.raises(InternalError, match="no handler for opcode 99"):
        compile_instruction(ins, None)


def test_names_the_artefact_does_not_have(compiled: Compiled) -> None:
    device = Device(open_calbin(compiled()))
    with pytest.raises(RuntimeFault) as caught:
        device.run(Step("prefill_b1_s9", ((3,),), (0,), (0,)))
    assert caught.value.codes == ("NO_SUCH_SUBMODEL",)
    with pytest.raises(RuntimeFault) as caught:
        device.time("encode", [1], [0])
    assert caught.value.codes == ("NO_SUCH_SUBMODEL",)
    (sub,) = device.prefill_buckets
    lost = sub.model_copy(update={"inputs": (sub.inputs[0].model_copy(update={"name": "x"}),)})
    device.manifest = device.manifest.model_copy(update={"submodels": (lost, *device.decode_batches)})
    with pytest.raises(RuntimeFault) as caught:
        device.prefill([3])
    assert caught.value.codes == ("NO_SUCH_TENSOR",)


def test_no_golden_vectors(compiled: Compiled) -> None:
    with pytest.raises(VerificationError) as caught:
        calc.verify(compiled())
    assert (caught.value.codes, caught.value.exit_code) == (("GOLDEN_MISSING",), 1)


def test_faults_leave_the_device_usable(compiled: Compiled, tmp_path: Path) -> None:
    """A program that fails midway leaves nothing that the next call trips over: links, semaphores, clocks."""
    for mode in MODES:
        device = Device(open_calbin(compiled(target="calculet-2chip", batch=(1, 2))), mode)
        want = device.prefill([3, 4, 5])
        real = device.machine.memories[1].link_in
        device.machine.memories[1].link_in = lambda peer: (_ for _ in ()).throw(RuntimeFault(_problem()))
        with pytest.raises(RuntimeFault):
            device.prefill([9, 9, 9, 9])
        device.machine.memories[1].link_in = real
        assert np.array_equal(device.prefill([3, 4, 5]), want)


def _problem() -> object:
    from calc.core.errors import Problem

    return Problem("SIM_TEST", "here", "broken on purpose")
