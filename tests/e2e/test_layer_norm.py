"""A family with layer norms, biases everywhere and MLPs without a gate, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import calc
from tests.field.field_models import BF16_GATE, against_transformers, open_device, save, t0, tokens


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(transformers.Starcoder2Config(**t0(use_bias=True)), tmp_path_factory.mktemp("starcoder") / "m")


@pytest.mark.parametrize("split", ["none", "layers", "tensor"])
def test_starcoder2(starcoder: Path, tmp_path: Path, split: str) -> None:
    out = tmp_path / "m.calbin"
    board = {"target": "calculet-1chip"} if split == "none" else {"target": "calculet-2chip", "split": split}
    calc.compile(starcoder, out, calc.CompileOptions(prefill=(8, 16), batch=(1, 2), max_seq_len=64, **board))
    checks = calc.verify(out, strict=True).checks
    assert [c for c in checks if not c.ok] == []
    assert max(against_transformers(starcoder, open_device(out, "strict"), tokens(30), 21)) <= BF16_GATE
