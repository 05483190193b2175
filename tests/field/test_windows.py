"""Sliding windows through the simulator: every decode step, and prompts longer than the window."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from calc.sim.runtime import Device
from tests.field.field_models import BF16_GATE, against_transformers, compile_model, open_device, save, t0, tokens

MIXED = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both layers slide over 8 tokens."""
    return _compiled(transformers.MistralConfig(**t0(sliding_window=8)), tmp_path_factory.mktemp("sliding"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer slides over 8 tokens, the second sees all."""
    config = transformers.Gemma3TextConfig(
        **t0(sliding_window=8, query_pre_attn_scalar=8, layer_types=MIXED, rope_parameters=...)
    )
    return _compiled(config, tmp_path_factory.mktemp("mixed"))


def windows(device: Device) -> list[int | None]:
    """The window of each layer's ring; None for a layer that keeps every token."""
    keys = [s for s in device.manifest.states.states if s.name.endswith(".key")]
    assert all((s.growth == "ring") == (s.window is not None) for s in keys)
    assert all(s.rows == 16 for s in keys if s.growth == "ring")  # eight tokens and their tile, of a capacity of 32
    return [s.window for s in keys]


def _compiled(config: transformers.PreTrainedConfig, path: Path) -> Path:
    model = save(config, path / "m")
    compile_model(model, path / "m.calbin", prefill=(8, 16))
    return model


def test_field_28_window_at_every_decode_step(sliding: Path) -> None:
    device = open_device(sliding.with_suffix(".calbin"), "strict")
    assert windows(device) == [8, 8]
    assert max(against_transformers(sliding, device, tokens(11), 6)) <= BF16_GATE


@pytest.mark.parametrize("prompt", [7, 8, 9, 13, 16, 25])
def test_field_30_prefill_longer_than_the_window_in_mixed_layers(mixed: Path, prompt: int) -> None:
    device = open_device(mixed.with_suffix(".calbin"))
    assert windows(device) == [8, None]
    assert max(against_transformers(mixed, device, tokens(prompt + 4), prompt)) <= BF16_GATE


def test_field_30_a_window_over_chunks(sliding: Path) -> None:
    """13 tokens in a bucket of 8 and 16 in one of 16: the second chunk's oldest keys lie in the first."""
    device = open_device(sliding.with_suffix(".calbin"))
    sequence = tokens(30)
    device.prefill(sequence[:5])
    device.prefill(sequence[5:12], past=5)
    device.prefill(sequence[12:28], past=12)
    whole = open_device(sliding.with_suffix(".calbin"))
    assert max(against_transformers(sliding, whole, sequence, 28)) <= BF16_GATE
    got = device.decode([sequence[28]], [28], [0])[0]
    want = open_device(sliding.with_suffix(".calbin"))
    want.prefill(sequence[:28])
    from tests.field.field_models import ORDER_GATE, rel_rms

    assert rel_rms([got], [want.decode([sequence[28]], [28], [0])[0]]) <= ORDER_GATE
