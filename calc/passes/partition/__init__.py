"""Partition strategies, one per file: which chip runs each node, and what chips tell each other.

A strategy writes the chip into every node's metadata (``calc.chip``) and puts transfers in as nodes (Send, Recv,
AllReduce, AllGather). The graph keeps its inputs and outputs and still runs in ONNX Runtime as one. After it, placing
only gives addresses, and the lowering sees one chip at a time.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from calc.core.errors import Problem, UsageError
from calc.passes.base import Graph


@dataclass(frozen=True)
class Board:
    """What a strategy needs to know.

    Attributes:
        chips: number of chips.
        weight_bytes: bytes of each packed weight as it will lie in a shard, by name.
    """

    chips: int
    weight_bytes: Mapping[str, int] = field(default_factory=dict)


class Strategy(Protocol):
    """What a strategy's file defines: its name, and the pass itself."""

    NAME: str

    def partition(self, g: Graph, board: Board) -> None:
        """Give every node its chip, in place."""


@cache
def strategies() -> dict[str, Strategy]:
    """Every strategy by name, in the order of the directory."""
    out: dict[str, Strategy] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        out[module.NAME] = module
    return out


def strategy(name: str, where: str) -> Strategy:
    """A strategy by name; `where` is who asked for it.

    Raises:
        UsageError: TARGET_SPLIT for a strategy that does not exist.
    """
    known = strategies()
    if name not in known:
        raise UsageError(
            Problem("TARGET_SPLIT", where, "no such way to split a model", " or ".join(sorted(known)), name)
        )
    return known[name]
