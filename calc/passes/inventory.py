"""Inventory: every op of a graph, its class, its share of the work, and why it is refused where it is.

Classes: ``native`` (an NPU kernel computes it), ``fusable`` (a fusion took it into a kernel), ``composed`` (index
arithmetic and layout that the compiler resolves), ``cpu-fallback`` (the host could compute it: small and outside of
the layers), ``unsupported`` (blocks the compile).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from calc.core.spec import Frozen
from calc.kernels import registry
from calc.kernels.base import DOMAIN
from calc.passes.base import Graph, Refusal, Rule, UnknownShapeError
from calc.passes.calls import make_call
from calc.passes.order import fusion_passes

COMPOSED = frozenset(
    {
        "Reshape",
        "Transpose",
        "Unsqueeze",
        "Squeeze",
        "Identity",
        "Cast",
        "Constant",
        "Shape",
        "Concat",
        "Slice",
        "Expand",
    }
)
FALLBACK = frozenset(
    {
        "Softmax",
        "TopK",
        "Gather",
        "Where",
        "Range",
        "ReduceSum",
        "ReduceMean",
        "ArgMax",
        "Greater",
        "Less",
        "Equal",
        "And",
        "Not",
    }
)


class Finding(Frozen):
    """One place that cannot run: the module or node, and the constraint that failed."""

    where: str
    reason: str


class OpEntry(Frozen):
    """An op type of a graph. MACs and bytes (weights read once, activations once) are sums over `count` nodes."""

    op: str
    domain: str
    klass: str
    count: int
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    macs: int
    bytes: int
    macs_share: float
    bytes_share: float
    findings: tuple[Finding, ...]


class GraphInventory(Frozen):
    """One graph."""

    name: str
    nodes: int
    fused: int
    macs: int
    bytes: int
    ops: tuple[OpEntry, ...]


class InventoryReport(Frozen):
    """All graphs of a model. `ok` is false when something blocks."""

    model: str
    ok: bool
    graphs: tuple[GraphInventory, ...]


@dataclass
class _Row:
    klass: str
    count: int = 0
    shapes: dict[str, None] = field(default_factory=dict)
    dtypes: dict[str, None] = field(default_factory=dict)
    macs: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


def take_stock(name: str, g: Graph) -> GraphInventory:
    """Classify a graph's nodes by running the fusions on it (the graph is changed).

    Args:
        name: for the report.
        g: the exported graph; weights may be known by shape alone.
    """
    nodes = list(g.model.graph)  # held, so that no new node gets the id of one that is gone
    before = {id(n): _describe(g, n) for n in nodes}
    refusals: dict[str, list[Refusal]] = {}
    for p in fusion_passes():
        p.run(g)
        if isinstance(p, Rule):
            for r in p.refusals:
                refusals.setdefault(r.node, []).append(r)
    left = {id(n): n for n in g.model.graph}
    kernels = registry()
    rows: dict[tuple[str, str, str], _Row] = {}
    for key, d in before.items():
        node = left.get(key)
        if node is None:
            klass = "composed" if d.op in COMPOSED and not d.macs else "fusable"
            _add(rows, klass, d, [])
        elif node.domain != DOMAIN or node.op_type not in kernels:
            klass, findings = _leftover(node, d, refusals)
            _add(rows, klass, d, findings)
    for node in g.model.graph:
        if node.domain == DOMAIN and node.op_type in kernels:
            kernel = kernels[node.op_type]
            d = _describe(g, node)
            try:
                call = make_call(node, kernel)
            except UnknownShapeError as e:
                _add(rows, "unsupported", d, [Finding(where=d.where, reason=str(e))])
                continue
            seq = call.shapes[call.outputs[0]]
            rows_of = seq[0] * (seq[1] if len(seq) == 3 else 1)
            work = kernel.work(call, rows_of, rows_of)
            d.macs = work.macs
            found = [Finding(where=d.where, reason=r) for r in kernel.refusals(call)]
            _add(rows, "unsupported" if found else "native", d, found)
    macs = sum(r.macs for (k, _, _), r in rows.items() if k in ("native", "unsupported", "cpu-fallback"))
    size = sum(r.bytes for (k, _, _), r in rows.items() if k in ("native", "unsupported", "cpu-fallback"))
    order = ("unsupported", "cpu-fallback", "native", "fusable", "composed")
    entries = tuple(
        OpEntry(
            op=op,
            domain=domain,
            klass=klass,
            count=r.count,
            shapes=tuple(r.shapes)[:4],
            dtypes=tuple(r.dtypes),
            macs=r.macs,
            bytes=r.bytes,
            macs_share=r.macs / macs if macs and klass not in ("fusable", "composed") else 0.0,
            bytes_share=r.bytes / size if size and klass not in ("fusable", "composed") else 0.0,
            findings=tuple(r.findings),
        )
        for (klass, domain, op), r in sorted(rows.items(), key=lambda kv: (order.index(kv[0][0]), -kv[1].macs, kv[0]))
    )
    return GraphInventory(name=name, nodes=len(before), fused=len(left), macs=macs, bytes=size, ops=entries)


def report(model: str, graphs: Sequence[GraphInventory]) -> InventoryReport:
    """The verdict over all graphs."""
    ok = not any(e.klass == "unsupported" for g in graphs for e in g.ops)
    return InventoryReport(model=model, ok=ok, graphs=tuple(graphs))


@dataclass
class _Described:
    op: str
    domain: str
    where: str
    shapes: str
    dtypes: list[str]
    macs: int
    bytes: int


def _describe(g: Graph, node: ir.Node) -> _Described:
    values = [v for v in node.inputs if v is not None]
    shapes = " ".join("x".join(str(d) for d in (v.shape or ())) or "scalar" for v in values)
    dtypes = [v.dtype.name.lower() for v in values if v.dtype is not None]
    size = 0
    for v in (*values, *node.outputs):
        dims = [d for d in (v.shape or ()) if isinstance(d, int)]
        if v.name and v.name.startswith(("past_kv.", "kv.")):
            continue
        size += int(np.prod(dims, dtype=np.int64)) * int(
            2 if v.dtype in (None, ir.DataType.FLOAT) else max(1, v.dtype.itemsize)
        )
    return _Described(
        node.op_type,
        node.domain,
        node.metadata_props.get("calc.scope", node.name or "?"),
        shapes,
        dtypes,
        _macs(node),
        size,
    )


def _macs(node: ir.Node) -> int:
    """MACs of a standard op, from its shapes."""
    if node.op_type not in ("MatMul", "Gemm", "Attention", "Conv", "Einsum"):
        return 0
    shapes = [tuple(d for d in (v.shape or ()) if isinstance(d, int)) for v in node.inputs if v is not None]
    out = tuple(d for d in (node.outputs[0].shape or ()) if isinstance(d, int))
    if not shapes or not out:
        return 0
    total = int(np.prod(out, dtype=np.int64))
    if node.op_type == "Attention" and len(shapes) >= 2 and len(shapes[1]) == 4:
        return total * shapes[1][2] * 2
    return total * (shapes[0][-1] if shapes[0] else 1)


def _leftover(node: ir.Node, d: _Described, refusals: dict[str, list[Refusal]]) -> tuple[str, list[Finding]]:
    """What to make of a node that no kernel took in."""
    reasons = [f"{r.rule}: {r.reason}" for r in refusals.get(node.name or "?", [])]
    if node.op_type in FALLBACK and "calc.layer" not in node.metadata_props and not d.macs and _is_small(node):
        klass, what = "cpu-fallback", "outside of the layers and small: the host can compute it"
    else:
        klass = "unsupported"
        what = f"no kernel for {node.domain + '.' if node.domain else ''}{node.op_type} with inputs {d.shapes}"
    return klass, [Finding(where=d.where, reason="; ".join([what, *reasons]))]


def _is_small(node: ir.Node) -> bool:
    return all(
        int(np.prod([d for d in (v.shape or ()) if isinstance(d, int)], dtype=np.int64)) <= 1 << 16
        for v in node.outputs
    )


def _add(rows: dict[tuple[str, str, str], _Row], klass: str, d: _Described, findings: list[Finding]) -> None:
    row = rows.setdefault((klass, d.domain, d.op), _Row(klass))
    row.count += 1
    row.shapes[d.shapes] = None
    for t in d.dtypes:
        row.dtypes[t] = None
    row.macs += d.macs
    row.bytes += d.bytes
    row.findings += findings
