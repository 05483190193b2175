"""Section digests, chunk by chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from calc.calbin.layout import CHUNK, HINT
from calc.calbin.manifest import Section
from calc.core.errors import Problem


def check_section(data: memoryview, section: Section) -> Iterator[tuple[int, list[Problem]]]:
    """Read a section and compare its digests.

    Args:
        data: the whole file.
        section: a section whose range and number of chunks have been checked.

    Yields:
        For each chunk its size in bytes and what is wrong with it (CALBIN_DIGEST).
    """
    whole = hashlib.sha256()
    damaged = False
    for i, expected in enumerate(section.chunks):
        start = section.offset + i * CHUNK
        part = data[start : min(start + CHUNK, section.offset + section.nbytes)]
        whole.update(part)
        got = hashlib.sha256(part).hexdigest()
        problems = []
        if got != expected:
            damaged = True
            problems.append(_problem(f"section {section.name}, chunk {i}", expected, got, start))
        if i == len(section.chunks) - 1 and not damaged and whole.hexdigest() != section.sha256:
            problems.append(_problem(f"section {section.name}", section.sha256, whole.hexdigest(), section.offset))
        yield len(part), problems
    if not section.chunks and whole.hexdigest() != section.sha256:
        yield 0, [_problem(f"section {section.name}", section.sha256, whole.hexdigest(), section.offset)]


def _problem(where: str, expected: str, got: str, offset: int) -> Problem:
    what = "the content does not have its digest: a flipped bit, or a section of another build"
    return Problem("CALBIN_DIGEST", where, what, expected, got, HINT, offset)
