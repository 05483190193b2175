"""tensor: every chip runs every layer on its share of the attention heads, FFN columns and vocabulary.

::

    Linear(q, k, v), QkNormRope, Attention    a share of the heads each; no transfer
    Linear(o), residual                       a partial sum each, then AllReduce adds them and the residual
    Glu                                       a share of the columns each
    Linear(down), residual                    as Linear(o)
    Embed                                     a share of the columns each, then AllGather
    LmHead                                    a share of the vocabulary each; the host reads the shares side by side
    norms and the rest                        on every chip alike

A matrix that is split along its columns is quantized share by share: an int8 row has a scale per share, and int4
groups start anew in each. The rungs bf16 and quantized of the ladder run on the partitioned graph, so that they
measure what runs. Partial sums are FP32 and added in the order of the chips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from calc.core.errors import InternalError, Problems, UnsupportedError
from calc.core.roles import is_state_input, state_of
from calc.core.tensors import ColumnsTensor, RowsTensor, TensorRef
from calc.kernels import registry
from calc.kernels.all_gather import AllGatherAttrs
from calc.kernels.all_reduce import AllReduceAttrs
from calc.kernels.attention import AttentionAttrs
from calc.kernels.base import SCHEMES, Attrs
from calc.kernels.linear import LinearAttrs
from calc.kernels.qk_norm_rope import QkNormRopeAttrs
from calc.passes.base import (
    Graph,
    StatePart,
    attrs_of,
    calc_node,
    dims,
    insert,
    new_weight,
    replace_value,
    sweep,
)
from calc.passes.calls import STRUCTURE
from calc.passes.partition import Board

NAME = "tensor"
Bounds = list[tuple[int, int]]
"""The columns of each chip."""


@dataclass
class _Split:
    """A graph while it is being split: for each old value a value per chip, and which columns those are."""

    g: Graph
    chips: int
    values: dict[int, list[ir.Value]] = field(default_factory=dict)
    bounds: dict[int, Bounds] = field(default_factory=dict)
    state: dict[str, list[ir.Value]] = field(default_factory=dict)

    def inputs(self, node: ir.Node) -> list[ir.Value]:
        """The node's inputs; an absent one does not occur in calc nodes."""
        return [v for v in node.inputs if v is not None]

    def of(self, value: ir.Value, chip: int) -> ir.Value:
        """A value as a chip sees it: its own copy or share, or the graph's where there is one for all."""
        found = self.values.get(id(value))
        return value if found is None else found[chip]

    def is_split(self, value: ir.Value) -> bool:
        """Whether the chips hold shares of a value rather than all of it."""
        return id(value) in self.bounds

    def clone(
        self, node: ir.Node, chip: int, ins: Sequence[ir.Value], attrs: Attrs, outs: Sequence[tuple[int, ...]]
    ) -> list[ir.Value]:
        """The node's twin on a chip."""
        new = calc_node(node.op_type, ins, attrs, outs, node, f"{node.name}@{chip}")
        new.metadata_props["calc.chip"] = str(chip)
        if SCHEMES in node.attributes:
            new.attributes.add(node.attributes[SCHEMES])
        insert(node, new)
        return list(new.outputs)

    def give(self, old: ir.Value, shares: list[ir.Value], bounds: Bounds | None = None) -> None:
        """Record what stands for an old value."""
        self.values[id(old)] = shares
        if bounds is not None:
            self.bounds[id(old)] = bounds

    def share(self, w: ir.Value, chip: int, ref: TensorRef, axis: str) -> ir.Value:
        """A chip's share of a weight, under the scheme of the whole."""
        name = f"{w.name}@{chip}/{axis}"
        value = new_weight(self.g, name, ref)
        whole = w.name or "?"
        if whole in self.g.schemes:
            self.g.schemes[name] = self.g.schemes[whole]
        return value

    def rows(self, w: ir.Value, chip: int, at: tuple[int, int]) -> ir.Value:
        """A share of a weight's rows (output channels), or of a vector."""
        return self.share(w, chip, RowsTensor(self.ref(w), *at), "rows")

    def columns(self, w: ir.Value, chip: int, at: tuple[int, int]) -> ir.Value:
        """A share of a weight's columns (input channels)."""
        return self.share(w, chip, ColumnsTensor(self.ref(w), *at), "columns")

    def ref(self, w: ir.Value) -> TensorRef:
        """The reference behind a weight."""
        ref = self.g.weight(w)
        if ref is None:
            raise InternalError(f"{w.name} is no weight")
        return ref


def partition(g: Graph, board: Board) -> None:
    """Split heads, FFN columns and vocabulary over the chips; AllReduce and AllGather between them.

    Raises:
        UnsupportedError: PARTITION_HEADS when the heads do not divide, PARTITION_OP for ops it cannot split.
    """
    if board.chips == 1:
        for node in g.model.graph:
            node.metadata_props["calc.chip"] = "0"
        return
    _check(g, board.chips)
    s = _Split(g, board.chips)
    for node in list(g.model.graph):
        _HANDLERS.get(node.op_type, _alike)(s, node)
    _outputs(s)
    for node in reversed(list(g.model.graph)):
        if "calc.chip" not in node.metadata_props and STRUCTURE not in node.metadata_props:
            g.model.graph.remove(node, safe=True)
    sweep(g)


def _outputs(s: _Split) -> None:
    """The graph's outputs again, where no handler has joined one: shares side by side, or the first chip's copy."""
    for old in list(s.g.model.graph.outputs):
        node, shares = old.producer(), s.values.get(id(old))
        if node is None or shares is None:
            continue
        if s.is_split(old):
            _join(s, node, old, shares, s.bounds[id(old)], axis=len(dims(old)) - 1)
        else:
            replace_value(s.g, old, shares[0])


def _check(g: Graph, chips: int) -> None:
    problems = Problems()
    for node in g.model.graph:
        where = node.metadata_props.get("calc.scope", node.name or "?")
        if node.op_type == "Moe":
            problems.add(
                "PARTITION_OP",
                where,
                "experts cannot be split by tensor",
                got=node.op_type,
                hint="use a target that splits by layers",
            )
        if node.op_type in ("Attention", "QkNormRope"):
            heads, kv = _heads_in(node)
            share, group = heads // chips, heads // kv
            if heads % chips or (share % group and group % share):
                problems.add(
                    "PARTITION_HEADS",
                    where,
                    f"the heads do not divide over {chips} chips",
                    expected="query heads a multiple of the chips; a chip's share whole groups, or part of one",
                    got=f"{heads} query heads, {kv} KV heads",
                    hint="use fewer chips, or a target that splits by layers",
                )
    problems.raise_if_any(UnsupportedError)


def even(n: int, chips: int) -> Bounds:
    """`n` columns in `chips` runs that differ by one at most."""
    return [(n * c // chips, n * (c + 1) // chips) for c in range(chips)]


def heads_of(heads: int, kv_heads: int, chips: int) -> tuple[Bounds, Bounds]:
    """Query heads of each chip and the KV heads they use; a KV head may be on several chips."""
    q = even(heads, chips)
    group = heads // kv_heads
    return q, [(a // group, -(-b // group)) for a, b in q]


def _scaled(bounds: Bounds, size: int) -> Bounds:
    return [(a * size, b * size) for a, b in bounds]


def _lead(value: ir.Value) -> tuple[int, ...]:
    return dims(value)[:-1]


def _same(node: ir.Node) -> Attrs:
    """The attributes of a node of any kernel."""
    attrs: Attrs = attrs_of(node, registry()[node.op_type].attributes)
    return attrs


def _heads_in(node: ir.Node) -> tuple[int, int]:
    """Query heads and KV heads of an attention, or of the rotary embedding before it."""
    attrs = attrs_of(node, AttentionAttrs) if node.op_type == "Attention" else attrs_of(node, QkNormRopeAttrs)
    return attrs.heads, attrs.kv_heads


# -- handlers, one for each kind of op --------------------------------------------------------------------------------


def _alike(s: _Split, node: ir.Node) -> None:
    """Every chip computes all of it, or its share of the columns where its inputs are shares."""
    ins = s.inputs(node)
    shares = [v for v in ins if s.is_split(v)]
    bounds = s.bounds[id(shares[0])] if shares else None
    made = []
    for chip in range(s.chips):
        mine = []
        for v in ins:
            whole = s.g.weight(v) is not None and bounds is not None and node.op_type == "Bias"
            mine.append(s.rows(v, chip, bounds[chip]) if whole and bounds is not None else s.of(v, chip))
        outs = [dims(o) if bounds is None else (*_lead(o), bounds[chip][1] - bounds[chip][0]) for o in node.outputs]
        made.append(s.clone(node, chip, mine, _same(node), outs))
    for i, o in enumerate(node.outputs):
        s.give(o, [m[i] for m in made], bounds)


def _embed(s: _Split, node: ir.Node) -> None:
    ids, table = s.inputs(node)
    out = node.outputs[0]
    bounds = even(dims(out)[-1], s.chips)
    parts = []
    for chip, at in enumerate(bounds):
        shape = (*_lead(out), at[1] - at[0])
        parts += s.clone(node, chip, [ids, s.columns(table, chip, at)], _same(node), [shape])

    def gathering(chip: int) -> AllGatherAttrs:
        return AllGatherAttrs(s.chips, own=chip)

    s.give(out, _exchange(s, node, "AllGather", gathering, parts, [], dims(out)))


def _linear(s: _Split, node: ir.Node) -> None:
    if s.is_split(s.inputs(node)[0]):
        _row_parallel(s, node)
    elif bounds := _wanted(s, node):
        _column_parallel(s, node, bounds)
    else:
        _alike(s, node)


def _wanted(s: _Split, node: ir.Node) -> list[Bounds] | None:
    """How the readers of a Linear's outputs want them split: by heads, or evenly; None where one needs all of it."""
    out: list[Bounds] = []
    for i, value in enumerate(node.outputs):
        readers = list(dict.fromkeys(value.consumers()))
        found = {_share_of(r, value) for r in readers}
        if len(found) != 1 or value.is_graph_output():
            return None
        how = found.pop()
        if how is None:
            return None
        heads, kv, which = how
        if which == "even":
            out.append(even(dims(node.outputs[i])[-1], s.chips))
            continue
        q, k = heads_of(heads, kv, s.chips)
        size = dims(value)[-1] // (heads if which == "q" else kv)
        out.append(_scaled(q if which == "q" else k, size))
    return out


def _share_of(reader: ir.Node, value: ir.Value) -> tuple[int, int, str] | None:
    if reader.op_type in ("QkNormRope", "Attention"):
        return (*_heads_in(reader), "q" if reader.inputs[0] is value else "kv")
    if reader.op_type in ("Activate", "Bias"):
        return (0, 0, "even") if _ends_in_linear(reader) else None
    return None


def _ends_in_linear(node: ir.Node) -> bool:
    users = list(dict.fromkeys(node.outputs[0].consumers()))
    if node.outputs[0].is_graph_output() or len(users) != 1:
        return False
    return users[0].op_type == "Linear" or (users[0].op_type in ("Activate", "Bias") and _ends_in_linear(users[0]))


def _column_parallel(s: _Split, node: ir.Node, bounds: list[Bounds]) -> None:
    attrs = attrs_of(node, LinearAttrs)
    n = len(node.outputs)
    x, *rest = s.inputs(node)
    made = []
    for chip in range(s.chips):
        weights = [s.rows(w, chip, bounds[i % n][chip]) for i, w in enumerate(rest[: n * (1 + attrs.bias)])]
        outs = [(*_lead(o), b[chip][1] - b[chip][0]) for o, b in zip(node.outputs, bounds, strict=True)]
        made.append(s.clone(node, chip, [s.of(x, chip), *weights], attrs, outs))
    for i, o in enumerate(node.outputs):
        s.give(o, [m[i] for m in made], bounds[i])


def _row_parallel(s: _Split, node: ir.Node) -> None:
    """Partial sums; the bias goes into the first chip's, the residual into the reduction."""
    attrs = attrs_of(node, LinearAttrs)
    x, w, *rest = s.inputs(node)
    if len(node.outputs) != 1:
        raise InternalError(f"{node.name}: several projections of one share")
    bias = rest.pop(0) if attrs.bias else None
    out = node.outputs[0]
    parts = []
    for chip, at in enumerate(s.bounds[id(x)]):
        own = bias is not None and chip == 0
        mine = [s.of(x, chip), s.columns(w, chip, at), *([bias] if own and bias is not None else [])]
        changed = replace(attrs, bias=own, add=False, partial=True)
        parts += s.clone(node, chip, mine, changed, [dims(out)])

    def reduction(chip: int) -> AllReduceAttrs:
        return AllReduceAttrs(s.chips, own=chip, add=bool(rest))

    s.give(out, _exchange(s, node, "AllReduce", reduction, parts, rest, dims(out)))


def _exchange(
    s: _Split,
    node: ir.Node,
    op: str,
    attrs: Callable[[int], Attrs],
    parts: list[ir.Value],
    more: list[ir.Value],
    shape: tuple[int, ...],
) -> list[ir.Value]:
    out = []
    for chip in range(s.chips):
        mine = [s.of(v, chip) for v in more]
        new = calc_node(op, [*parts, *mine], attrs(chip), [shape], node, f"{node.name}/{op}@{chip}")
        new.metadata_props["calc.chip"] = str(chip)
        insert(node, new)
        out.append(new.outputs[0])
    return out


def _glu(s: _Split, node: ir.Node) -> None:
    x, gate, up = s.inputs(node)
    out = node.outputs[0]
    bounds = even(dims(out)[-1], s.chips)
    made = []
    for chip, at in enumerate(bounds):
        ins = [s.of(x, chip), s.rows(gate, chip, at), s.rows(up, chip, at)]
        made += s.clone(node, chip, ins, _same(node), [(*_lead(out), at[1] - at[0])])
    s.give(out, made, bounds)


def _qk_norm_rope(s: _Split, node: ir.Node) -> None:
    attrs = attrs_of(node, QkNormRopeAttrs)
    (q, kv), size = heads_of(attrs.heads, attrs.kv_heads, s.chips), attrs.head_dim
    made = []
    for chip in range(s.chips):
        mine = replace(attrs, heads=q[chip][1] - q[chip][0], kv_heads=kv[chip][1] - kv[chip][0])
        outs = [(*_lead(o), (b[chip][1] - b[chip][0]) * size) for o, b in zip(node.outputs, (q, kv), strict=True)]
        made.append(s.clone(node, chip, [s.of(v, chip) for v in s.inputs(node)], mine, outs))
    for i, b in enumerate((q, kv)):
        s.give(node.outputs[i], [m[i] for m in made], _scaled(b, size))


def _attention(s: _Split, node: ir.Node) -> None:
    attrs = attrs_of(node, AttentionAttrs)
    q, kv = heads_of(attrs.heads, attrs.kv_heads, s.chips)
    y, *written = node.outputs
    made = []
    for chip in range(s.chips):
        ins = [_state_share(s, node, v, kv)[chip] if is_state_input(v.name) else s.of(v, chip) for v in s.inputs(node)]
        mine = replace(attrs, heads=q[chip][1] - q[chip][0], kv_heads=kv[chip][1] - kv[chip][0])
        width = attrs.value_dim * (q[chip][1] - q[chip][0])
        outs = [(*_lead(y), width)]
        for o in written:
            b, _, rows, size = dims(o)
            outs.append((b, kv[chip][1] - kv[chip][0], rows, size))
        made.append(s.clone(node, chip, ins, mine, outs))
    s.give(y, [m[0] for m in made], _scaled(q, attrs.value_dim))
    for i, old in enumerate(written, start=1):
        _join(s, node, old, [m[i] for m in made], kv, axis=1)


def _state_share(s: _Split, node: ir.Node, value: ir.Value, heads: Bounds) -> list[ir.Value]:
    """Each chip's heads of a state that comes in: a Slice that no chip runs, since the state lies split in memory."""
    name = value.name or "?"
    if name not in s.state:
        b, total, rows, size = dims(value)
        s.state[name] = []
        for chip, (first, end) in enumerate(heads):
            out = _structure(
                s,
                node,
                "Slice",
                [value, *(_constant(s, f"{name}@{chip}/{k}", v) for k, v in (("a", first), ("b", end), ("axis", 1)))],
                f"{name}@{chip}",
                (b, end - first, rows, size),
            )
            s.state[name].append(out)
            s.g.parts[f"{name}@{chip}"] = StatePart(state_of(name), first, end - first, total)
    return s.state[name]


def _join(s: _Split, node: ir.Node, old: ir.Value, parts: list[ir.Value], bounds: Bounds, axis: int) -> None:
    """The graph's output again, of the chips' parts: each part's columns that no chip before it has."""
    pieces, done = [], 0
    for chip, (first, end) in enumerate(bounds):
        if end <= done:
            continue
        skip = done - first
        piece = parts[chip]
        if skip > 0:
            raise InternalError(f"{old.name}: chip {chip} holds a part of what another chip holds")
        pieces.append(piece)
        done = end
    out = _structure(s, node, "Concat", pieces, f"{old.name}/joined", dims(old), [ir.AttrInt64("axis", axis)])
    replace_value(s.g, old, out)


def _structure(
    s: _Split,
    before: ir.Node,
    op: str,
    ins: Sequence[ir.Value],
    name: str,
    shape: tuple[int, ...],
    attrs: Sequence[ir.Attr] = (),
) -> ir.Value:
    keep = {k: v for k, v in before.metadata_props.items() if k.startswith("calc.")}
    node = ir.Node("", op, list(ins), list(attrs), num_outputs=1, name=name, metadata_props={**keep, STRUCTURE: "1"})
    out = node.outputs[0]
    out.name, out.shape, out.dtype = name, ir.Shape(shape), ir.DataType.FLOAT
    insert(before, node)
    return out


def _constant(s: _Split, name: str, value: int) -> ir.Value:
    out = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    out.const_value = ir.tensor(np.array([value], np.int64), name=name)
    s.g.model.graph.initializers[name] = out
    return out


def _lm_head(s: _Split, node: ir.Node) -> None:
    x, w = s.inputs(node)
    out = node.outputs[0]
    bounds = even(dims(out)[-1], s.chips)
    parts = []
    for chip, at in enumerate(bounds):
        shape = (*_lead(out), at[1] - at[0])
        parts += s.clone(node, chip, [s.of(x, chip), s.rows(w, chip, at)], _same(node), [shape])
    _join(s, node, out, parts, bounds, axis=len(dims(out)) - 1)


_HANDLERS: dict[str, Callable[[_Split, ir.Node], None]] = {
    "Embed": _embed,
    "Linear": _linear,
    "Glu": _glu,
    "QkNormRope": _qk_norm_rope,
    "Attention": _attention,
    "LmHead": _lm_head,
}
