"""The norm seam: RMSNorm modules, recognised by what they compute → one `RMSNormalization`."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from calc.core.errors import InternalError
from calc.frontend import ops


def weight_of(module: nn.Module, name: str) -> Tensor:
    """A module's weight by name.

    Raises:
        InternalError: what has the name is no tensor; a seam took a module that it should have left alone.
    """
    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        raise InternalError(f"{type(module).__name__}: {name} is a {type(value).__name__}, not a tensor")
    return value


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "norm_eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _is_candidate(module: nn.Module) -> bool:
    """A leaf whose only parameter is a vector called `weight`."""
    params = dict(module.named_parameters(recurse=False))
    weight = params.get("weight")
    return not any(True for _ in module.children()) and len(params) == 1 and weight is not None and weight.ndim == 1


def _probe(module: nn.Module, eps: float) -> float | None:
    """The offset o for which the module computes ``x / rms(x) · (o + w)``: 0, 1, or None if it does not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 32, generator=generator)
    weight = torch.randn(32, generator=generator)
    twin = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    with torch.no_grad():
        try:
            got = type(module).forward(twin, x)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # it needs other inputs: not an RMSNorm
            return None
        for offset in (0.0, 1.0):
            want = torch.nn.functional.rms_norm(x, (32,), offset + weight, eps)
            if isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want, atol=1e-5):
                return offset
    return None


@contextmanager
def patched_norms(model: nn.Module) -> Iterator[None]:
    """Make every RMSNorm of `model` a `calc::rms_norm`; the ``1 + w`` of some families stays an Add in the graph."""
    offsets: dict[tuple[type[nn.Module], float], float | None] = {}
    patched: list[nn.Module] = []
    try:
        for module in model.modules():
            eps = _epsilon(module)
            if eps is None or not _is_candidate(module):
                continue
            key = (type(module), eps)
            if key not in offsets:
                offsets[key] = _probe(module, eps)
            offset = offsets[key]
            if offset is None:
                continue
            module.forward = types.MethodType(_forward(eps, offset), module)
            patched.append(module)
        yield
    finally:
        for module in patched:
            del module.forward


def _forward(eps: float, offset: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight = weight_of(self, "weight")
        out: Tensor = ops.rms_norm(x, offset + weight if offset else weight, eps)
        return out

    return forward
