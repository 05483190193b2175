"""The tiny model split by tensor: strictly verified, and within the reduction's rounding of what one chip gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import calc
from calc.calbin.reader import open_calbin
from calc.core.errors import UnsupportedError
from calc.core.isa import Op
from calc.core.schemes import scheme
from calc.sim.runtime import Device
from tests.conftest import GLASS, compiled, shared
from tests.field.field_models import compile_model, kv, open_device, rel_rms, target, tokens

REDUCTION = 0.01
"""Relative RMS against one chip. A partial sum is FP32 and the chips' sum is rounded once, as the whole is; so only the
order of FP32 sums differs, which turns single BF16 roundings the other way: 2^-9 of a value each, in four layers."""


@pytest.fixture(scope="module", params=[2, 4])
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chips = request.param
    toml = shared(tmp_path_factory, f"tensor-{chips}.toml", lambda path: target(path, chips=chips))
    options = {"prefill": (16,), "batch": (1, 4), "max_seq_len": 64, "target": str(toml), "split": "tensor"}
    return compiled(tmp_path_factory, f"tiny-tensor-{chips}.calbin", **options)


def chips_of(path: Path) -> int:
    return len(open_calbin(path).manifest.shards)


def test_it_verifies_strictly(board: Path) -> None:
    report = calc.verify(board, strict=True)
    assert [c for c in report.checks if not c.ok] == []
    names = {c.name for c in report.checks}
    assert {"rung program: KV", "batch 4 equals batch 1, slot by slot", "strict equals fast, bit for bit"} <= names


def results(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    device = open_device(path, "strict")
    sequence = tokens(44, vocab=1000)
    logits = [device.prefill(sequence[:37])]
    logits += [device.decode([sequence[t]], [t], [0])[0] for t in range(37, 41)]
    device.prefill(sequence[:9], slot=2)
    logits += list(device.decode([sequence[41], sequence[9]], [41, 9], [0, 2]))
    return logits, kv(device, 42) + kv(device, 10, slot=2)


def test_logits_and_kv_are_one_chips(board: Path, tiny_calbin: Path) -> None:
    (logits, state), (want, want_state) = results(board), results(tiny_calbin)
    for got, one in zip(logits, want, strict=True):
        assert got.shape == one.shape == (1024,)
        assert rel_rms([got], [one]) <= REDUCTION
    for got, one in zip(state, want_state, strict=True):
        assert rel_rms([got], [one]) <= REDUCTION
        # the same rows and heads, not only the same size
        assert np.abs(got - one).max() <= 0.1 * np.abs(one).max()


def test_the_programs_are_split(board: Path, tiny_calbin: Path) -> None:
    with open_calbin(board) as c, open_calbin(tiny_calbin) as one:
        m, whole, chips = c.manifest, one.manifest, chips_of(board)
        matrices = sum(s.nbytes for s in whole.shards)
        for shard in m.shards:
            # a fair share of the matrices; norms and RoPE tables on every chip
            assert matrices / chips <= shard.nbytes <= 1.3 * matrices / chips + 65536
        for sub in m.submodels:
            for part in sub.chip_map:
                records, nodes = c.program(sub.name, part.chip), part.nodes
                names = [nodes[r["node"]] for r in records]
                ops = records["op"]
                # two reductions a layer and one gathering, to each of the other chips
                assert np.count_nonzero(ops == Op.SEND) == (2 * 4 + 1) * (chips - 1)
                assert np.count_nonzero(ops == Op.RECV) == (2 * 4 + 1) * (chips - 1)
                assert sum("AllReduce" in n for n in nodes) == 2 * 4
                assert {n.rsplit("@", 1)[1] for n in names if "@" in n and "rows" not in n} == {str(part.chip)}
                assert part.layers == (0, 1, 2, 3)
            starts = [(t.at.chip, t.part.start, t.shape[-1]) for t in sub.outputs]
            assert starts == [(i, 1024 * i // chips, 1024 // chips) for i in range(chips)]


def test_each_chip_holds_its_heads(board: Path, tiny_calbin: Path) -> None:
    """Two KV heads: one a chip on two chips; on four, two chips hold the same one."""
    chips = chips_of(board)
    with open_calbin(board) as c, open_calbin(tiny_calbin) as one:
        m = c.manifest
        first = one.manifest.states.states[0]
        for state in m.states.states:
            assert state.heads == first.heads == 2
            assert [(p.chip, p.first_head, p.heads) for p in state.parts] == [
                (i, i * 2 // chips, 1) for i in range(chips)
            ]
            for part in state.parts:
                assert state.part_bytes(part, m.states.slots) == m.states.slots * state.rows * 32 * 2
        device = Device(c)
        device.prefill(tokens(16, vocab=1000))
        for state in m.states.states:
            held = [
                device.machine.memories[p.chip].host_read(p.offset, 2, (16, 32)).astype(np.float32) for p in state.parts
            ]
            assert all(np.abs(h).max() > 0 for h in held)
            for a, p in zip(held, state.parts, strict=True):
                for b, q in zip(held, state.parts, strict=True):
                    assert np.array_equal(a, b) == (p.first_head == q.first_head)


@pytest.mark.parametrize(
    "quant", ["w8a8", "w4z", *(pytest.param(q, marks=pytest.mark.sweep) for q in ("w4a8", "w4a16"))]
)
def test_every_scheme(tmp_path: Path, quant: str) -> None:
    """Quantized share by share: the ladder's rungs run on the split graph, so the program is held to what runs."""
    out = tmp_path / "m.calbin"
    toml = target(tmp_path / "t.toml", chips=4)
    options = calc.CompileOptions(prefill=(16,), max_seq_len=48, target=toml, split="tensor", quant=quant)
    calc.compile(GLASS, out, options)
    report = calc.verify(out)
    assert [c for c in report.checks if not c.ok] == []
    with open_calbin(out) as c:
        (form,) = {w.format for w in c.manifest.weights if "down_proj" in w.name}
        assert form == scheme(quant, 64).format.name


def test_the_option_overrides_the_target(tmp_path: Path) -> None:
    found = {}
    for how in (None, "layers", "tensor"):
        report = compile_model(GLASS, tmp_path / f"{how}.calbin", target="calculet-2chip", split=how)
        found[how] = report.layers_per_chip
    assert found == {None: (2, 2), "layers": (2, 2), "tensor": (4, 4)}


def test_heads_that_do_not_divide_write_nothing(tmp_path: Path) -> None:
    out = tmp_path / "m.calbin"
    with pytest.raises(UnsupportedError) as e:
        compile_model(GLASS, out, target=target(tmp_path / "t.toml", chips=3), split="tensor")
    assert set(e.value.codes) == {"PARTITION_HEADS"}
    assert not out.exists()
