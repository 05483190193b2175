"""Hugging Face directory → `ModelSpec` and prefill/decode graphs, weights as lazy references.

The only package that may import torch or transformers; importing `calc.frontend` itself imports neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.frontend.checkpoint import Checkpoint
    from calc.frontend.export import Exported, export
    from calc.frontend.hub import resolve
    from calc.frontend.reference import Reference, bf16_logits, reference
    from calc.frontend.save import save
    from calc.frontend.spec import load_spec

__all__ = [
    "Checkpoint",
    "Exported",
    "Reference",
    "bf16_logits",
    "export",
    "load_spec",
    "reference",
    "resolve",
    "save",
]

_HOMES = {
    "Checkpoint": "checkpoint",
    "Exported": "export",
    "Reference": "reference",
    "bf16_logits": "reference",
    "export": "export",
    "load_spec": "spec",
    "reference": "reference",
    "resolve": "hub",
    "save": "save",
}


def __getattr__(name: str) -> object:
    """Load a public name's module when the name is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
