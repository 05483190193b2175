"""Weights as the ladder reads them: a block of rows at a time, and each quantized value held to half a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calc.core.errors import InternalError
from calc.core.schemes import scheme as scheme_of
from calc.core.schemes import schemes
from calc.core.tensors import FileTensor, StackTensor
from calc.passes import ladder
from calc.passes.ladder import Weights


@pytest.fixture
def stored(tmp_path: Path) -> FileTensor:
    rng = np.random.default_rng(0)
    rng.standard_normal((37, 96)).astype(np.float32).tofile(tmp_path / "w")
    return FileTensor(tmp_path / "w", 0, (37, 96), "f32", ("w",))


@pytest.mark.parametrize("block", [96, 500, 1 << 22])
@pytest.mark.parametrize("scheme", schemes())
def test_blocks_give_what_the_whole_gives(
    stored: FileTensor, scheme: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "_BLOCK", block)
    weights = Weights({"w": stored}, {"w": scheme_of(scheme, 32)})
    values, scale = scheme_of(scheme, 32).ort_values(stored.read())
    assert np.array_equal(weights.quantized("w"), values)
    assert weights.quantized("w").dtype == values.dtype
    if scale is not None:
        assert np.array_equal(weights.quantized("w/scale"), scale)
    assert np.array_equal(weights.fp32("w"), stored.read())
    assert not weights.problems.items


def test_experts_are_read_expert_by_expert(stored: FileTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_BLOCK", 96)
    weights = Weights({"e": StackTensor((stored, stored))}, {"e": scheme_of("w8a8")})
    codes, scale = scheme_of("w8a8").ort_values(stored.read())
    assert np.array_equal(weights.quantized("e"), np.stack([codes, codes]))
    assert np.array_equal(weights.quantized("e/scale"), np.stack([scale, scale]))


def test_a_fault_in_one_block_is_named_once(stored: FileTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_BLOCK", 960)
    honest = schemes()["w8a8"].ort_values

    def rolled(self, w):
        codes, scale = honest(self, w)
        return codes, np.roll(scale, 1)

    monkeypatch.setattr(schemes()["w8a8"], "ort_values", rolled)
    weights = Weights({"w": stored}, {"w": scheme_of("w8a8")})
    weights.quantized("w")
    weights.quantized("w/scale")
    assert [(p.code, p.where) for p in weights.problems.items] == [("LADDER_QUANTIZED", "w")]


def test_a_weight_without_rows(stored: FileTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_blocks", lambda _: iter(()))
    with pytest.raises(InternalError, match="without rows"):
        Weights({"w": stored}, {}).fp32("w")
