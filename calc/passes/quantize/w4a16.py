"""w4a16: symmetric int4 weights by group along K, BF16 activations, round to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calc.core.numerics import dequant_groups_int4, quant_groups_int4

NAME = "w4a16"
FORMAT = "w4"


def ort_values(w: NDArray[np.float32], group: int) -> tuple[NDArray[np.generic], NDArray[np.float32] | None]:
    """What the graph computes with: ``code * scale``, which FP32 holds exactly."""
    codes, scale = quant_groups_int4(w, group)
    return dequant_groups_int4(codes, scale, group), None
