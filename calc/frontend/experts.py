"""The experts seam: a layer's routed experts → one `calc::experts`; the router stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.modeling_utils import PreTrainedModel

from calc.core.errors import Problems, UnsupportedError
from calc.frontend import ops
from calc.frontend.norms import weight_of

NAME = "calc"


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path → module, for every module that dispatches through the experts interface."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}


def activation_name(function: nn.Module) -> str | None:
    """The name in `ops.ACTIVATIONS` of what `function` computes, None if it is none of them."""
    x = torch.linspace(-6, 6, 97)
    with torch.no_grad():
        got = function(x)
    return next((name for name, f in ops.ACTIVATIONS.items() if torch.allclose(got, f(x), atol=1e-6)), None)


def _check(model: nn.Module) -> dict[int, str]:
    """id(module) → activation; every expert layout that the node cannot express is refused."""
    problems = Problems()
    names: dict[int, str] = {}
    for path, module in expert_modules(model).items():
        act = getattr(module, "act_fn", None)
        name = activation_name(act) if isinstance(act, nn.Module) else None
        reasons = {
            "biases": getattr(module, "has_bias", False),
            "no gate": not getattr(module, "has_gate", True),
            "transposed weights": getattr(module, "is_transposed", False),
            "interleaved gate and up": not getattr(module, "is_concatenated", True),
            "a norm after each expert": getattr(module, "has_post_expert_norm", False),
            "a gating rule of their own": getattr(type(module), "_apply_gate", None) is not _default_apply_gate,
            "an unknown activation": name is None,
        }
        for reason in (r for r, present in reasons.items() if present):
            problems.add("UNSUPPORTED_EXPERTS", path, f"the experts have {reason}")
        names[id(module)] = name or ""
    problems.raise_if_any(UnsupportedError)
    return names


@contextmanager
def patched_experts(model: PreTrainedModel) -> Iterator[None]:
    """Route the experts of `model` through `calc::experts`."""
    activations = _check(model)

    def forward(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = weight_of(module, "gate_up_proj"), weight_of(module, "down_proj")
        out: Tensor = ops.experts(hidden, top_k_index, top_k_weights, gate_up, down, activations[id(module)])
        return out

    found = (getattr(module, "config", None) for module in expert_modules(model).values())
    configs = [config for config in found if isinstance(config, PreTrainedConfig)]
    before = [config._experts_implementation for config in configs]
    ALL_EXPERTS_FUNCTIONS[NAME] = forward
    try:
        for config in configs:
            config._experts_implementation = NAME
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config._experts_implementation = value
        del ALL_EXPERTS_FUNCTIONS[NAME]
