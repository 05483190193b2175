"""bf16: weights rounded to BF16, nearest even. The NPU's own type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from calc.core.numerics import F32, to_bf16
from calc.core.packing import BF16, Codes
from calc.core.schemes.base import Activations, Scheme


@dataclass(frozen=True)
class Bf16(Scheme):
    """Weights rounded to BF16, nearest even. The NPU's own type."""

    name = "bf16"
    format = BF16
    activations: ClassVar[Activations] = "bf16"
    gate = 0.0
    why = "nothing is lost against the bf16 rung, whose own gate is for the rounding"

    def quantize(self, w: F32) -> Codes:
        """The rounded values."""
        return Codes(to_bf16(w))

    def bound(self, w: F32) -> F32:
        """Half of the last of 8 bits."""
        return np.abs(w) * np.float32(2.0**-8)
