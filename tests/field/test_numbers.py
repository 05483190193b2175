"""Numbers that other toolchains lost: zero groups, tiny channels, values beyond a type's range, large sums."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import calc
from calc.calbin.reader import Calbin, open_calbin
from calc.core.errors import ModelError
from calc.kernels import registry
from calc.kernels.base import Example
from calc.kernels.rms_norm import RmsNormAttrs
from tests.field.field_models import (
    BF16_GATE,
    against_transformers,
    compile_model,
    edit_weights,
    open_device,
    save,
    t0,
    tokens,
)
from tests.kernels.harness import draw, run_ort, run_sim

DOWN = "model.layers.0.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy of T0, to be edited."""
    return Path(shutil.copytree(llama, tmp_path / "m"))


def recipe(path: Path, scheme: str, group: int = 32) -> str:
    path.write_text(f'default = "{scheme}"\ngroup = {group}\n')
    return str(path)


def stored(calbin: Calbin, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A weight's codes [N, K] and scales [N, groups], read byte by byte from what docs/calbin.md says of its tiles."""
    w = next(w for w in calbin.manifest.weights if name in w.sources)
    raw = calbin.shard(w.chip)[w.offset : w.offset + w.nbytes].tobytes()
    n, k = w.shape
    padded = -(-k // 32) * 32
    codes, scales, at = np.zeros((n, padded), np.int8), [], 0
    for first in range(0, n, w.tile_rows):
        rows = min(w.tile_rows, n - first)
        for i in range(rows):
            for j in range(padded):
                if w.format == "w8":
                    code = raw[at + i * padded + j]
                    codes[first + i, j] = code - 256 if code > 127 else code
                else:
                    byte = raw[at + i * padded // 2 + j // 2]
                    code = byte >> 4 if j % 2 else byte & 15
                    codes[first + i, j] = code - 16 if code > 7 else code
        at += rows * padded // (1 if w.format == "w8" else 2)
        groups, dtype = (1, np.dtype("<f4")) if w.format == "w8" else (-(-k // w.group), np.dtype(ml_dtypes.bfloat16))
        size = rows * groups * dtype.itemsize
        scales.append(np.frombuffer(raw[at : at + size], dtype).astype(np.float64).reshape(rows, groups))
        at = -(-(at + size) // 64) * 64
    assert at == w.nbytes
    assert not codes[:, k:].any()
    return codes[:, :k], np.concatenate(scales)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_field_39_40_43_zero_groups_tiny_channels_and_a_short_last_group(
    model: Path, tmp_path: Path, scheme: str
) -> None:
    """K = 48 in groups of 32: the second is short. Row 3 is all zero, row 5 in its first group, row 7 is tiny."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        w = weights[DOWN]
        w[3], w[5, :32] = 0, 0
        w[7] = torch.linspace(-1e-6, 1e-6, 48)

    edit_weights(model, change)
    want = _weight(model, DOWN)
    out = tmp_path / "m.calbin"
    compile_model(model, out, quant=recipe(tmp_path / "r.toml", scheme), golden=True)
    calbin = calc.open(out, deep=True)
    assert {q.group for q in calbin.manifest.quantization if q.scheme == scheme} == {32 if scheme == "w4a16" else 0}
    codes, scales = stored(calbin, DOWN)
    assert scales.shape == (32, 2 if scheme == "w4a16" else 1)
    assert np.isfinite(scales).all()
    assert (scales >= 2.0**-126).all()
    top = 7 if scheme == "w4a16" else 127
    assert np.abs(codes).max() == top
    assert not codes[3].any()
    assert (scales[3] == 1).all()
    assert not codes[5, :32].any()
    if scheme == "w4a16":
        assert scales[5, 0] == 1
    group = 32 if scheme == "w4a16" else 48
    spread = np.repeat(scales, group, axis=1)[:, :48]
    assert (np.abs(codes * spread - want) <= spread * 0.51 + np.abs(want) * 2.0**-8).all()
    assert np.abs(codes[7]).max() == top
    np.testing.assert_allclose(codes[7, -1] * spread[7, -1], 1e-6, rtol=0.01)
    report = calc.verify(calbin)
    assert report.ok, [c for c in report.checks if not c.ok]
    assert {r.name for r in calbin.manifest.golden.rungs} >= {"quantized", "program"}


def _weight(model: Path, name: str) -> NDArray[np.float64]:
    from safetensors.numpy import load_file

    return load_file(model / "model.safetensors")[name].astype(np.float64)


def test_field_42_lost_values_are_counted(model: Path, tmp_path: Path) -> None:
    """1e-9 and 1e5 are ordinary in BF16; 1e-41 becomes zero, 3.4e38 infinite."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[DOWN][0, :4] = torch.tensor([1e-9, 1e5, -1e-9, -1e5])
        weights[GATE][1, :3] = torch.tensor([1e-41, -1e-41, 3.4e38])
        weights[GATE][47, 0] = -1e-41

    edit_weights(model, change)
    out = tmp_path / "m.calbin"
    compile_model(model, out)
    found = {q.weight: (q.flushed, q.saturated) for q in open_calbin(out).manifest.quantization}
    assert found.pop(GATE) == (3, 1)
    assert set(found.values()) == {(0, 0)}
    assert DOWN in found


@pytest.mark.parametrize(("scheme", "golden"), [("bf16", False), ("w8a8", True), ("w4a16", False)])
def test_weights_that_are_not_finite_are_all_named(model: Path, tmp_path: Path, scheme: str, golden: bool) -> None:
    norm = "model.layers.1.input_layernorm.weight"

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[DOWN][2, 3] = torch.nan
        weights[GATE][40, :2] = torch.inf
        weights[norm][0] = -torch.inf

    edit_weights(model, change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError) as caught:
        compile_model(model, tmp_path / "m.calbin", quant=scheme, golden=golden)
    problems = {p.where: p.what for p in caught.value.problems}
    assert set(caught.value.codes) == {"MODEL_NOT_FINITE"}
    assert set(problems) == {DOWN, GATE, norm}
    assert problems[GATE].startswith("2 ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bias_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = save(transformers.Qwen2Config(**t0(head_dim=...)), tmp_path / "m")
    name = "model.layers.1.self_attn.k_proj.bias"
    edit_weights(model, lambda weights: weights[name].__setitem__(3, torch.nan))
    with pytest.raises(ModelError) as caught:
        compile_model(model, tmp_path / "m.calbin")
    assert [(p.code, p.where) for p in caught.value.problems] == [("MODEL_NOT_FINITE", name)]
    assert not list(tmp_path.glob("*.calbin")) and not list(tmp_path.glob(".*"))


def test_field_46_sums_of_squares_beyond_fp16(llama: Path) -> None:
    kernel = registry()["RmsNorm"]
    example = Example(RmsNormAttrs(add=False, eps=1e-6), {"x": (1, 4, 512), "gamma": (512,)})
    values = draw(kernel, example)
    values["x"] = np.where(np.arange(512) % 2, 300, -300).astype(np.float32) * np.ones((1, 4, 1), np.float32)
    want = run_ort(kernel, example.attrs, "npu", values)["y"]
    got = run_sim(kernel, example.attrs, values, (), "strict")
    np.testing.assert_array_equal(got["y"], want[0])
    np.testing.assert_allclose(np.abs(want), np.broadcast_to(np.abs(values["gamma"]), want.shape), rtol=2**-7)


def test_field_46_large_activations_end_to_end(model: Path, tmp_path: Path) -> None:
    """An embedding of 300 everywhere: the sums of squares are 32 * 90000, far beyond fp16."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        w = weights["model.embed_tokens.weight"]
        w.copy_(torch.sign(w) * (300 + torch.arange(w.numel()).reshape(w.shape) % 7))

    edit_weights(model, change)
    compile_model(model, tmp_path / "m.calbin")
    assert max(against_transformers(model, open_device(tmp_path / "m.calbin"), tokens(12), 8)) <= BF16_GATE


@pytest.mark.parametrize("quant", ["bf16", "w8a8"])
def test_field_35_experts_are_weighted_by_their_gates(tmp_path: Path, quant: str) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    model = save(config, tmp_path / "m")
    out = tmp_path / "m.calbin"
    compile_model(model, out, golden=True, quant=quant)
    report = calc.verify(out, strict=quant == "bf16")
    assert report.ok, [c for c in report.checks if not c.ok]
    if quant == "bf16":
        assert max(against_transformers(model, open_device(out), tokens(20), 17)) <= BF16_GATE
