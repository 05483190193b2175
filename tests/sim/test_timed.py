"""The clock is bound once and starts anew with every call."""

from __future__ import annotations

import pytest

from calc.calbin.reader import open_calbin
from calc.core.errors import RuntimeFault
from calc.core.isa import Alu, Engine, Flag, Op
from calc.core.target import load_target
from calc.kernels.emit import Instr, LoopNode, Reg
from calc.passes.encode import encode
from calc.sim import machine, program, runtime
from calc.sim.machine import TimedProgram, csr_file
from calc.sim.runtime import Device


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records of each program that is decoded."""
    seen: list[int] = []

    def counted(records):
        seen.append(len(records))
        return decode(records)

    decode = program.decode
    monkeypatch.setattr(program, "decode", counted)
    return seen


def test_a_program_is_decoded_once_for_all_modes(tiny_two_chips, decodes):
    device = Device(open_calbin(tiny_two_chips))
    sub = device.decode_batches[0]
    first = device.time(sub.name, [1], [3])
    assert len(decodes) == 2
    far = device.time(sub.name, [1], [40])
    assert far.cycles > first.cycles
    assert device.time(sub.name, [1], [3]) == first
    device.decode([5], [0], [0])
    assert len(decodes) == 2
    assert decodes == [part.instructions for part in sub.chip_map]
    fresh = Device(open_calbin(tiny_two_chips))
    fresh.decode([5], [0], [0])
    assert fresh.time(sub.name, [1], [40]) == far
    assert len(decodes) == 4


def test_kept_clocks_are_bounded(tiny_calbin, decodes, monkeypatch):
    device = Device(open_calbin(tiny_calbin))
    names = [s.name for s in device.manifest.submodels]
    largest = max(s.chip_map[0].instructions for s in device.manifest.submodels)
    monkeypatch.setattr(runtime, "TIMED_RECORDS", 2 * largest)
    want = {n: device.time(n, [1], [2]) for n in names}
    assert len(decodes) == len(names) > 2
    device.time(names[-1], [1], [2])
    assert len(decodes) == len(names)
    assert device.time(names[0], [1], [2]) == want[names[0]]
    assert len(decodes) == len(names) + 1
    monkeypatch.setattr(runtime, "TIMED_RECORDS", 1)
    for n in (names[1], names[1]):
        assert device.time(n, [1], [2]) == want[n]
    # the one in use stays, however large
    assert len(decodes) == len(names) + 2


def test_a_call_that_failed_leaves_no_trace():
    """Where the CSR is 1 an engine waits for a signal that does not come, behind signals and work that are left."""
    wait = Instr(Op.WAIT, Engine.VEC, 0, imm=(9, 2))
    body = [
        Instr(Op.CSRR, Engine.CTL, 0, imm=(1, 64, -1)),
        Instr(Op.SALU, Engine.CTL, 0, sub=Alu.ADD, flags=Flag.IMM, imm=(2, 1, 0)),
        Instr(Op.SIGNAL, Engine.MAT, 0, imm=(9, 1)),
        LoopNode(Reg(3), Reg(2), 0, [wait]),
        Instr(Op.WAIT, Engine.VEC, 0, imm=(9, 1)),
    ]
    timed = TimedProgram(load_target("calculet-1chip"), {0: encode(body)})
    assert timed.records == 7 + 1
    good = timed.run(csr_file({"cur_seq_len": [0]}))
    for _ in range(2):
        with pytest.raises(RuntimeFault) as caught:
            timed.run(csr_file({"cur_seq_len": [1]}))
        assert caught.value.codes == ("SIM_DEADLOCK",)
        assert timed.run(csr_file({"cur_seq_len": [0]})) == good
    assert isinstance(timed.code[0], program.Code)
    assert machine.time_programs(load_target("calculet-1chip"), timed.code, csr_file({})) == good
