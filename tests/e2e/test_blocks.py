"""Prompts that run in several blocks of rows: the whole artefact, strictly, against what one block gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers

import calc
from calc.calbin.reader import open_calbin
from calc.passes import blocks
from calc.sim.runtime import Device
from tests.conftest import GLASS
from tests.field.field_models import (
    BF16_GATE,
    ORDER_GATE,
    against_transformers,
    compile_model,
    kv,
    open_device,
    rel_rms,
    save,
    t0,
    target,
    tokens,
)

CUTS = ("whole", "narrow", "calls")
BOARDS = {"one": (1, "layers"), "layers": (2, "layers"), "tensor": (2, "tensor")}


def pairs(*few: tuple[str, str]) -> list[object]:
    """Every cut on the boards that are named; `make test` takes these few."""
    boards = [b for b in BOARDS if any(board == b for _, board in few)]
    rest = [pytest.param(k, b, marks=pytest.mark.sweep) for k in CUTS for b in boards if (k, b) not in few]
    return [*few, *rest]


WIDE_GATE = 2 * BF16_GATE
"""These random models are four times as wide as the field's; a single row is up to 0.023 off in one block, too."""


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Offer one way to cut only."""

    cuts = blocks._cuts

    def choose(kind: str) -> None:
        monkeypatch.setattr(blocks, "_cuts", lambda calls: {kind: cuts(calls)[kind]})

    return choose


def small(tmp_path: Path, sram: int, chips: int = 1) -> str:
    return target(tmp_path / f"{sram}-{chips}.toml", chips=chips, sram=sram * 1024, weight_tile=16384, score_tile=8192)


def reads(report: calc.CompileReport) -> list[int]:
    return [v.row_blocks[0].weight_reads for v in report.variants if v.role == "prefill"]


@pytest.mark.parametrize(("kind", "board"), [("whole", "one"), ("narrow", "layers"), ("calls", "tensor")])
def test_the_tiny_model_verifies(tmp_path: Path, kind: str, board: str, force: Callable[[str], None]) -> None:
    """Golden replay, prompts around the buckets, chunks, batches; strict and fast."""
    force(kind)
    chips, how = BOARDS[board]
    out = tmp_path / "m.calbin"
    options = calc.CompileOptions(
        prefill=(48,), batch=(1, 2), max_seq_len=80, target=small(tmp_path, 104, chips), split=how
    )
    assert reads(calc.compile(GLASS, out, options))[0] > 1
    report = calc.verify(out, strict=True)
    assert [c for c in report.checks if not c.ok] == []


@pytest.mark.parametrize(("kind", "board"), pairs(("whole", "one"), ("narrow", "layers"), ("calls", "tensor")))
def test_every_length_equals_one_block(
    tmp_path: Path, kind: str, board: str, force: Callable[[str], None], tiny_long: Path
) -> None:
    """Prompts that end inside a block, at its border and one row behind it, with and without a past."""
    force(kind)
    chips, how = BOARDS[board]
    out = tmp_path / "m.calbin"
    compile_model(GLASS, out, prefill=(64,), max_seq_len=128, target=small(tmp_path, 108, chips), split=how, batch=(1,))
    sequence = tokens(114, vocab=1000)
    for first, second in ((1, 64), (15, 16), (16, 17), (31, 33), (48, 63), (64, 49)):
        got = []
        for path in (out, tiny_long):
            device = open_device(path, "strict" if path is out else "fast")
            logits = [device.prefill(sequence[:first]), device.prefill(sequence[first : first + second], past=first)]
            n = first + second
            logits.append(device.decode([sequence[n]], [n], [0])[0])
            got.append((logits, kv(device, n + 1)))
        (a, state_a), (b, state_b) = got
        assert max(rel_rms([x], [y]) for x, y in zip(a, b, strict=True)) <= 2 * ORDER_GATE
        assert rel_rms(state_a, state_b) <= 2 * ORDER_GATE


@pytest.fixture(scope="module")
def tiny_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in one block."""
    out = tmp_path_factory.mktemp("long") / "m.calbin"
    report = compile_model(GLASS, out, prefill=(64,), max_seq_len=128)
    assert reads(report) == [1]
    return out


FAMILIES = {
    "windows": lambda: transformers.Gemma3TextConfig(
        **wide(
            query_pre_attn_scalar=32,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            num_hidden_layers=3,
            rope_parameters=...,
        )
    ),
    "experts": lambda: transformers.MixtralConfig(
        **wide(num_local_experts=4, num_experts_per_tok=2, intermediate_size=96, sliding_window=20)
    ),
    "biases": lambda: transformers.Qwen2Config(**wide()),
}


def wide(**changes: object) -> dict[str, object]:
    return t0(**{"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, **changes})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param) / "m")


@pytest.mark.parametrize(("kind", "board"), pairs(("whole", "one"), ("narrow", "layers"), ("calls", "one")))
def test_families_in_blocks_against_transformers(
    family: Path, tmp_path: Path, kind: str, board: str, force: Callable[[str], None]
) -> None:
    """Windows shorter than a block and longer, experts, biases; 90 tokens in two calls of several blocks."""
    force(kind)
    chips, how = BOARDS[board]
    out = tmp_path / "m.calbin"
    report = compile_model(family, out, prefill=(64,), max_seq_len=128, target=small(tmp_path, 112, chips), split=how)
    assert reads(report)[0] > 1
    assert max(against_transformers(family, open_device(out, "strict"), tokens(92), 90)) <= WIDE_GATE


@pytest.mark.parametrize(
    "quant", ["w8a8", "w4z", *(pytest.param(q, marks=pytest.mark.sweep) for q in ("w4a8", "w4a16"))]
)
def test_quantized_rows_do_not_know_their_block(
    family: Path, tmp_path: Path, quant: str, force: Callable[[str], None]
) -> None:
    """A row's codes and scale are its own: blocks give what one block gives."""
    force("narrow")
    found = []
    for name, sram in (("blocks", 112), ("whole", 2048)):
        out = tmp_path / f"{name}.calbin"
        report = compile_model(family, out, prefill=(64,), max_seq_len=128, target=small(tmp_path, sram), quant=quant)
        assert (reads(report)[0] > 1) == (name == "blocks")
        device = open_device(out, "strict")
        logits = [device.prefill(tokens(90))]
        found.append((logits, kv(device, 90)))
    (a, state_a), (b, state_b) = found
    # an int8 code that falls the other way is a step of 1/127 of one value
    assert rel_rms(a, b) <= 5 * ORDER_GATE
    assert rel_rms(state_a, state_b) <= 5 * ORDER_GATE


def test_spilled_rows_lie_behind_everything_else(tmp_path: Path, force: Callable[[str], None]) -> None:
    """The manifest has the region; nothing of it is read before it is written, in strict mode with another past."""
    force("calls")
    out = tmp_path / "m.calbin"
    compile_model(GLASS, out, prefill=(64,), max_seq_len=128, target=small(tmp_path, 104))
    with open_calbin(out) as c:
        (scratch,) = [r for r in c.manifest.dram if r.name.startswith("scratch")]
        others = [r for r in c.manifest.dram if r is not scratch]
        assert scratch.offset >= max(r.offset + r.nbytes for r in others)
        assert scratch.nbytes >= 64 * 128 * 2
        device = Device(c, "strict")
        for n, past in ((64, 0), (17, 64), (3, 81)):
            assert np.isfinite(device.prefill(tokens(n, vocab=1000), past=past)).all()
