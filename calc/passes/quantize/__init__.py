"""Quantization schemes, one per file, and the registry of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SchemeModule(Protocol):
    """What a scheme's file defines."""

    NAME: str
    FORMAT: str
    ort_values: Callable[[NDArray[np.float32], int], tuple[NDArray[np.generic], NDArray[np.float32] | None]]


@cache
def schemes() -> dict[str, SchemeModule]:
    """Every scheme by name, in the order of the directory."""
    out: dict[str, SchemeModule] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        out[module.NAME] = module
    return out
