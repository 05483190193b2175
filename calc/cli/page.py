"""``calc inspect --html``: one page with the sub-models and the memory maps. No scripts, no other files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from calc.cli.describe import dram_rows, largest, submodel_rows, weight_rows
from calc.cli.text import clean, count, gated, ms, rate, size

if TYPE_CHECKING:
    from calc.calbin.manifest import ChipPart, Manifest, MemoryRegion, SubModel

WIDTH, HEIGHT = 960, 260
MAX_BUFFERS = 2000
"""Buffers drawn per SRAM map, the largest: a browser draws no more in a moment."""

COLOURS = {"weights": "#3b6fb6", "kv": "#d98324", "io": "#5a9a57", "free": "#e4e4e4"}
SRAM = {"weight ring": "#3b6fb6", "buffers, at their peak": "#d98324", "free": "#e4e4e4"}
PALETTE = ("#3b6fb6", "#d98324", "#5a9a57", "#b04a5a", "#7b61a8", "#4aa3a2", "#a08440", "#6a7a8c")

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: .2em }
h2 { font-size: 1.15em; margin: 1.8em 0 .4em }
h3 { font-size: 1em }
table { border-collapse: collapse }
td, th { padding: .2em .9em .2em 0; text-align: left; white-space: nowrap }
th { border-bottom: 1px solid #999; font-weight: 600 }
.n { text-align: right; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto }
.note { color: #666 }
.key span { display: inline-block; margin-right: 1.2em }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em }
svg { display: block; width: 100%; height: auto }
"""


def page(m: Manifest, nbytes: int, path: str) -> str:
    """The page's text.

    Args:
        m: the manifest.
        nbytes: size of the file.
        path: of the file, for the heading.
    """
    head = f"{m.model.name} on {m.target.name}"
    body = [
        f"<h1>{_text(head)}</h1>",
        f"<p class=note>{_text(path)}, {size(nbytes)}; {m.states.capacity} tokens × {m.states.slots} slots; "
        f"times are predicted for the target</p>",
        "<h2>Sub-models</h2>",
        _submodels(m),
        "<h2>DRAM</h2>",
        _key(COLOURS),
        *(_dram(m, chip) for chip in range(m.target.chips)),
        "<h2>SRAM</h2>",
        _key(SRAM),
        "<p class=note>The bar is all of a chip's SRAM. In the map below it, each rectangle is a buffer: across, the "
        "program steps during which it is live; up, its addresses. Point at one for its name.</p>",
        *(_sram(m, s, p) for s in m.submodels for p in s.chip_map),
        "<h2>Weights</h2>",
        _table(("scheme", "format", ">count", ">size"), [(a, b, n, size(k)) for a, b, n, k in weight_rows(m)]),
        _rungs(m),
    ]
    title = f"<meta charset=utf-8><title>{_text(head)}</title><style>{STYLE}</style>"
    viewport = '<meta name=viewport content="width=device-width">'
    return (
        f"<!doctype html><html lang=en><head>{title}{viewport}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(clean(str(value)))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    numeric = [h.startswith(">") for h in head]

    def cells(tag: str, values: Sequence[object]) -> str:
        kinds = zip(values, numeric, strict=True)
        return "".join(f"<{tag}{' class=n' if n else ''}>{_text(v)}</{tag}>" for v, n in kinds)

    top = cells("th", [h.removeprefix(">") for h in head])
    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    return f"<div class=wide><table><tr>{top}</tr>\n" + "\n".join(lines) + "</table></div>"


def _key(colours: dict[str, str]) -> str:
    items = "".join(f'<span><i style="background:{c}"></i>{_text(name)}</span>' for name, c in colours.items())
    return f"<p class=key>{items}</p>"


def _submodels(m: Manifest) -> str:
    head = ("name", "role", ">batch", ">tokens", ">instructions", ">SRAM peak", ">MACs", ">DRAM", ">ms", ">tok/s")
    rows = [
        (
            s.name,
            s.role,
            s.batch,
            s.seq,
            sum(p.instructions for p in s.chip_map),
            " + ".join(size(p.sram_peak) for p in s.chip_map),
            count(s.workload.macs),
            size(s.workload.dram_bytes),
            ms(t),
            rate(s.batch * s.seq / t),
        )
        for s, t in submodel_rows(m)
    ]
    return _table(head, rows)


def _svg(height: int, label: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role=img aria-label="{_text(label)}">{"".join(parts)}</svg>'


def _rect(x: float, y: float, w: float, h: float, colour: str, title: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(w, 0.5):.2f}" height="{max(h, 0.5):.2f}"'
    return f'<rect {place} fill="{colour}" stroke="#fff" stroke-width=".5"><title>{_text(title)}</title></rect>'


def _dram(m: Manifest, chip: int) -> str:
    """Two bars: all of the chip's DRAM by use, then the used part region by region."""
    total = m.target.dram_bytes
    rows = dram_rows(m, chip)
    used = sum(n for _, _, n in rows)
    parts, x = [], 0.0
    for kind, _, n in (*rows, ("free", 0, max(0, total - used))):
        w = WIDTH * n / total
        parts.append(_rect(x, 0, w, 26, COLOURS.get(kind, PALETTE[-1]), f"{kind}: {size(n)}"))
        x += w
    regions = [r for r in m.dram if r.chip == chip]
    end = max((r.offset + r.nbytes for r in regions), default=1)
    for r in regions:
        colour = COLOURS.get(r.name.partition(".")[0], PALETTE[-1])
        label = f"{r.name}: {size(r.nbytes)} at {r.offset:#x}"
        parts.append(_rect(WIDTH * r.offset / end, 36, WIDTH * r.nbytes / end, 26, colour, label))
    sums = ", ".join(f"{kind} {size(n)}" for kind, _, n in rows)
    head = f"<h3>Chip {chip}: {_text(sums)}; free {size(total - used)} of {size(total)}</h3>"
    return head + _svg(64, f"DRAM of chip {chip}", parts) + "<p class=note>Above: all of it. Below: the used part.</p>"


def _sram(m: Manifest, s: SubModel, p: ChipPart) -> str:
    """A bar of all the SRAM, then a map of what changes: a rectangle per buffer, across its steps, up its addresses."""
    steps = max((r.last for r in p.regions), default=0) + 1
    ring = _resident(p, steps)
    total, work = m.target.sram_bytes, max(1, p.sram_peak - ring)
    parts, x = [], 0.0
    for name, n in (("weight ring", ring), ("buffers, at their peak", work), ("free", total - p.sram_peak)):
        parts.append(_rect(x, 0, WIDTH * n / total, 26, SRAM[name], f"{name}: {size(n)}"))
        x += WIDTH * n / total
    parts.append(f'<rect x="0" y="36" width="{WIDTH}" height="{HEIGHT}" fill="#f4f4f4"/>')
    moving = [r for r in p.regions if r.offset >= ring]
    parts += [_buffer(r, i, steps, ring, work) for i, r in enumerate(largest(moving, MAX_BUFFERS))]
    head = f"{s.name}, chip {p.chip}: peak {size(p.sram_peak)} of {size(total)} ({p.sram_peak / total:.1%})"
    note = f"{len(moving)} buffers within {size(work)} from {ring:#x} on, {steps} steps"
    picture = _svg(HEIGHT + 36, f"SRAM of {s.name} on chip {p.chip}", parts)
    return f"<h3>{_text(head)}</h3>{picture}<p class=note>{note}</p>"


def _resident(p: ChipPart, steps: int) -> int:
    """End of the buffer at address 0 if it is live all the time: the weight ring, which would dwarf the rest."""
    return max((r.nbytes for r in p.regions if r.offset == 0 and r.last - r.first >= 0.9 * (steps - 1)), default=0)


def _buffer(r: MemoryRegion, i: int, steps: int, base: int, span: int) -> str:
    h = HEIGHT * r.nbytes / span
    y = 36 + HEIGHT * (1 - (r.offset - base) / span) - h
    w = WIDTH * (r.last - r.first + 1) / steps
    label = f"{r.name}: {size(r.nbytes)} at {r.offset:#x}, steps {r.first}..{r.last}"
    return _rect(WIDTH * r.first / steps, y, w, h, PALETTE[i % len(PALETTE)], label)


def _rungs(m: Manifest) -> str:
    if m.golden is None:
        return "<p>No golden vectors.</p>"
    rows = [
        (
            r.name,
            r.reference,
            r.metric,
            gated(r.logits, r.gate_logits, ok=(r.logits or 0.0) <= r.gate_logits),
            gated(r.kv, r.gate_kv, ok=(r.kv or 0.0) <= r.gate_kv),
        )
        for r in m.golden.rungs
    ]
    return "<h2>Verification ladder</h2>" + _table(("rung", "against", "metric", "logits", "KV"), rows)
