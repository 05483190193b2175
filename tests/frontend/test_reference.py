"""The streamed reference against transformers with everything in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from frontend_models import save_model, t0
from torch import nn

from calc.core.errors import InternalError, UsageError
from calc.core.metrics import rel_rms
from calc.frontend import reference as module
from calc.frontend.checkpoint import SINGLE
from calc.frontend.reference import Reference, bf16_logits, reference

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


U = 2.0**-24
"""Half a step of FP32: the most that rounding one sum of two terms changes it, relatively."""


def in_memory(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]), cache=transformers.DynamicCache(), use_cache=True)
    return out.logits[0, ROWS].float().numpy(), out.cache.layers


def fp32_bound(want: np.ndarray, layers: int) -> float:
    """How far two FP32 evaluations that add in different orders may be apart.

    Kernels are chosen by instruction set, shape, alignment and threads, and each adds in its own order. A sum of at
    most K = 48 terms (the widest here) rounds K times, by U at most each and in either direction: √K · U of its size.
    From the embedding to a value there are eight sums a layer (two norms, q·k, softmax, p·v and its projection, the
    two of the FFN) and two behind the layers, one after the other: √sums times that. Two evaluations: √2 of it; the
    largest of some thousand values: 4 standard deviations.
    """
    sums = 8 * layers + 2
    return float(4 * math.sqrt(2 * sums * 48) * U * np.abs(want).max())


def assert_close(got: Reference, path: Path) -> None:
    """The same function in FP32: logits, and every token's keys and values."""
    want, layers = in_memory(path, torch.float32)
    assert np.abs(got.logits - want).max() <= fp32_bound(want, len(layers))
    assert len(got.keys) == len(got.values) == len(layers)
    for i, layer in enumerate(layers):
        for a, tensor in ((got.keys[i], layer.keys), (got.values[i], layer.values)):
            b = tensor[0].transpose(0, 1).numpy()
            assert a.shape == b.shape == (len(TOKENS), *b.shape[1:])
            assert np.abs(a - b).max() <= fp32_bound(b, i + 1)


def assert_bf16(got: np.ndarray, path: Path) -> None:
    """Values of BF16, as near to transformers' own BF16 run as that is to FP32.

    A last bit of an FP32 sum that crosses a rounding boundary moves a stored value by a BF16 step; where every value
    did, the two runs would be two samples of one noise. What a wrong weight does is beside that: see the fault below.
    """
    want, exact = (in_memory(path, t)[0] for t in (torch.bfloat16, torch.float32))
    assert not (got.view(np.uint32) & 0xFFFF).any()
    assert rel_rms([got], [want]) <= rel_rms([want], [exact])


@pytest.mark.parametrize("family", CONFIGS)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[family], tmp_path / family, max_shard_size="40KB")
    assert_close(reference(model, TOKENS, ROWS), model)
    assert_bf16(bf16_logits(model, TOKENS, ROWS), model)


def test_bf16_checkpoint(tmp_path: Path) -> None:
    model = save_model(CONFIGS["llama"], tmp_path / "m", dtype=torch.bfloat16)
    assert_close(reference(model, TOKENS, ROWS), model)
    assert_bf16(bf16_logits(model, TOKENS, ROWS), model)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_bound_sees_one_weight_that_is_off_by_a_bf16_step(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value out of ten thousand, by 2^-8 of itself: the smallest fault that storing weights could make."""
    model = save_model(CONFIGS[family], tmp_path / family)
    honest = module.read_weight

    def wrong(recipe: Any, tensors: Any) -> torch.Tensor:
        tensor = honest(recipe, tensors)
        if recipe.names[0].endswith("layers.0.self_attn.v_proj.weight"):
            tensor = tensor.clone()
            flat = tensor.view(-1)
            flat[flat.abs().argmax()] *= 1 + 2.0**-8
        return tensor

    monkeypatch.setattr(module, "read_weight", wrong)
    with pytest.raises(AssertionError):
        assert_close(reference(model, TOKENS, ROWS), model)


def test_the_bf16_bound_sees_the_next_rows_logits(tmp_path: Path) -> None:
    model = save_model(CONFIGS["llama"], tmp_path / "m")
    with pytest.raises(AssertionError):
        assert_bf16(bf16_logits(model, TOKENS, [r - 1 if r else 1 for r in ROWS]), model)
    with pytest.raises(AssertionError):
        assert_bf16(reference(model, TOKENS, ROWS).logits, model)


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
