"""Exported graphs in ONNX Runtime against transformers in float32: logits and KV, over prefill, chunk and decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from frontend_models import parity, save_model, t0

GATE = 2e-4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**t0()),
    "llama3_rope": lambda: transformers.LlamaConfig(**t0(rope_parameters=LLAMA3)),
    "qwen2": lambda: transformers.Qwen2Config(**t0(tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3Config(**t0(head_dim=16)),
    "mistral_window": lambda: transformers.MistralConfig(**t0(sliding_window=8)),
    "gemma2": lambda: transformers.Gemma2Config(
        **t0(sliding_window=8, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **t0(sliding_window=8, query_pre_attn_scalar=8, layer_types=MIXED, rope_parameters=...)
    ),
    "mixtral": lambda: transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **t0(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parity(family: str, tmp_path: Path) -> None:
    """Two sequences of different pasts: padded prefill, a second chunk, three decode steps."""
    model = save_model(FAMILIES[family](), tmp_path / family)
    worst = parity(model)
    print(family, worst)
    assert worst <= GATE
