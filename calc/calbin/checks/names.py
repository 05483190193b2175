"""Names are well formed and unique; references lead somewhere."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable

from calc.calbin.codec import Path
from calc.calbin.manifest import SectionKind
from calc.calbin.report import Context
from calc.core.schemes import schemes

_DRIVE = re.compile(r"[A-Za-z]:")
_ANONYMOUS = re.compile(r"(inputs?|outputs?|tensors?|args?)?[._\[]?\d+\]?")
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def name_fault(name: str) -> str:
    """Why `name` may not be a name, "" if it may."""
    if not (name.isascii() and name.isprintable()):
        if unicodedata.normalize("NFC", name) != name:
            return "it is not in Unicode's composed form (NFC)"
        if any(unicodedata.category(c) in _HIDDEN for c in name):
            return "it has a control, format or line character"
    if name != name.strip():
        return "it starts or ends with white space"
    if "\\" in name or _DRIVE.match(name):
        return "it looks like a path of another system"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it has an empty, '.' or '..' component"
    return ""


def check_names(ctx: Context) -> None:
    """CALBIN_NAME, CALBIN_DUPLICATE_NAME, CALBIN_ANONYMOUS (R4, R6)."""
    m = ctx.manifest
    _table(ctx, "section", ((("sections", i, "name"), s.name) for i, s in enumerate(m.sections)))
    _table(ctx, "sub-model", ((("submodels", i, "name"), s.name) for i, s in enumerate(m.submodels)))
    _table(ctx, "CSR", ((("csrs", i, "name"), c.name) for i, c in enumerate(m.csrs)))
    _table(ctx, "array", ((("arrays", i, "name"), a.name) for i, a in enumerate(m.arrays)))
    _table(ctx, "file", ((("files", i, "name"), f.name) for i, f in enumerate(m.files)))
    by_chip: defaultdict[int, list[tuple[Path, str]]] = defaultdict(list)
    for i, weight in enumerate(m.weights):
        by_chip[weight.chip].append((("weights", i, "name"), weight.name))
    for names in by_chip.values():
        _table(ctx, "weight", names)
    _table(ctx, "DRAM region", ((("dram", i, "name"), r.name) for i, r in enumerate(m.dram)), unique=False)
    for i, sub in enumerate(m.submodels):
        inputs = [(("submodels", i, "inputs", j, "name"), t.name) for j, t in enumerate(sub.inputs)]
        outputs = [(("submodels", i, "outputs", j, "name"), t.name) for j, t in enumerate(sub.outputs)]
        at = [t.at.chip for t in (*sub.inputs, *sub.outputs)]
        for chip in set(at):  # one tensor may lie on several chips, whole or in parts
            _table(ctx, "tensor", [named for named, c in zip((*inputs, *outputs), at, strict=True) if c == chip])
        for path, name in (*inputs, *outputs):
            if _ANONYMOUS.fullmatch(name):
                what = "a tensor is named by its place instead of its meaning (R6)"
                ctx.report.add("CALBIN_ANONYMOUS", path, what, expected="a name such as input_ids", got=name)


def _table(ctx: Context, kind: str, names: Iterable[tuple[Path, str]], *, unique: bool = True) -> None:
    seen: dict[str, str] = {}
    for path, name in names:
        fault = name_fault(name)
        if fault:
            ctx.report.add("CALBIN_NAME", path, f"a {kind} may not have this name: {fault}", got=repr(name))
        folded = unicodedata.normalize("NFC", name.casefold())
        if unique and folded in seen:
            what = f"two {kind}s have the same name (letter case does not tell names apart)"
            ctx.report.add(
                "CALBIN_DUPLICATE_NAME", path, what, expected="unique names", got=f"{seen[folded]!r} and {name!r}"
            )
        seen[folded] = name


def check_references(ctx: Context) -> None:
    """CALBIN_REFERENCE, CALBIN_SHARD_MISSING, CALBIN_SECTION_KIND, CALBIN_SECTION_UNUSED, CALBIN_INDEX."""
    m = ctx.manifest
    used: Counter[str] = Counter()

    def refer(path: Path, name: str, kinds: tuple[SectionKind, ...], missing: str = "CALBIN_REFERENCE") -> None:
        section = ctx.sections.get(name)
        used[name] += 1
        if section is None:
            ctx.report.add(missing, path, "the section does not exist", expected="a section's name", got=name)
        elif section.kind not in kinds:
            what = "the section holds something else"
            ctx.report.add("CALBIN_SECTION_KIND", path, what, expected=" or ".join(kinds), got=section.kind)
        elif section.kind in ("program", "weights") and used[name] == 2:
            what = "a program or shard section belongs to one chip of one sub-model"
            ctx.report.add("CALBIN_REFERENCE", path, what, expected="one reference", got=name)

    for i, sub in enumerate(m.submodels):
        for j, part in enumerate(sub.chip_map):
            refer(("submodels", i, "chip_map", j, "program"), part.program, ("program",))
    for i, shard in enumerate(m.shards):
        refer(("shards", i, "section"), shard.section, ("weights",), "CALBIN_SHARD_MISSING")
    if m.golden is not None:
        refer(("golden", "section"), m.golden.section, ("golden",))
    elif m.arrays:
        what = "there are golden arrays, but no golden section"
        ctx.report.add("CALBIN_REFERENCE", ("golden",), what, expected="golden", got="nil")
    for i, file in enumerate(m.files):
        refer(("files", i, "section"), file.section, ("tokenizer", "graph"))
    for i, section in enumerate(m.sections):
        if not used[section.name]:
            what = "nothing refers to this section"
            ctx.report.add("CALBIN_SECTION_UNUSED", ("sections", i), what, expected="a reference", got=section.name)
    _check_chips(ctx)


def _check_chips(ctx: Context) -> None:
    m = ctx.manifest
    shards = Counter(s.chip for s in m.shards)
    for i, shard in enumerate(m.shards):
        if shards[shard.chip] > 1 or shard.chip >= m.target.chips:
            what = "shards name a chip twice, or one the target lacks"
            ctx.report.add(
                "CALBIN_CHIP", ("shards", i, "chip"), what, expected=f"0 to {m.target.chips - 1}, once", got=shard.chip
            )
    expected = f"one of {sorted(shards)[:16]}"
    tables: tuple[tuple[str, Iterable[int]], ...] = (
        ("weights", (w.chip for w in m.weights)),
        ("dram", (r.chip for r in m.dram)),
    )
    for table, chips in tables:
        for i, chip in enumerate(chips):
            if chip not in shards:
                ctx.report.add(
                    "CALBIN_INDEX", (table, i, "chip"), "no shard is for this chip", expected=expected, got=chip
                )
    for i, state in enumerate(m.states.states):
        for j, part in enumerate(state.parts):
            if part.chip not in shards:
                ctx.report.add(
                    "CALBIN_INDEX",
                    ("states", "states", i, "parts", j, "chip"),
                    "no shard is for this chip",
                    expected=expected,
                    got=part.chip,
                )


def check_quantization(ctx: Context) -> None:
    """CALBIN_REFERENCE, CALBIN_QUANT."""
    weights = {w.name: w for w in ctx.manifest.weights}
    seen: set[str] = set()
    for i, entry in enumerate(ctx.manifest.quantization):
        path: Path = ("quantization", i)
        weight = weights.get(entry.weight)
        if weight is None:
            what = "the quantized weight does not exist"
            ctx.report.add("CALBIN_REFERENCE", (*path, "weight"), what, expected="a weight's name", got=entry.weight)
            continue
        if entry.weight in seen:
            ctx.report.add(
                "CALBIN_DUPLICATE_NAME", (*path, "weight"), "a weight has two quantization entries", got=entry.weight
            )
        seen.add(entry.weight)
        packed = schemes()[entry.scheme].format.name
        if weight.format != packed or entry.group != weight.group:
            what = "the scheme does not fit the weight's format"
            expected = f"format {packed}, group {entry.group}"
            ctx.report.add(
                "CALBIN_QUANT", path, what, expected=expected, got=f"format {weight.format}, group {weight.group}"
            )
