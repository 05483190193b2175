"""The numerics contract (``docs/numerics.md``), written once: rounding, saturation and quantization.

Activations are BF16 in memory and are rounded to nearest even on store; the vector unit and the accumulators are FP32.
A scale is finite, positive and normal; an all-zero group has scale 1 and codes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BF16 = np.dtype(ml_dtypes.bfloat16)
MIN_NORMAL = np.float32(2.0**-126)
MASKED = -1.0e30
"""Score of a masked position. Finite, so that a tile that is masked whole gives exp(0), not NaN: such a tile's sums are
multiplied by exp(MASKED - m) = 0 as soon as a row meets its first visible key."""


def to_bf16(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """Round to BF16, nearest even; overflow goes to infinity (IEEE 754)."""
    return x.astype(BF16)


@dataclass(frozen=True)
class Loss:
    """What rounding to a narrower type lost: non-zero values that became zero, finite ones that became infinite."""

    flushed: int
    saturated: int


def bf16_loss(x: NDArray[np.generic]) -> Loss:
    """Count what `to_bf16` loses of `x`."""
    f = x.astype(np.float32)
    y = to_bf16(f).astype(np.float32)
    return Loss(int(np.count_nonzero((y == 0) & (x != 0))), int(np.count_nonzero(np.isinf(y) & np.isfinite(x))))


def quant_rows_int8(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Dynamic symmetric int8 per row: ``scale = max|row| / 127``, ``codes = clip(round(x / scale), -127, 127)``.

    Args:
        x: [..., K].

    Returns:
        codes int8 [..., K] and scale f32 [...].
    """
    amax = np.abs(x).max(axis=-1)
    scale = (amax / np.float32(127)).astype(np.float32)
    scale = np.where(amax == 0, np.float32(1), np.maximum(scale, MIN_NORMAL)).astype(np.float32)
    codes = np.clip(np.rint(x / scale[..., None]), -127, 127).astype(np.int8)
    return codes, scale


def quant_groups_int4(w: F32, group: int) -> tuple[NDArray[np.int8], NDArray[np.generic]]:
    """Symmetric int4 per group along the last axis, rounded to nearest. The last group may be short.

    The scale is ``max|group| / 7`` rounded to BF16 (the range of FP32, so that tiny groups do not underflow), so that
    ``code * scale`` is exact in FP32 and products with BF16 activations are too.

    Args:
        w: [N, K].
        group: values per scale along K.

    Returns:
        codes int8 [N, K] in -7..7 and scales bf16 [N, ceil(K / group)].
    """
    n, k = w.shape
    groups = -(-k // group)
    padded = np.zeros((n, groups * group), np.float32)
    padded[:, :k] = w
    blocks = padded.reshape(n, groups, group)
    amax = np.abs(blocks).max(axis=-1)
    scale = to_bf16(np.where(amax == 0, np.float32(1), np.maximum(amax / np.float32(7), MIN_NORMAL)))
    s = scale.astype(np.float32)
    codes = np.clip(np.rint(blocks / s[..., None]), -7, 7).astype(np.int8)
    return codes.reshape(n, groups * group)[:, :k], scale


def quant_groups_uint4(w: F32, group: int) -> tuple[NDArray[np.uint8], NDArray[np.generic], NDArray[np.uint8]]:
    """Asymmetric 4 bits per group along the last axis, rounded to nearest. The last group may be short.

    The range of a group is widened to hold 0, so that 0 is a code. ``scale = (max - min) / 15``, rounded to BF16;
    ``zero = round(-min / scale)``; ``code = clip(round(w / scale) + zero, 0, 15)``. The value is
    ``(code - zero) * scale``, exact in FP32.

    Args:
        w: [N, K].
        group: values per scale along K.

    Returns:
        codes uint8 [N, K] in 0..15, scales bf16 [N, ceil(K / group)] and zero points uint8 of that shape in 0..15.
    """
    n, k = w.shape
    groups = -(-k // group)
    padded = np.zeros((n, groups * group), np.float32)
    padded[:, :k] = w
    blocks = padded.reshape(n, groups, group)
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    # divided before the difference, which could be beyond FP32
    span = high / np.float32(15) - low / np.float32(15)
    scale = to_bf16(np.where(high == low, np.float32(1), np.maximum(span, MIN_NORMAL)))
    s = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / s), 0, 15)
    codes = np.clip(np.rint(blocks / s[..., None]) + zero[..., None], 0, 15).astype(np.uint8)
    return codes.reshape(n, groups * group)[:, :k], scale, zero.astype(np.uint8)


def dequant_groups(
    codes: NDArray[np.generic], scale: NDArray[np.generic], zero: NDArray[np.uint8] | None, group: int
) -> F32:
    """``(code - zero) * scale`` in FP32, exact.

    Args:
        codes: [N, K], whole numbers.
        scale: bf16 [N, ceil(K / group)].
        zero: zero points of the scales' shape, None for symmetric codes.
        group: values per scale along K.

    Returns:
        f32 [N, K].
    """
    k = codes.shape[1]
    whole = codes.astype(np.float32)
    if zero is not None:
        whole -= np.repeat(zero.astype(np.float32), group, axis=1)[:, :k]
    return whole * np.repeat(scale.astype(np.float32), group, axis=1)[:, :k]
