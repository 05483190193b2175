"""w4z: asymmetric 4-bit weights by group along K, with a zero point per group, BF16 activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from calc.core.numerics import F32, quant_groups_uint4
from calc.core.packing import W4Z as FORMAT
from calc.core.packing import Codes
from calc.core.schemes.base import Activations, Scheme, over_groups


@dataclass(frozen=True)
class W4Z(Scheme):
    """Asymmetric 4-bit weights by group along K, with a zero point per group, BF16 activations, round to nearest."""

    name = "w4z"
    format = FORMAT
    activations: ClassVar[Activations] = "bf16"
    gate = 1.0
    why = "its steps are at most 14/15 of those of w4a16, whose gate it has"

    def quantize(self, w: F32) -> Codes:
        """Codes in 0..15, a scale and a zero point per group."""
        return Codes(*quant_groups_uint4(w, self.group))

    def bound(self, w: F32) -> F32:
        """The step is the range of the group and 0, over 15.

        Where the value and the zero point are both rounded up at the upper end, the code is cut to 15. That costs half
        a step, and what rounding the scale to BF16 moves there: 2^-8 of the range.
        """
        high: F32 = np.maximum(over_groups(np.maximum, w, self.group), np.float32(0))
        low: F32 = np.minimum(over_groups(np.minimum, w, self.group), np.float32(0))
        part = np.float32(0.5 / 15 + 2.0**-8)
        return high * part - low * part
