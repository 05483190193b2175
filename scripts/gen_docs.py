"""Write the generated parts of ``docs/*.md``, or with ``--check`` fail if one differs from the code.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; everything around it is written by hand.
The bytes depend on the code alone. A test runs the check, so a table cannot drift from what it describes.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from calc.core import isa
from calc.core.isa import Space
from calc.core.opspec import Access, Func, Imm, ImmKind, OperandSpec
from calc.core.optable import FUNCTIONS, SPECS
from calc.core.packing import COLS_ALIGN, GROUPS, TILE_ALIGN
from calc.core.schemes import schemes
from calc.core.target import TARGET_DIR, load_target, target_names
from calc.kernels import registry
from calc.kernels.base import Attrs, Kernel, attr_values
from calc.passes import ladder
from calc.passes.order import fusion_passes

DOCS = ROOT / "docs"
PART = re.compile(r"<!-- generated: (?P<name>[a-z-]+) -->\n(?P<body>.*?)<!-- end: (?P=name) -->", re.DOTALL)


def cell(value: object) -> str:
    """A value inside a table cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a head that starts with > is a column of numbers."""
    names = [h.removeprefix(">") for h in head]
    rule = ["---:" if h.startswith(">") else "---" for h in head]
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(cell(v) for v in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def doc(thing: object) -> str:
    """A docstring without its indentation."""
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def first_line(thing: object) -> str:
    return doc(thing).split("\n\n")[0].replace("\n", " ")


# -- isa ---------------------------------------------------------------------------------------------------------------

TYPES = {"u1": "u8", "u2": "u16", "u4": "u32", "i4": "i32", "i8": "i64", "f8": "f64"}


def type_name(dt: np.dtype) -> str:
    if dt.subdtype is not None:
        base, shape = dt.subdtype
        return f"{type_name(base)}[{shape[0]}]"
    return "operand" if dt.names else TYPES[dt.str[1:]]


def fields(dt: np.dtype, meaning: dict[str, str]) -> str:
    """Fields of a structured dtype with their byte offsets; every field needs a meaning."""
    assert dt.fields is not None and dt.names is not None
    missing = set(dt.names) ^ set(meaning)
    if missing:
        raise SystemExit(f"gen_docs.py: describe the fields {sorted(missing)}")
    rows = [
        (dt.fields[n][1], dt.fields[n][0].itemsize, type_name(dt.fields[n][0]), f"`{n}`", meaning[n]) for n in dt.names
    ]
    return table((">offset", ">size", "type", "field", "meaning"), rows) + f"\nTotal: {dt.itemsize} bytes.\n"


SECOND_RESULT = [s.name for s in SPECS.values() if (d := s.operand("d")) and d.access is not Access.READ]
RECORD_FIELDS = {
    "op": "opcode",
    "engine": "engine that runs it",
    "sub": f"function of {', '.join(f'{s.name} ({s.functions.__name__})' for s in SPECS.values() if s.functions)}",
    "tile": "packed format of GEMM's operand b (Tile)",
    "flags": "bits (Flag)",
    "dim_regs": "bit j set: `dims[j]` is a register, not a constant",
    "node": "index into the chip part's `nodes`: the graph node it comes from",
    "dims": "dimensions, outermost first; unused ones are 1",
    "imm": "integer immediates imm0 to imm5; of data opcodes other than GEMM, imm4 is the number of dimensions",
    "fimm": "float immediates f0 and f1, used as f32",
    "dst": "result",
    "a": "first operand",
    "b": "second operand",
    "d": f"third operand, or the second result ({', '.join(SECOND_RESULT)})",
    "e": "fourth operand: row scales of GEMM",
}

OPERAND_FIELDS = {
    "base": "byte address of element 0 with all registers 0",
    "stride": "bytes added for each unit of the register of the same index",
    "step": "bytes from one element to the next along dimension j",
    "reg": f"registers of the address terms; {isa.NO_REG} for none",
    "space": "memory (Space); 0: the operand is absent",
    "dtype": "element type (DType)",
    "pad": "0",
}


def isa_record() -> str:
    return fields(isa.RECORD, RECORD_FIELDS)


def isa_operand() -> str:
    return fields(isa.OPERAND, OPERAND_FIELDS)


def isa_limits() -> str:
    rows = [
        ("ISA", f"`{isa.ISA_NAME}` {'.'.join(map(str, isa.ISA_VERSION))}"),
        ("dimensions of a record", isa.MAX_DIMS),
        ("register terms of an address", isa.MAX_TERMS),
        ("scalar registers per chip", isa.REGISTERS),
        ("counting semaphores per chip", isa.SEMAPHORES),
        ("loop depth", isa.MAX_LOOP_DEPTH),
        ("CSR arrays", ", ".join(f"`{n}` ({i})" for i, n in enumerate(isa.CSRS))),
        ("elements of a CSR array", isa.CSR_STRIDE),
    ]
    return table(("limit", "value"), rows)


def opcode_operand(o: OperandSpec) -> str:
    """``d[h i g n] (read, ADDEND)``."""
    access = o.access.value + (f", update with {flag_names(o.update_flag)}" if o.update_flag else "")
    present = [f"with {flag_names(o.flag)}"] if o.flag else []
    present += [f"if f takes {o.argument}"] if o.argument else []
    present += ["if a holds int8 codes"] if o.codes else []
    place = [o.space.name] if o.space is not Space.SRAM else []
    return f"`{o.name}[{', '.join(o.dims.split())}]` {', '.join([access, *place, *present])}"


def flag_names(flags: int) -> str:
    return " ".join(f.name for f in isa.Flag if f & flags)


def opcode_imm(i: Imm) -> str:
    """``imm0 = limit: at least 0, rows of the table``."""
    kind = "" if i.kind is ImmKind.PLAIN or i.name in i.kind.value.split() else i.kind.value
    says = ", ".join(part for part in (kind, i.meaning) if part)
    return f"imm{i.index} = {i.name}{': ' if says else ''}{says}"


def isa_opcodes() -> str:
    rows = []
    for spec in SPECS.values():
        where = "any" if len(spec.engines) == len(isa.Engine) else ", ".join(e.name for e in spec.engines)
        dims = f"`{', '.join(spec.dims.split())}`" if spec.dims else ""
        rows.append((spec.code, f"`{spec.name}`", where, dims, flag_names(spec.flags), spec.cost.value, spec.meaning))
    return table((">code", "opcode", "engine", "dims", "flags", "cost", "meaning"), rows)


def isa_operands() -> str:
    rows = []
    for spec in SPECS.values():
        imms = [opcode_imm(i) for i in spec.imms if i.kind is not ImmKind.RANK]
        imms += [f"f{i} = {name}" if name != f"f{i}" else name for i, name in enumerate(spec.floats)]
        imms += [f"`sub` = {spec.functions.__name__}"] if spec.functions else []
        operands = "<br>".join(opcode_operand(o) for o in spec.operands)
        if operands or imms:
            rows.append((f"`{spec.name}`", operands, "<br>".join(imms)))
    return table(("opcode", "operands", "immediates"), rows)


def isa_functions() -> str:
    rows = [
        (kind.__name__, int(fn), f"`{kind(fn).name}`", f.arity, f.cost.value, f.meaning + divisor(f))
        for kind, table_of in FUNCTIONS.items()
        for fn, f in table_of.items()
    ]
    return table(("sub", ">code", "function", ">operands", "cost", "value"), rows)


def divisor(f: Func) -> str:
    return "; b is not 0" if f.divides else ""


def isa_enums() -> str:
    kinds: tuple[type[IntEnum], ...] = (isa.Engine, isa.Space, isa.DType, isa.Tile, isa.Flag, isa.Alu, isa.Red, isa.Fn)
    return table(("field value", "members"), [(k.__name__, ", ".join(f"{m.name} {int(m)}" for m in k)) for k in kinds])


# -- targets -----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def targets() -> str:
    out = []
    for name in target_names():
        t = load_target(name)
        rows = []
        for section, quantities in tomllib.loads(t.toml).items():
            if isinstance(quantities, dict):
                rows += [
                    (f"`{section}.{k}`", number(q["value"]), q["unit"], q["status"], q["source"])
                    for k, q in quantities.items()
                ]
        out.append(
            f"### {name}\n\n{t.description}. Chips: {t.chips}. Split: by {t.split}. "
            f"File: [`calc/targets/{name}.toml`](../{(TARGET_DIR / name).relative_to(ROOT)}.toml).\n\n"
            + table(("quantity", ">value", "unit", "status", "source"), rows)
        )
    return "\n".join(out)


# -- ops ---------------------------------------------------------------------------------------------------------------


def show(attrs: Attrs) -> str:
    return ", ".join(f"{k}={v}" for k, v in attr_values(attrs).items())


def attributes(kind: type[Attrs]) -> str:
    """A row per attribute: what a node has, and the meaning from the class's docstring."""
    meaning = dict(re.findall(r"(?m)^    (\w+): (.+)$", inspect.getdoc(kind) or ""))
    rows = []
    for f in dataclasses.fields(kind):
        default = "" if f.default is dataclasses.MISSING else int(f.default)
        shown = "0 or 1" if f.type == "bool" else str(f.type)
        rows.append((f"`{f.name}`", shown, default, meaning[f.name]))
    return table(("attribute", "type", "default", "meaning"), rows) if rows else ""


def kernel_section(name: str, kernel: Kernel) -> str:
    lines = [f"## {name}", "", f"`{Path(inspect.getfile(type(kernel))).relative_to(ROOT)}`", "", doc(type(kernel)), ""]
    rules = [doc(c) for c in kernel.constraints]
    lines += ["**Constraints.** " + (" ".join(rules) if rules else "None beyond static shapes."), ""]
    signatures: dict[str, str] = {}
    for ex in kernel.examples():
        ins, outs = kernel.formals(ex.attrs)
        signatures.setdefault(f"({', '.join(ins)}) -> ({', '.join(outs)})", show(ex.attrs))
    rows = [(f"`{s}`", f"`{a}`" if a else "") for s, a in signatures.items()]
    lines += [attributes(kernel.attributes)]
    lines += [table(("formals", "for these attributes"), rows)]
    first = kernel.examples()[0].attrs
    matrices = kernel.weights(first)
    text = ", ".join(f"`{w}`" for w in matrices) if matrices else "none"
    lines += [f"Matrix weights (with a scheme each): {text}.", ""]
    body = kernel.body(first, kernel.schemes(first), "npu").strip()
    lines += [
        "<details><summary>Body with the NPU's numerics, for the first line of the table</summary>",
        "",
        "```",
        body,
        "```",
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def ops() -> str:
    return "\n".join(kernel_section(n, k) for n, k in registry().items())


# -- passes, schemes, gates --------------------------------------------------------------------------------------------


def passes() -> str:
    rows = []
    for i, p in enumerate(fusion_passes(), 1):
        path = Path(inspect.getfile(type(p))).relative_to(ROOT)
        anchor = getattr(p, "anchor", None)
        shown = "" if anchor is None else f"`{'.'.join(x for x in anchor if x)}`"
        rows.append((i, f"`{p.name}`", shown, first_line(type(p)), f"`{path}`"))
    return table((">", "pass", "anchor", "what it does", "file"), rows)


def file_of(cls: type) -> str:
    return f"`{Path(inspect.getfile(cls)).relative_to(ROOT)}`"


def scheme_table() -> str:
    rows = [
        (f"`{n}`", f"`{s.format.name}`", s.activations, first_line(s), f"{s.gate:g}: {s.why}", file_of(s))
        for n, s in schemes().items()
    ]
    groups = ", ".join(map(str, GROUPS))
    tiles = f"columns padded to a multiple of {COLS_ALIGN}, tiles aligned to {TILE_ALIGN} bytes"
    layout = f"\nPacked tiles: {tiles}, groups of {groups}.\n"
    return (
        table(("scheme", "tile format", "activations", "what it is", "gate of the quantized rung", "file"), rows)
        + layout
    )


def gates() -> str:
    quant = "; ".join(f"{n} {s.gate:g}" for n, s in schemes().items() if s.gate)
    fp32 = f"{ladder.FP32_GATE:g} × max(1, largest value / {ladder.FP32_SCALE:g})"
    noise = f"what the bf16 rung measured, or the quantized rung with int8 activations, at most {ladder.INT8_NOISE:g}"
    program = f"max({ladder.ORDER_FLOOR:g}, {ladder.ORDER_FACTOR:g} × {noise})"
    rows = [
        ("`exported`", "transformers FP32", "largest absolute difference", fp32, ladder.HINTS["exported"]),
        ("`fused`", "`exported`", "largest absolute difference", fp32, ladder.HINTS["fused"]),
        ("`bf16`", "`fused`", "relative RMS", f"{ladder.BF16_GATE:g} × √layers", ladder.HINTS["bf16"]),
        ("`quantized`", "`bf16`", "relative RMS", f"{quant}; the largest in use", ladder.HINTS["quantized"]),
        ("`program`", "`quantized`, or `bf16`", "relative RMS", program, ladder.HINTS["program"]),
    ]
    return table(("rung", "compared with", "metric", "gate", "when it fails"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "isa-record": isa_record,
    "isa-operand": isa_operand,
    "isa-limits": isa_limits,
    "isa-opcodes": isa_opcodes,
    "isa-operands": isa_operands,
    "isa-functions": isa_functions,
    "isa-enums": isa_enums,
    "targets": targets,
    "ops": ops,
    "passes": passes,
    "schemes": scheme_table,
    "gates": gates,
}


def render(text: str) -> str:
    """The page with every generated part made anew."""

    def fill(m: re.Match[str]) -> str:
        name = m["name"]
        return f"<!-- generated: {name} -->\n\n{PARTS[name]().strip()}\n\n<!-- end: {name} -->"

    return PART.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a part differs")
    check = parser.parse_args().check
    pages = {p: p.read_text(encoding="utf-8") for p in sorted(DOCS.glob("*.md"))}
    used = [m["name"] for text in pages.values() for m in PART.finditer(text)]
    if sorted(used) != sorted(PARTS):
        print(f"parts in no page, unknown or twice: {sorted(set(used) ^ set(PARTS)) or sorted(used)}")
        return 1
    differ = [p for p, text in pages.items() if render(text) != text]
    for path in differ:
        if not check:
            path.write_text(render(pages[path]), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs from the code, run scripts/gen_docs.py' if check else 'written'}")
    return int(check and bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
