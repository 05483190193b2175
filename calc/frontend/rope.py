"""The RoPE seam: the model's own rotary modules become tables, its apply functions become `RotaryEmbedding`.

A rotary module is run once, at export, over every position: the tables therefore hold whatever scaling the model
uses. How an apply function pairs elements is found by running it on numbers.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calc.core.errors import Problem, UnsupportedError
from calc.frontend import ops

Apply = Callable[..., tuple[Tensor, Tensor]]
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


class RopeTable(nn.Module):
    """cos and sin of one kind of rotation for every position: [C, R/2] each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions, [B,S,R/2]."""
        return F.embedding(position_ids, self.cos), F.embedding(position_ids, self.sin)


@dataclass
class RopeSeam:
    """Distinct tables found so far; table n is named ``rope.<n>`` in the graph."""

    tables: nn.ModuleList = field(default_factory=nn.ModuleList)

    def table(self, cos: Tensor, sin: Tensor) -> RopeTable:
        """The table with this content, made if it is new."""
        for known in self.tables:
            if isinstance(known, RopeTable) and torch.equal(known.cos, cos) and torch.equal(known.sin, sin):
                return known
        new = RopeTable(cos, sin)
        self.tables.append(new)
        return new


def _layout(table: Tensor) -> str | None:
    """How a full-width table repeats its R/2 columns: side by side, or each twice."""
    half = table.shape[-1] // 2
    if torch.equal(table[..., :half], table[..., half:]):
        return "halves"
    if torch.equal(table[..., 0::2], table[..., 1::2]):
        return "neighbours"
    return None


def _spread(half: Tensor, layout: str) -> Tensor:
    return torch.cat((half, half), -1) if layout == "halves" else half.repeat_interleave(2, -1)


def _narrow(table: Tensor, layout: str) -> Tensor:
    half = table.shape[-1] // 2
    return (table[..., :half] if layout == "halves" else table[..., 0::2]).contiguous()


def _probe(apply: Apply, layout: str) -> bool | None:
    """Whether `apply` pairs neighbours (True) or halves (False); None if it is neither.

    It is tried on tables as wide as the heads and on narrower ones (partial rotary). It may refuse one of the two, but
    whatever it computes must be the one rotation.
    """
    found: set[bool | None] = set()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 3, 16, generator=generator), torch.randn(2, 2, 3, 16, generator=generator)
    for width in (16, 8):
        angle = torch.randn(2, 3, width // 2, generator=generator)
        cos, sin = angle.cos(), angle.sin()
        try:
            got = apply(q, k, _spread(cos, layout), _spread(sin, layout))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            continue
        found.add(
            next(
                (kind for kind in (False, True) if _agrees(got, [ops.rotary(x, cos, sin, kind) for x in (q, k)])), None
            )
        )
    return found.pop() if len(found) == 1 else None


def _agrees(got: tuple[Tensor, ...], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(
        g.shape == w.shape and torch.allclose(g, w, atol=1e-5) for g, w in zip(got, want, strict=True)
    )


def _replacement(interleaved: bool) -> Apply:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return ops.rotary(q, cos, sin, interleaved), ops.rotary(k, cos, sin, interleaved)

    return apply


def _rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold inverse frequencies and turn positions into cos and sin."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(b.endswith("inv_freq") for b, _ in module.named_buffers(recurse=False))
        and "position_ids" in inspect.signature(type(module).forward).parameters
    }


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    """Layer type (None where the module knows none) → rope type."""
    kinds = getattr(module, "rope_type", "default")
    return dict(kinds) if isinstance(kinds, dict) else {None: str(kinds)}


def _positions(module: nn.Module, kind: str, capacity: int, max_seq_len: int) -> Tensor:
    """Every position; a scaling that depends on the length is refused where it would change within `max_seq_len`."""
    positions = torch.arange(capacity)
    if kind not in _LENGTH_DEPENDENT:
        return positions[None]
    trained = int(getattr(module, "original_max_seq_len", 0))
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    trained = int(parameters.get("original_max_position_embeddings") or trained)
    if max_seq_len > trained:
        raise UnsupportedError(
            Problem(
                "UNSUPPORTED_ROPE_LENGTH",
                f"rope type {kind}",
                "the rotation would depend on the prompt's length",
                expected=f"max_seq_len <= {trained}",
                got=str(max_seq_len),
                hint="compile for a shorter context",
            )
        )
    return positions.clamp(max=max_seq_len - 1)[None]


@contextmanager
def patched_rope(model: nn.Module, seam: RopeSeam, capacity: int, max_seq_len: int) -> Iterator[None]:
    """Replace rotary modules by tables and apply functions by `calc::rotary`, where both are understood.

    Args:
        model: with real (not fake) buffers.
        seam: receives the tables.
        capacity: rows of a table, C.
        max_seq_len: positions that can ever be valid.
    """
    homes = {type(m).__module__ for m in model.modules()}
    applies = {
        (home, name): function
        for home in sorted(homes)
        for name, function in vars(sys.modules[home]).items()
        if name.startswith("apply_rotary") and inspect.isfunction(function)
    }
    full: dict[str, dict[str | None, tuple[Tensor, Tensor]]] = {}
    modules = _rotary_modules(model)
    for name, module in modules.items():
        full[name] = _full_tables(module, capacity, max_seq_len)
    layouts = {_layout(t) for tables in full.values() for pair in tables.values() for t in pair}
    layout = layouts.pop() if len(layouts) == 1 else None
    pairings = {key: _probe(function, layout) for key, function in applies.items()} if layout else {}
    if layout is None or not pairings or None in pairings.values():
        yield  # a form of rotation not known here: it stays decomposed
        return
    try:
        for name, module in modules.items():
            tables = {
                kind: seam.table(_narrow(cos, layout), _narrow(sin, layout)) for kind, (cos, sin) in full[name].items()
            }
            module.forward = types.MethodType(_table_forward(tables), module)
        for (home, name), interleaved in pairings.items():
            setattr(sys.modules[home], name, _replacement(bool(interleaved)))
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)
        for (home, name), function in applies.items():
            setattr(sys.modules[home], name, function)


def _full_tables(module: nn.Module, capacity: int, max_seq_len: int) -> dict[str | None, tuple[Tensor, Tensor]]:
    """The module's own cos and sin for every position, per layer type; empty if it answers anything else."""
    tables: dict[str | None, tuple[Tensor, Tensor]] = {}
    x = torch.zeros(1, 1, 1)
    for layer_type, kind in _rope_types(module).items():
        extra = {} if layer_type is None else {"layer_type": layer_type}
        with torch.no_grad():
            answer = module(x, position_ids=_positions(module, kind, capacity, max_seq_len), **extra)
        if isinstance(answer, tuple) and len(answer) == 2 and all(t.ndim == 3 for t in answer):
            tables[layer_type] = (answer[0][0], answer[1][0])
    return tables


def _table_forward(tables: dict[str | None, RopeTable]) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(_: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = tables[layer_type](position_ids)
        return cos, sin

    return forward
