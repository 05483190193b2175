"""Distances between two results: what every gate is stated in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def rel_rms(got: Sequence[F32], want: Sequence[F32]) -> float:
    """Root mean square of the difference over that of the reference; NaN counts as infinitely far."""
    num = sum(float(np.square(g - w, dtype=np.float64).sum()) for g, w in zip(got, want, strict=True))
    den = sum(float(np.square(w, dtype=np.float64).sum()) for w in want)
    value = float(np.sqrt(num / den)) if den else float(np.sqrt(num))
    return value if np.isfinite(value) else float("inf")


def max_abs(got: Sequence[F32], want: Sequence[F32]) -> float:
    """Largest absolute difference over all arrays; NaN if there is one in any of them."""
    return float(np.max([np.abs(g - w).max(initial=0.0) for g, w in zip(got, want, strict=True)]))


def kl_top1(got: F32, want: F32) -> tuple[float, float]:
    """Mean KL(want || got) in nats over rows, and the share of rows whose largest logit is the same."""

    def log_softmax(x: F32) -> NDArray[np.float64]:
        z = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))

    p, q = log_softmax(want), log_softmax(got)
    kl = float((np.exp(p) * (p - q)).sum(axis=-1).mean())
    return kl, float((got.argmax(-1) == want.argmax(-1)).mean())
