"""Every wait of a program whose loops iterate: needed, or proven superfluous by an account of its own.

A dropped SIGNAL and its WAIT must be a race exactly where two accesses are then unordered. The account here is naive:
it writes down every access of a sound run and asks the graph of program order, dispatch and semaphores for a path. It
shares no code with strict mode's clocks, nor with the pass that puts the waits in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import transformers

from calc.calbin.reader import open_calbin
from calc.core.errors import RuntimeFault
from calc.core.isa import Engine, Op
from calc.sim.strict import StrictMemory
from tests.field.field_models import compile_model, save, t0, target
from tests.sim.test_detectors import Bench, nop, sync_pairs

SEQ = 40


@dataclass
class Trace:
    """Events of a run: on which engine, at which record, which semaphore; and pairs of accesses that conflict."""

    events: list[tuple[int, int, str, int]] = field(default_factory=list)
    conflicts: set[tuple[int, int]] = field(default_factory=set)

    def races(self, without: frozenset[int]) -> bool:
        """Whether conflicting accesses are unordered once some SIGNAL and WAIT records are gone."""
        before: list[int] = []
        last = [-1] * len(Engine)
        sent: dict[int, deque[int]] = defaultdict(deque)
        for i, (engine, pc, kind, semaphore) in enumerate(self.events):
            known = 0
            for e in (last[engine], last[Engine.CTL]):
                if e >= 0:
                    known |= before[e] | 1 << e
            if pc not in without:
                if kind == "signal":
                    sent[semaphore].append(i)
                elif kind == "wait":
                    e = sent[semaphore].popleft()
                    known |= before[e] | 1 << e
            before.append(known)
            last[engine] = i
        return any(not before[late] >> early & 1 for early, late in self.conflicts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One layer in so little SRAM that rows come in blocks, queries in blocks and keys in tiles: loops within loops."""
    home = tmp_path_factory.mktemp("order")
    model = save(transformers.LlamaConfig(**t0(num_hidden_layers=1)), home / "m")
    toml = target(home / "t.toml", base="calculet-1chip", sram=14 << 10, weight_tile=2048, score_tile=2048)
    report = compile_model(model, home / "m.calbin", prefill=(SEQ,), max_seq_len=64, target=toml)
    assert report.variants[0].row_blocks[0].weight_reads == 3
    return Bench(open_calbin(Path(report.path)), f"prefill_b1_s{SEQ}")


@pytest.fixture(scope="module")
def trace(bench: Bench) -> Trace:
    """A sound run, written down."""
    out = Trace()
    touched: dict[tuple[int, int], dict[tuple[int, bool], int]] = defaultdict(dict)
    begin, ordered = StrictMemory.begin, StrictMemory._ordered

    def began(self, engine, pc, node):
        records = bench.sound
        op = records[pc]["op"]
        kind = {Op.SIGNAL: "signal", Op.WAIT: "wait"}.get(op, "data")
        for _ in range(int(records[pc]["imm"][1]) if kind != "data" else 1):
            out.events.append((engine, pc, kind, int(records[pc]["imm"][0])))
        begin(self, engine, pc, node)

    def noted(self, shadow, cells, *, write):
        numbers = np.arange(shadow.reads.shape[1])[None]
        now = len(out.events) - 1
        for granule in set(cells.of(numbers).reshape(-1).tolist()):
            known = touched[id(shadow), granule]
            for (engine, wrote), when in known.items():
                if engine != self.engine and (wrote or write):
                    out.conflicts.add((when, now))
            known[self.engine, write] = now
        ordered(self, shadow, cells, write=write)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StrictMemory, "begin", began)
        patch.setattr(StrictMemory, "_ordered", noted)
        bench.run(bench.sound)
    return out


def test_loops_iterate(bench: Bench, trace: Trace) -> None:
    """Waits inside loops run several times; else dropping one would say little."""
    runs = defaultdict(int)
    for _, pc, kind, _ in trace.events:
        runs[pc] += kind == "wait"
    waits = [runs[int(i) + 1] for i in sync_pairs(bench.sound)]
    assert max(waits) >= 6
    assert sum(n > 1 for n in waits) > 0.5 * len(waits)


def test_the_sound_program_is_ordered(trace: Trace) -> None:
    assert len(trace.conflicts) > 300
    assert not trace.races(frozenset())
    assert trace.races(frozenset(pc for _, pc, kind, _ in trace.events if kind != "data"))


def race(bench: Bench, dropped: list[int]) -> bool:
    records = bench.sound.copy()
    for i in dropped:
        nop(records[i])
        nop(records[i + 1])
    try:
        bench.run(records)
    except RuntimeFault as e:
        assert e.code == "SIM_RACE"
        return True
    return False


def test_a_dropped_pair_is_a_race_where_it_was_needed(bench: Bench, trace: Trace) -> None:
    """For each pair the two accounts agree; and both say so of a good part of them."""
    found = []
    for i in sync_pairs(bench.sound).tolist():
        needed = trace.races(frozenset((i, i + 1)))
        assert race(bench, [i]) == needed, f"records {i} and {i + 1}"
        found.append(needed)
    assert 0.4 * len(found) <= sum(found) < len(found)


def test_dropped_one_after_another(bench: Bench, trace: Trace) -> None:
    """What is left once no pair can go: each was needed, and the two accounts agree on every step.

    How many can go says what the pass does too much: a loop is one access to it, and its body starts without knowledge
    of what was ordered before. It was 32 of 61; a pass that orders less makes it fewer.
    """
    gone: list[int] = []
    pairs = sync_pairs(bench.sound).tolist()
    for i in pairs:
        trial = [*gone, i]
        needed = trace.races(frozenset(pc for j in trial for pc in (j, j + 1)))
        assert race(bench, trial) == needed, trial
        if not needed:
            gone.append(i)
    assert len(gone) <= 0.55 * len(pairs)
