"""Numbers and names as people read them."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", " k", " M", " G", " T", " P", " E")


def clean(text: str) -> str:
    """`text` with control characters shown as escapes: names in a file may hold what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """``1.65 MiB``; bytes are exact."""
    i, n = 0, float(nbytes)
    while abs(n) >= 1024 and i < len(_BINARY) - 1:
        i, n = i + 1, n / 1024
    return f"{n:.0f} B" if not i else f"{n:.2f} {_BINARY[i]}"


def count(n: float) -> str:
    """``11.9 M``; below ten thousand exact."""
    i, x = 0, float(n)
    if abs(x) < 10_000:
        return f"{x:.0f}"
    while abs(x) >= 999.5 and i < len(_DECIMAL) - 1:
        i, x = i + 1, x / 1000
    return f"{x:.3g}{_DECIMAL[i]}" if abs(x) < 999.5 else f"{x:.0f}{_DECIMAL[i]}"


def ms(seconds: float) -> str:
    """Milliseconds, three digits or more."""
    n = seconds * 1e3
    return f"{n:.3f}" if n < 100 else f"{n:.1f}"


def rate(per_second: float) -> str:
    """A rate: two decimals below 100, none above 10000."""
    return (
        f"{per_second:.2f}" if per_second < 100 else f"{per_second:.1f}" if per_second < 10_000 else f"{per_second:.0f}"
    )


def gated(value: float | None, gate: float, *, ok: bool) -> str:
    """A measured value and its gate: ``5.7e-06 <= 0.0002``."""
    if value is None:
        return "not measured"
    return f"{value:.3g} {'<=' if ok else '>'} {gate:.3g}"


def duration(seconds: float) -> str:
    """``8 s``, ``3 min 05 s``, ``1 h 12 min``."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60:02d} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60:02d} min"
