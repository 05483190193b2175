"""Allocate: SRAM addresses for the emitter's buffers.

Buffers whose live ranges overlap never share bytes; the largest are placed first, each at the lowest address that
fits (greedy by size, after Pisarchyk and Lee 2020, arXiv 2001.03288). Sharing between buffers that live one after the
other is made safe by the sync pass, which orders accesses by address, not by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calc.core.errors import CapacityError, Problem
from calc.kernels.program import Buffer


class SramTooSmallError(CapacityError):
    """Buffers do not fit; `missing` is how many bytes more they need."""

    def __init__(self, problems: Problem | Iterable[Problem], missing: int) -> None:
        super().__init__(problems)
        self.missing = missing


def live_ranges(buffers: Sequence[Buffer], loops: Sequence[tuple[int, int]]) -> None:
    """Extend live ranges over the loops that a buffer's contents must survive.

    A buffer that is used in a loop and also before or after it holds something for all of its iterations. One that is
    used nowhere else is written anew in each iteration, and shares memory with what the body uses at other times.

    Args:
        buffers: with the first and the last step that uses them.
        loops: first and last step of each loop's body, inner loops before those that hold them.
    """
    for start, end in loops:
        for b in buffers:
            if b.first < start <= b.last <= end:
                b.last = end
            elif start <= b.first <= end < b.last:
                b.first = start


def allocate(buffers: Sequence[Buffer], capacity: int, where: str, hint: str) -> int:
    """Give every buffer its `base`.

    Args:
        buffers: SRAM buffers with their live ranges.
        capacity: bytes of SRAM.
        where: sub-model and chip, for the error.
        hint: what the user can do when it does not fit.

    Returns:
        The highest byte in use.

    Raises:
        SramTooSmallError: SRAM_TOO_SMALL with the bytes that are missing.
    """
    end = max((b.last for b in buffers), default=0)
    used = [b for b in buffers if b.last >= 0 or b.manual]
    for b in used:
        if b.manual:
            b.first, b.last = 0, end
    placed: list[Buffer] = []
    for b in sorted(used, key=lambda b: (not b.manual, -b.nbytes, b.first, b.name)):
        at = 0
        rivals = sorted((p for p in placed if p.first <= b.last and b.first <= p.last), key=lambda p: p.base or 0)
        for p in rivals:
            start = p.base or 0
            if at + b.nbytes <= start:
                break
            at = max(at, start + p.nbytes)
        b.base = at
        placed.append(b)
    peak = max(((b.base or 0) + b.nbytes for b in placed), default=0)
    if peak > capacity:
        widest = max(placed, key=lambda b: b.nbytes)
        raise SramTooSmallError(
            Problem(
                "SRAM_TOO_SMALL",
                where,
                f"the activations need {peak - capacity} bytes more SRAM than the target has",
                expected=f"at most {capacity}",
                got=f"{peak}; the largest buffer is {widest.name} with {widest.nbytes}",
                hint=hint,
            ),
            peak - capacity,
        )
    return peak
