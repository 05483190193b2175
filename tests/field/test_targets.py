"""Machines that no file describes: other lanes, rings, tiles, rows and alignments, each compiled and run strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import calc
from calc.calbin.reader import open_calbin
from calc.core.errors import UsageError
from calc.core.target import load_target
from tests.field.field_models import (
    ORDER_GATE,
    Array,
    compile_model,
    kv,
    open_device,
    rel_rms,
    save,
    t0,
    target,
    tokens,
)

ODD: dict[str, float] = {
    "row_multiple": 12,
    "weight_ring": 5,
    "weight_tile": 2048,
    "score_tile": 1536,
    "key_tile": 40,
    "key_block": 24,
    "activation_row": 8,
    "block_rows": 6,
    "state_rows": 8,
    "alignment": 32,
}
"""Nothing as in the bundled targets, and hardly a power of two."""

WIDE: dict[str, float] = {
    "row_multiple": 64,
    "weight_ring": 2,
    "weight_tile": 65536,
    "key_tile": 96,
    "key_block": 1,
    "activation_row": 128,
    "block_rows": 32,
    "state_rows": 48,
    "alignment": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that slides over 8 tokens and one that sees all."""
    config = transformers.Gemma3TextConfig(
        **t0(
            sliding_window=8,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=...,
        )
    )
    return save(config, tmp_path_factory.mktemp("targets") / "m")


def results(path: Path, count: int, prompt: int) -> list[Array]:
    """A prompt and decode steps, strictly: all logits, then what the states hold."""
    device, sequence = open_device(path, "strict"), tokens(count)
    out = [device.prefill(sequence[:prompt])]
    out += [device.decode([sequence[t]], [t], [0])[0] for t in range(prompt, count)]
    return [*out, *kv(device, count)]


def assert_same(got: list[Array], want: list[Array]) -> None:
    """The same numbers but for the order of sums; what is a ring here may be all rows there, so the last count."""
    for a, b in zip(got, want, strict=True):
        n = min(len(a), len(b))
        assert n >= 8
        assert rel_rms([a[-n:]], [b[-n:]]) <= ORDER_GATE


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("odd", "w4a16"),
        ("wide", "w8a8"),
        pytest.param("odd", "bf16", marks=pytest.mark.sweep),
        pytest.param("wide", "bf16", marks=pytest.mark.sweep),
    ],
)
def test_a_machine_of_other_sizes(model: Path, tmp_path: Path, name: str, quant: str) -> None:
    machine = {"odd": ODD, "wide": WIDE}[name]
    where = target(tmp_path / f"{name}.toml", base="calculet-1chip", **machine)
    out = tmp_path / "m.calbin"
    compile_model(model, out, target=where, quant=quant, prefill=(8, 16), batch=(1, 2), golden=True)
    report = calc.verify(out, strict=True)
    assert report.ok, [c for c in report.checks if not c.ok]
    if quant == "bf16":
        compile_model(model, tmp_path / "bundled.calbin", prefill=(8, 16))
        assert_same(results(out, 27, 19), results(tmp_path / "bundled.calbin", 27, 19))
    with open_calbin(out) as calbin:
        m = calbin.manifest
        assert m.states.tile == machine["state_rows"]
        rows = {s.growth: s.rows for s in m.states.states}
        assert rows == {"odd": {"ring": 8, "token": 32}, "wide": {"token": 48}}[name]
        lanes = {w.tile_rows % int(machine["row_multiple"]) for w in m.weights if w.tile_rows}
        assert lanes == {0}
        assert any(w.tile_rows < w.shape[-2] for w in m.weights if w.tile_rows) == (name == "odd")


@pytest.mark.parametrize("chips", [1, 2])
def test_blocks_of_rows_of_other_sizes(model: Path, tmp_path: Path, chips: int) -> None:
    """A bucket of 64 that does not fit: blocks of a multiple of six rows, and what is spilled has rows of eight."""
    small = {"sram": 26000, "weight_ring": 2, "chips": chips}
    where = target(tmp_path / "t.toml", base=f"calculet-{chips}chip", **{**ODD, **small})
    out = tmp_path / "m.calbin"
    report = compile_model(model, out, target=where, prefill=(64,), max_seq_len=96, golden=True)
    (prefill,) = [v for v in report.variants if v.role == "prefill"]
    rows = [n for plan in prefill.row_blocks for n in plan.rows]
    assert rows and all(n % 6 == 0 and n < 64 for n in rows)
    verdict = calc.verify(out, strict=True)
    assert verdict.ok, [c for c in verdict.checks if not c.ok]
    compile_model(model, tmp_path / "bundled.calbin", prefill=(64,), max_seq_len=96)
    assert_same(results(out, 70, 61), results(tmp_path / "bundled.calbin", 70, 61))


def test_tiles_that_are_not_whole_rows_of_a_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as e:
        load_target(target(tmp_path / "t.toml", key_tile=40, state_rows=16))
    assert e.value.codes == ("TARGET_INVALID",)
    assert "tiling" in e.value.problems[0].where
    assert "key_tile must be a multiple of state_rows" in e.value.problems[0].what


@pytest.mark.parametrize("name", ["key_tile", "key_block", "activation_row", "block_rows", "state_rows"])
@pytest.mark.parametrize("value", [0, 1.5, -16])
def test_sizes_that_are_no_counts(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(UsageError) as e:
        load_target(target(tmp_path / "t.toml", **{name: value}))
    assert any(name in p.where for p in e.value.problems)
