"""layers: each chip runs a run of decoder layers, and hands its rows to the next chip.

What comes before the layers runs on the first chip, what comes after them on the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from calc.kernels.recv import RecvAttrs
from calc.kernels.send import SendAttrs
from calc.passes.base import Graph, calc_node, dims, insert, replace_input
from calc.passes.partition import Board

NAME = "layers"


def partition(g: Graph, board: Board) -> None:
    """Layers contiguously per chip, so that the largest shard is as small as can be; Send and Recv between chips."""
    place = _places(g)
    count = 1 + max((p for p in place.values() if p is not None), default=-1)
    chip_of = split_layers(_sizes(g, place, count, board), board.chips)
    for node in g.model.graph:
        at = place[id(node)]
        chip = 0 if at is None else chip_of[at] if at < count else board.chips - 1
        node.metadata_props["calc.chip"] = str(chip)
    transfers(g)


def _places(g: Graph) -> dict[int, int | None]:
    """The layer of each node: None before the layers, their number after them."""
    nodes = list(g.model.graph)
    own = [n.metadata_props.get("calc.layer") for n in nodes]
    count = 1 + max((int(t) for t in own if t is not None), default=-1)
    out: dict[int, int | None] = {}
    for node, text in zip(nodes, own, strict=True):
        producers = [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
        behind = any(out[id(p)] is not None for p in producers)
        out[id(node)] = int(text) if text is not None else count if behind else None
    return out


def _sizes(g: Graph, place: dict[int, int | None], count: int, board: Board) -> list[int]:
    """Bytes of weights before the layers, of each layer, and after them."""
    out = [0] * (count + 2)
    for node in g.model.graph:
        at = place[id(node)]
        slot = 0 if at is None else at + 1
        out[slot] += sum(board.weight_bytes.get(v.name or "", 0) for v in node.inputs if v is not None)
    return out


def split_layers(size: Sequence[int], chips: int) -> tuple[int, ...]:
    """Contiguous layers per chip so that the largest share is as small as can be.

    Args:
        size: bytes before the layers, of each layer, after the layers.
        chips: number of chips; the first also has what is before the layers, the last what is after.

    Returns:
        The chip of each layer. With fewer layers than chips the last chips share none.
    """
    head, *layers, tail = size
    n = len(layers)

    def fill(limit: int) -> list[int] | None:
        out, chip, used = [], 0, head
        for s in layers:
            if used + s > limit and chip < chips - 1:
                chip, used = chip + 1, 0
            used += s
            out.append(chip)
        loads = [0] * chips
        loads[0] += head
        loads[chips - 1] += tail
        for c, s in zip(out, layers, strict=True):
            loads[c] += s
        return out if max(loads) <= limit else None

    low, high = 0, sum(size)
    best = fill(high) or [0] * n
    while low < high:
        mid = (low + high) // 2
        found = fill(mid)
        if found is None:
            low = mid + 1
        else:
            best, high = found, mid
    return tuple(best)


def transfers(g: Graph) -> None:
    """Put a Send and a Recv, ahead of its first reader, for each value that another chip reads."""
    there: dict[tuple[int, str], ir.Value] = {}
    for node in list(g.model.graph):
        chip = node.metadata_props["calc.chip"]
        for i, value in enumerate(node.inputs):
            producer = None if value is None else value.producer()
            if value is None or producer is None or producer.metadata_props["calc.chip"] == chip:
                continue
            key = (id(value), chip)
            if key not in there:
                there[key] = _transfer(node, value, producer.metadata_props["calc.chip"], chip)
            replace_input(node, i, there[key])


def _transfer(before: ir.Node, value: ir.Value, home: str, chip: str) -> ir.Value:
    there = SendAttrs(int(chip), partial=False)
    send = calc_node("Send", [value], there, [dims(value)], value.producer() or before, f"{value.name}/Send.{chip}")
    back = RecvAttrs(int(home), partial=False)
    recv = calc_node("Recv", [send.outputs[0]], back, [dims(value)], before, f"{value.name}/Recv.{chip}")
    send.metadata_props["calc.chip"], recv.metadata_props["calc.chip"] = home, chip
    insert(before, send, recv)
    return recv.outputs[0]
