"""Row blocks: what fits, what it costs, and that the program does what the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers

from calc.core.errors import CapacityError
from calc.core.isa import ITEMSIZE, Engine, Space
from calc.core.options import CompileOptions, no_progress
from calc.core.roles import CURRENT, PAST, SLOT
from calc.core.target import Target, load_target
from calc.passes import blocks
from calc.passes.base import Graph
from calc.passes.blocks import Plan
from calc.passes.lower import Lowered
from calc.passes.recipe import load_recipe
from calc.passes.stages import Programs, choose_schemes, fuse, lower_model, place_model, quantize, split
from calc.sim.machine import csr_file, time_programs
from calc.sim.program import Ins
from calc.sim.timing import Clock
from calc.stages.source import Source, open_source
from tests.conftest import GLASS
from tests.field.field_models import save, t0
from tests.field.field_models import target as target_file

SEQ = 64
CUTS = {"whole": blocks._cut_never, "halves": blocks._cut_halves, "calls": blocks._cut_always}


@cache
def exported(model: Path) -> Source:
    return open_source(model, CompileOptions(prefill=(SEQ,), batch=(), max_seq_len=96), no_progress)


def small(tmp_path: Path, sram: int, chips: int = 1) -> Target:
    """A target with so many KiB of SRAM, and small tiles."""
    path = tmp_path / f"{sram}-{chips}.toml"
    return load_target(target_file(path, chips=chips, sram=sram * 1024, weight_tile=16384, score_tile=8192))


def lowered(model: Path, target: Target, how: str = "layers", quant: str = "bf16") -> Programs:
    source = exported(model)
    graphs = {v: Graph(g.model.clone(), dict(g.weights)) for v, g in source.graphs().items()}
    f = fuse(source.exported.spec, source.context, graphs, {}, no_progress)
    choose_schemes(f, load_recipe(quant))
    return lower_model(place_model(quantize(split(f, target, how)), target), no_progress)


def only(programs: Programs) -> Lowered:
    ((_, low),) = programs.lowered.items()
    return low


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Offer one way to cut only."""

    def choose(kind: str) -> None:
        for name in ("_cut_never", "_cut_halves", "_cut_always"):
            monkeypatch.setattr(blocks, name, CUTS[kind])

    return choose


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.MixtralConfig(
        **t0(num_local_experts=4, num_experts_per_tok=2, hidden_size=128, intermediate_size=96, head_dim=32)
    )
    return save(config, tmp_path_factory.mktemp("moe") / "m")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of layers with a RoPE table each, in turns."""
    config = transformers.Gemma3TextConfig(
        **t0(
            hidden_size=128,
            intermediate_size=192,
            head_dim=32,
            num_hidden_layers=5,
            query_pre_attn_scalar=32,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            rope_parameters=...,
        )
    )
    return save(config, tmp_path_factory.mktemp("windows") / "m")


# -- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chips", "how"), [(1, "layers"), (2, "layers"), (2, "tensor")])
def test_more_sram_never_hurts(tmp_path: Path, chips: int, how: str) -> None:
    """From the least SRAM on everything fits, and costs no more than with less."""
    before = None
    for sram in (88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 224):
        target = small(tmp_path, sram, chips)
        try:
            low = only(lowered(GLASS, target, how))
        except CapacityError as e:
            assert before is None, f"{sram} KiB is refused where less was enough"
            assert set(e.codes) == {"SRAM_TOO_SMALL"}
            continue
        assert all(p.sram_peak <= target.sram_bytes for p in low.programs.values())
        assert low.plan in low.candidates
        assert before is None or low.plan.cycles <= before * 1.01
        before = low.plan.cycles
    assert low.plan.kind == "whole" and low.plan.regions[0].block is None
    assert low.plan.spill_bytes == 0


def test_layers_of_two_kinds_are_sized_together(tmp_path: Path, windows: Path) -> None:
    """Both kinds' RoPE tables live at once in the layers between."""
    found = []
    for sram in range(96, 300, 12):
        try:
            found.append(only(lowered(windows, small(tmp_path, sram))).plan.cycles)
        except CapacityError:
            assert not found, f"{sram} KiB is refused where less was enough"
    assert len(found) > 5
    assert found[-1] < found[0]


def test_what_misses_is_said(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as e:
        lowered(GLASS, small(tmp_path, 60))
    (problem,) = e.value.problems
    assert (problem.code, problem.where) == ("SRAM_TOO_SMALL", f"prefill_b1_s{SEQ} chip 0")
    missing = int(problem.what.split("need ")[1].split()[0])
    assert missing > 0
    only(lowered(GLASS, small(tmp_path, -(-(60 * 1024 + missing) // 1024))))


@pytest.mark.parametrize("kind", CUTS)
def test_blocks_cover_the_bucket_evenly(tmp_path: Path, kind: str, force: Callable[[str], None]) -> None:
    force(kind)
    plan = only(lowered(GLASS, small(tmp_path, 112))).plan
    sizes = {r.block for r in plan.regions if r.block is not None}
    assert sizes
    for region in plan.regions:
        if region.block is not None:
            assert region.block % blocks.BLOCK_MULTIPLE == 0
            assert (region.blocks(SEQ) - 1) * region.block < SEQ <= region.blocks(SEQ) * region.block
    assert [c.name for r in plan.regions for c in r.calls] == [c.name for c in all_calls(tmp_path)]


def all_calls(tmp_path: Path) -> list[object]:
    (calls,) = lowered(GLASS, small(tmp_path, 512)).placed.model.calls.values()
    return list(calls)


# -- what it costs ----------------------------------------------------------------------------------------------------


def moved(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that one full bucket moves, on the clock: weights through the ring, and spilled rows, by address."""
    ((v, low),) = programs.lowered.items()
    scratch = {c: m.scratch for c, m in programs.placed.memory.chips.items()}
    found: Counter[str] = Counter()
    price = Clock._dma

    def counted(self: Clock, ins: Ins) -> object:
        inner = price(self, ins)
        size = ITEMSIZE[ins.operands["dst"].dtype]
        ends = [o for o in (ins.operands["dst"], ins.operands["a"]) if o.space == Space.DRAM]
        spilled = any(o.base >= scratch[self.chip] for o in ends)
        kind = "weights" if ins.engine == Engine.WDMA else "spills" if spilled else "rest"

        def run(regs: list[int]) -> tuple[int, bool]:
            found[kind] += size * int(np.prod(ins.shape(regs)))
            return inner(regs)

        return run

    from calc.core.opspec import Cost
    from calc.sim import timing

    monkeypatch.setitem(timing._PRICES, Cost.DMA, counted)
    csr = csr_file({PAST: [0], CURRENT: [v.seq], SLOT: [0]})
    total = time_programs(programs.placed.target, {c: p.records for c, p in low.programs.items()}, csr)
    assert total.dram_bytes == sum(found.values())
    return found


def assert_counted(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Plan:
    plan, found = only(programs).plan, moved(programs, monkeypatch)
    assert found["weights"] == plan.weight_bytes
    assert found["spills"] == plan.spill_bytes
    assert found["rest"] > 0
    return plan


@pytest.mark.parametrize(("chips", "how"), [(1, "layers"), (2, "layers"), (2, "tensor")])
@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("sram", [100, 128, 256])
def test_the_clock_counts_what_the_plan_says(
    tmp_path: Path,
    chips: int,
    how: str,
    kind: str,
    sram: int,
    force: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(kind)
    plan = assert_counted(lowered(GLASS, small(tmp_path, sram, chips), how), monkeypatch)
    assert (plan.spill_bytes > 0) == (sram < 256)


@pytest.mark.parametrize("quant", ["w8a8", "w4a16"])
def test_the_clock_counts_quantized_weights(tmp_path: Path, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = assert_counted(lowered(GLASS, small(tmp_path, 112), quant=quant), monkeypatch)
    assert plan.regions[0].block is not None


def test_weights_are_read_once_per_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In closed form: blocks times the packed bytes of the layers, the head once."""
    programs = lowered(GLASS, small(tmp_path, 128))
    low, memory = only(programs), programs.placed.memory
    assert low.plan.kind == "whole"
    sizes = {p.handle.name: p.handle.nbytes for p in memory.weights[0]}
    layers = sum(n for name, n in sizes.items() if "_proj" in name)
    head = next(n for name, n in sizes.items() if "embed" in name)  # tied
    count = low.plan.regions[0].blocks(SEQ)
    assert count == 2
    assert moved(programs, monkeypatch)["weights"] == count * layers + head


def test_the_cheapest_is_taken(tmp_path: Path) -> None:
    for sram in (96, 112, 128):
        low = only(lowered(GLASS, small(tmp_path, sram)))
        assert low.plan.cycles == min(p.cycles for p in low.candidates)
        assert len({p.kind for p in low.candidates}) == len(low.candidates)


def test_scratch_is_in_the_capacity(tmp_path: Path) -> None:
    programs = lowered(GLASS, small(tmp_path, 96))
    low = only(programs)
    assert low.programs[0].scratch > 0
    # the stored rows of at least one activation
    assert low.programs[0].scratch >= SEQ * 128 * 2


def test_blocks_of_experts_stream_them_all_in_each(tmp_path: Path, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = lowered(moe, small(tmp_path, 100))
    plan = only(programs).plan
    assert any(r.block is not None for r in plan.regions)
    assert moved(programs, monkeypatch)["weights"] == plan.weight_bytes
