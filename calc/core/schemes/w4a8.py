"""w4a8: the weights of w4a16, dynamic symmetric int8 activations per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from calc.core.schemes.base import Activations
from calc.core.schemes.w4a16 import W4A16


@dataclass(frozen=True)
class W4A8(W4A16):
    """Symmetric int4 weights by group along K, dynamic symmetric int8 activations per token, round to nearest."""

    name = "w4a8"
    activations: ClassVar[Activations] = "int8"
    why = "the weights are those of w4a16, whose loss is far above that of int8 activations"
