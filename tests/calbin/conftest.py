from __future__ import annotations

import pytest
from calbin_tiny import Parts, assemble, tiny

_CACHE = {chips: tiny(chips) for chips in (1, 2)}


@pytest.fixture(params=[1, 2], ids=["1chip", "2chips"])
def parts(request) -> Parts:
    """A valid calbin's parts, to be damaged."""
    return _CACHE[request.param].copy()


@pytest.fixture
def one() -> Parts:
    return _CACHE[1].copy()


@pytest.fixture(scope="session")
def good() -> bytes:
    """A valid one-chip calbin's bytes."""
    return assemble(_CACHE[1])
