"""Each of strict mode's detectors, proven by a damaged program. A compiled program is sound; one edit breaks it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from calc.calbin.reader import Calbin, open_calbin
from calc.core.errors import RuntimeFault
from calc.core.isa import FIRST_SYNC_SEMAPHORE, Alu, Engine, Flag, Op, Space
from calc.sim.machine import Machine, csr_file

Records = np.ndarray


class Bench:
    """Runs an edited copy of one sub-model's program in strict mode."""

    def __init__(self, calbin: Calbin, name: str) -> None:
        self.sub = next(s for s in calbin.manifest.submodels if s.name == name)
        self.calbin = calbin
        self.sound = calbin.program(name, 0).copy()

    def run(self, records: Records, past: int = 0) -> None:
        m = self.calbin.manifest
        shard = self.calbin.shard(0)
        end = max(r.offset + r.nbytes for r in m.dram)
        machine = Machine(m.target.sram_bytes, {0: shard}, {0: end - len(shard)}, "strict")
        mem = machine.memories[0]
        ids = np.ones((self.sub.batch, self.sub.seq), np.int32)
        mem.host_write(self.sub.inputs[0].at.offset, ids)
        csr = csr_file(
            {
                "past_kv_cur_seq_len": [past] * self.sub.batch,
                "cur_seq_len": [self.sub.seq] * self.sub.batch,
                "kv_slot": list(range(self.sub.batch)),
            }
        )
        machine.load({0: records}, {0: self.sub.chip_map[0].nodes}).run(csr)

    def broken(self, edit: Callable[[Records], object], past: int = 0) -> RuntimeFault:
        """The fault that an edit causes."""
        records = self.sound.copy()
        edit(records)
        with pytest.raises(RuntimeFault) as e:
            self.run(records, past)
        return e.value


@pytest.fixture(scope="module")
def decode(tiny_calbin):
    with open_calbin(tiny_calbin) as c:
        yield Bench(c, "decode_b1_s1")


@pytest.fixture(scope="module")
def prefill(tiny_calbin):
    with open_calbin(tiny_calbin) as c:
        yield Bench(c, "prefill_b1_s16")


def nop(rec: np.void) -> None:
    """A scalar record that changes nothing."""
    rec["op"], rec["engine"], rec["sub"], rec["flags"] = Op.SALU, Engine.CTL, Alu.ADD, Flag.IMM
    rec["imm"] = (63, 63, 0, 0, 0, 0)


def sync_pairs(records: Records) -> np.ndarray:
    """Indices of SIGNALs that the sync pass put in; each one's WAIT is the next record."""
    return np.flatnonzero((records["op"] == Op.SIGNAL) & (records["imm"][:, 0] >= FIRST_SYNC_SEMAPHORE))


def first(records: Records, op: Op, nth: int = 0) -> int:
    return int(np.flatnonzero(records["op"] == op)[nth])


def test_the_sound_programs_pass(decode, prefill):
    decode.run(decode.sound)
    prefill.run(prefill.sound)


def test_a_dropped_wait_names_instruction_and_node(decode):
    def edit(records):
        nop(records[sync_pairs(records)[-1] + 1])

    fault = decode.broken(edit)
    assert fault.code in ("SIM_RACE", "SIM_SEMAPHORE_LEFT")
    pairs = sync_pairs(decode.sound)
    fault = decode.broken(lambda r: (nop(r[pairs[0]]), nop(r[pairs[0] + 1])))
    assert fault.code == "SIM_RACE"
    assert "instruction" in fault.problems[0].where
    assert "model." in fault.problems[0].where


def test_a_dropped_signal_is_a_deadlock(decode):
    fault = decode.broken(lambda r: nop(r[sync_pairs(r)[0]]))
    assert fault.code == "SIM_DEADLOCK"


def test_an_extra_signal_is_left_over(decode):
    def edit(records):
        i = sync_pairs(records)[-1]
        records["imm"][i, 1] = 2

    assert decode.broken(edit).code == "SIM_SEMAPHORE_LEFT"


def test_a_ring_one_tile_too_small_is_a_race(decode):
    def edit(records):
        mods = np.flatnonzero((records["op"] == Op.SALU) & (records["sub"] == Alu.MOD))
        records["imm"][mods, 2] -= 1

    assert decode.broken(edit).code == "SIM_RACE"


def test_a_shortened_loop_leaves_elements_unwritten(prefill):
    """The loop over prompt blocks does one block less: the rest of the attention's output is read unwritten."""

    def edit(records):
        i = int(np.flatnonzero((records["op"] == Op.VREDUCE) & (records["dim_regs"] != 0))[0])
        records["dims"][i, 0] = prefill.sub.seq - 1
        records["dim_regs"][i] = 0

    assert prefill.broken(edit).code == "SIM_UNINITIALISED"


def test_a_loop_that_does_not_run_leaves_the_sums_unwritten(prefill):
    def edit(records):
        i = first(records, Op.LOOP)
        records["dims"][i, 0] = 0
        records["dim_regs"][i] = 0

    assert prefill.broken(edit).code == "SIM_UNINITIALISED"


def test_a_swapped_address_is_found(decode):
    """The two operands of the first VMAP with two inputs exchange their places in memory with a third buffer."""

    def edit(records):
        i = int(np.flatnonzero((records["op"] == Op.VMAP) & (records["b"]["space"] == Space.SRAM))[0])
        records["b"]["base"][i] = records["dst"]["base"][i]

    assert decode.broken(edit).code in ("SIM_UNINITIALISED", "SIM_RACE")


def test_use_before_load(decode):
    def edit(records):
        i = first(records, Op.LOADG)
        nop(records[i])

    assert decode.broken(edit).code == "SIM_UNINITIALISED"


def test_reading_kv_that_nothing_wrote(decode):
    """A context of 5 tokens of which only the last was written."""
    with pytest.raises(RuntimeFault) as e:
        decode.run(decode.sound, past=5)
    assert e.value.code == "SIM_UNINITIALISED"


@pytest.mark.parametrize(("space", "limit"), [(Space.SRAM, 18 << 20), (Space.DRAM, 1 << 40)])
def test_out_of_bounds(decode, space, limit):
    def edit(records):
        i = int(np.flatnonzero((records["op"] == Op.LOAD) & (records["a"]["space"] == Space.DRAM))[0])
        records["dst" if space is Space.SRAM else "a"]["base"][i] = limit

    assert decode.broken(edit).code == "SIM_OUT_OF_BOUNDS"


def test_writing_weights(decode):
    def edit(records):
        i = first(records, Op.STORE)
        records["dst"]["base"][i] = 0
        records["dst"]["reg"][i] = 255

    assert decode.broken(edit).code == "SIM_READ_ONLY"


def test_a_token_id_outside_the_table(decode):
    records = decode.sound.copy()
    records["imm"][first(records, Op.LOADG), 0] = 1
    with pytest.raises(RuntimeFault) as e:
        decode.run(records)
    assert e.value.code == "SIM_BAD_INDEX"
