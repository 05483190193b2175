"""The C library's heap: memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Give freed memory back, where the C library would keep it.

    glibc raises the size from which it maps blocks one by one to the largest that was freed. Weights of a layer then
    come from its heap, which only shrinks from the end: a loop over layers that holds one at a time grows by a part of
    each. To be called between layers, not between tensors.
    """
    release = _malloc_trim()
    if release is not None:
        release(0)
