"""bf16: weights rounded to BF16, nearest even. The NPU's own type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calc.core.numerics import to_bf16

NAME = "bf16"
FORMAT = "bf16"


def ort_values(w: NDArray[np.float32], group: int) -> tuple[NDArray[np.generic], NDArray[np.float32] | None]:
    """What the graph computes with: the rounded values as f32, and no scale."""
    return to_bf16(w).astype(np.float32), None
