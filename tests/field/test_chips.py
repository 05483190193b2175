"""Models on several chips: as many results as on one, and every part where the manifest says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

import calc
from calc.calbin.reader import open_calbin
from calc.sim.runtime import Device
from tests.field.conftest import Compiled
from tests.field.field_models import compile_graphs, kv, open_device, save, t0, target, tokens


def run(device: Device) -> list[np.ndarray]:
    """A prompt in two chunks and three decode steps: all logits, then KV."""
    sequence = tokens(14)
    out = [device.prefill(sequence[:11])]
    out += [device.decode([sequence[t]], [t], [0])[0] for t in range(11, 14)]
    return [*out, *kv(device, 14)]


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("chips", [3, 4, 16])
def test_field_07_more_chips_than_kv_heads_and_layers(exported: Path, tmp_path: Path, chips: int) -> None:
    report = compile_graphs(exported, tmp_path / "m.calbin", target=target(tmp_path / "t.toml", chips=chips))
    assert sum(report.layers_per_chip) == 2
    assert 0 in report.layers_per_chip
    compile_graphs(exported, tmp_path / "one.calbin")
    device = open_device(tmp_path / "m.calbin", "fast" if chips > 4 else "strict")
    device.calbin.verify_digests()
    assert_same(run(device), run(open_device(tmp_path / "one.calbin")))


def test_more_chips_than_a_target_may_have(exported: Path, tmp_path: Path) -> None:
    from calc.core.errors import UsageError

    with pytest.raises(UsageError) as caught:
        compile_graphs(exported, tmp_path / "m.calbin", target=target(tmp_path / "t.toml", chips=17))
    assert caught.value.code == "TARGET_INVALID"
    assert not (tmp_path / "m.calbin").exists()


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of three layers with four KV heads."""
    home = tmp_path_factory.mktemp("four")
    model = save(transformers.LlamaConfig(**t0(num_key_value_heads=4, num_hidden_layers=3)), home / "m")
    calc.export(model, home / "graphs", calc.CompileOptions(prefill=(8,), max_seq_len=32))
    return home / "graphs"


@pytest.mark.parametrize("quant", ["bf16", "w8a8", "w4a16", "w4a8", "w4z"])
def test_field_09_two_chips_equal_one(four_heads: Path, tmp_path: Path, quant: str) -> None:
    for name in ("calculet-1chip", "calculet-2chip"):
        report = compile_graphs(four_heads, tmp_path / f"{name}.calbin", target=name, quant=quant)
        assert min(report.layers_per_chip) >= 1
    one, two = (open_device(tmp_path / f"{n}.calbin") for n in ("calculet-1chip", "calculet-2chip"))
    assert two.manifest.states.states[0].heads == 4
    assert_same(run(two), run(one))


def test_field_57_every_input_and_kv_region_is_bound(compiled: Compiled) -> None:
    calbin = open_calbin(compiled(target="calculet-2chip", batch=(1, 2)))
    m = calbin.manifest
    regions = {(r.chip, r.name): r for r in m.dram}
    for state in m.states.states:
        (part,) = state.parts
        region = regions[part.chip, state.name]
        assert region.offset == part.offset
        assert region.nbytes == m.states.slots * state.rows * state.heads * state.dim * 2
    assert {p.chip for s in m.states.states for p in s.parts} == {0, 1}
    ends = [max(r.offset + r.nbytes for r in m.dram if r.chip == c) for c in (0, 1)]
    for sub in m.submodels:
        assert {p.chip: p.layers for p in sub.chip_map} == {0: (0,), 1: (1,)}
        assert [t.name for t in sub.inputs] == ["input_ids"]
        assert [t.name for t in sub.outputs] == ["logits"]
        for tensor in (*sub.inputs, *sub.outputs):
            at, io = tensor.at, regions[tensor.at.chip or 0, f"io.{tensor.at.chip}"]
            assert at.chip is not None and at.offset is not None
            assert io.offset <= at.offset and at.offset + at.nbytes <= io.offset + io.nbytes <= ends[at.chip]
    # in strict mode memory that nothing has written is an error: every stage finds its inputs and its KV
    device = Device(calbin, "strict")
    assert all(np.isfinite(x).all() for x in run(device))
