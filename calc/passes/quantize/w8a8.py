"""w8a8: symmetric int8 weights per output channel, dynamic symmetric int8 activations per token, round to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calc.core.numerics import quant_rows_int8

NAME = "w8a8"
FORMAT = "w8"


def ort_values(w: NDArray[np.float32], group: int) -> tuple[NDArray[np.generic], NDArray[np.float32] | None]:
    """What the graph computes with: int8 codes and a f32 scale per row."""
    codes, scale = quant_rows_int8(w)
    return codes, scale
