"""Gathers what is wrong with a manifest, by path, and turns the paths into file offsets once, at the end."""

from __future__ import annotations

from dataclasses import replace

from calc.calbin.codec import Path, locate
from calc.calbin.manifest import Manifest
from calc.core.errors import CalcError, FormatError, Problem, VersionError

MAX_PROBLEMS = 100
"""Problems listed; a file can be wrong in a million places, a reader of messages has an hour."""

_HINT = "compile the model again; if it persists, report the file's provenance"


def dotted(path: Path) -> str:
    """``submodels[1].batch`` for ``("submodels", 1, "batch")``."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out or "manifest"


def shown(value: object) -> str:
    """`value` for a message: at most 80 characters."""
    text = value[:80] if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Report:
    """Problems of one manifest.

    Args:
        raw: the manifest's bytes, to find where a field is.
        base: their offset in the file.
    """

    def __init__(self, raw: bytes, base: int) -> None:
        self._raw = raw
        self._base = base
        self._items: list[tuple[Path, Problem]] = []
        self._dropped = 0

    @property
    def full(self) -> bool:
        """Whether further problems would only be counted."""
        return len(self._items) >= MAX_PROBLEMS

    def add(
        self,
        code: str,
        path: Path,
        what: str,
        *,
        expected: object = "",
        got: object = "",
        hint: str = _HINT,
        offset: int | None = None,
    ) -> None:
        """Record a problem of the field at `path`; `offset` overrides the field's own place in the file."""
        if self.full:
            self._dropped += 1
            return
        problem = Problem(code, dotted(path), what, shown(expected), shown(got), hint, offset)
        self._items.append((path, problem))

    def raise_if_any(self, kind: type[CalcError] = FormatError) -> None:
        """Raise `kind` with every problem recorded, each with its offset."""
        if not self._items:
            return
        offsets = locate(self._raw, [path for path, problem in self._items if problem.offset is None], self._base)
        problems = [p if p.offset is not None else replace(p, offset=offsets.get(path)) for path, p in self._items]
        if self._dropped:
            what = f"{self._dropped} further problems are not listed"
            problems.append(Problem("CALBIN_MORE", "manifest", what, hint="mend those listed first"))
        raise kind(problems)

    def raise_version(self) -> None:
        """Raise `VersionError` with every problem recorded."""
        self.raise_if_any(VersionError)


class Context:
    """What the checks look things up in: the manifest and its tables by key.

    Attributes:
        manifest: the manifest under test.
        report: where problems go.
        sections: sections by name; of two with one name the first.
        csrs: names of the CSR arrays.
        state_chips: the chips that have a layer's states, by layer.
    """

    def __init__(self, manifest: Manifest, report: Report) -> None:
        self.manifest = manifest
        self.report = report
        self.sections = {s.name: s for s in reversed(manifest.sections)}
        self.csrs = {c.name for c in manifest.csrs}
        self.state_chips: dict[int, set[int]] = {}
        for state in manifest.states.states:
            if state.layer is not None:
                self.state_chips.setdefault(state.layer, set()).update(p.chip for p in state.parts)
