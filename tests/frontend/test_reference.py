"""The streamed reference against transformers with everything in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from frontend_models import save_model, t0
from torch import nn

from calc.core.errors import InternalError, UsageError
from calc.frontend import reference as module
from calc.frontend.checkpoint import SINGLE
from calc.frontend.reference import bf16_logits, reference

TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 64, 21)]
ROWS = [0, 7, 20]
MIXED = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": transformers.LlamaConfig(**t0(tie_word_embeddings=True)),
    "gemma2": transformers.Gemma2Config(**t0(sliding_window=8, query_pre_attn_scalar=8)),
    "gemma3": transformers.Gemma3TextConfig(
        **t0(sliding_window=8, query_pre_attn_scalar=8, layer_types=MIXED, rope_parameters=...)
    ),
    "mixtral": transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2)),
}


def in_memory(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]), cache=transformers.DynamicCache(), use_cache=True)
    return out.logits[0, ROWS].float().numpy(), out.cache.layers


@pytest.mark.parametrize("family", CONFIGS)
def test_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[family], tmp_path / family, max_shard_size="40KB")
    got = reference(model, TOKENS, ROWS)
    want, layers = in_memory(model, torch.float32)
    assert np.array_equal(got.logits, want)
    assert len(got.keys) == len(got.values) == 2
    for layer, keys, values in zip(layers, got.keys, got.values, strict=True):
        assert keys.shape[0] == len(TOKENS)
        assert np.array_equal(keys, layer.keys[0].transpose(0, 1).numpy())
        assert np.array_equal(values, layer.values[0].transpose(0, 1).numpy())
    assert np.array_equal(bf16_logits(model, TOKENS, ROWS), in_memory(model, torch.bfloat16)[0])


def test_bf16_checkpoint(tmp_path: Path) -> None:
    model = save_model(CONFIGS["llama"], tmp_path / "m", dtype=torch.bfloat16)
    assert np.array_equal(reference(model, TOKENS, ROWS).logits, in_memory(model, torch.float32)[0])
    assert np.array_equal(bf16_logits(model, TOKENS, ROWS), in_memory(model, torch.bfloat16)[0])


def test_one_layer_in_memory_at_a_time(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[str] = set()
    most: list[int] = []
    fill, empty = module._fill, module._empty

    def counted_fill(model: Any, loaded: Any, names: Any, dtype: Any) -> None:
        held.update(n for n in names if ".layers." in n)
        most.append(len({n.split(".layers.")[1].split(".")[0] for n in held}))
        fill(model, loaded, names, dtype)

    def counted_empty(model: Any, names: Any) -> None:
        held.difference_update(names)
        empty(model, names)
        assert all(model.get_parameter(n).device.type == "meta" for n in names)

    monkeypatch.setattr(module, "_fill", counted_fill)
    monkeypatch.setattr(module, "_empty", counted_empty)
    reference(llama, TOKENS, ROWS)
    assert most == [0, 1, 1]
    assert not held


@pytest.mark.parametrize(
    ("tokens", "rows", "code"),
    [([], [], "USAGE_NO_TOKENS"), ([64], [0], "USAGE_TOKEN_RANGE"), ([5], [1], "USAGE_ROW_RANGE")],
)
def test_requests_out_of_range(llama: Path, tokens: list[int], rows: list[int], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        reference(llama, tokens, rows)
    assert caught.value.codes == (code,)


def test_no_weights(llama: Path) -> None:
    (llama / SINGLE).unlink()
    with pytest.raises(UsageError) as caught:
        reference(llama, [5], [0])
    assert caught.value.codes == ("USAGE_NO_WEIGHTS",)


def test_our_bugs() -> None:
    with pytest.raises(InternalError, match="cached nothing"):
        module._token_major(None)
    with pytest.raises(InternalError, match="no list of 3 layers"):
        module.decoder_layers(nn.ModuleList([nn.Linear(1, 1)]), 3)
