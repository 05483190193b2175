"""Kernels: one file per NPU op. The registry is the sorted directory."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from calc.kernels.base import Kernel

_SHARED = frozenset({"base", "emit", "functions", "lowering", "program"})


@cache
def registry() -> dict[str, Kernel[Any]]:
    """Every kernel by name, in the order of the directory."""
    out: dict[str, Kernel[Any]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if info.name in _SHARED:
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in sorted(inspect.getmembers(module, inspect.isclass)):
            if issubclass(cls, Kernel) and cls.__module__ == module.__name__:
                out[cls.name] = cls()
    return out
