"""Finite: a weight that holds infinities or NaN stops the compile, and all such weights are named together."""

from __future__ import annotations

from threading import Lock

import numpy as np
from numpy.typing import NDArray

from calc.core.errors import ModelError, Problems


class Finite:
    """Counts the values that are not finite, by checkpoint tensor. Threads may share it."""

    def __init__(self) -> None:
        self._bad: dict[str, int] = {}
        self._lock = Lock()

    def check(self, source: str, values: NDArray[np.generic]) -> bool:
        """Whether all of a tensor's values (or of some of its rows) are finite; those that are not are counted."""
        numbers = values if values.dtype.kind in "fiub" else values.astype(np.float32)
        broken = int(np.count_nonzero(~np.isfinite(numbers)))
        if broken:
            with self._lock:
                self._bad[source] = self._bad.get(source, 0) + broken
        return not broken

    def raise_if_any(self) -> None:
        """Refuse the model if a value was not finite.

        Raises:
            ModelError: MODEL_NOT_FINITE for each checkpoint tensor.
        """
        problems = Problems()
        for source, n in sorted(self._bad.items()):
            problems.add(
                "MODEL_NOT_FINITE",
                source,
                f"{n} values are not finite",
                expected="finite numbers",
                hint="the checkpoint is damaged or overflowed in training",
            )
        problems.raise_if_any(ModelError)
