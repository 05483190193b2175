"""Which checkpoint tensors make up which of the model's weights, by transformers' own rename and merge rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from calc.core.errors import ModelError, Problems, UnsupportedError


@dataclass(frozen=True)
class Recipe:
    """How a weight is made of checkpoint tensors.

    Attributes:
        parts: for a plain weight one part of one name. For experts, one part per projection (gate, up) with one
            name per expert: the experts of a part are stacked on a new axis 0, the parts joined on axis 1.
        merged: whether `parts` are to be stacked and joined.
    """

    parts: tuple[tuple[str, ...], ...]
    merged: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Every checkpoint tensor used, in order."""
        return tuple(name for part in self.parts for name in part)


def plain(name: str) -> Recipe:
    """The recipe of a weight that the checkpoint holds as it is."""
    return Recipe(((name,),), merged=False)


def _split(model: PreTrainedModel, *, legacy: bool) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    transforms: list[WeightTransform] = get_model_conversion_mapping(model, add_legacy=legacy)
    return (
        [t for t in transforms if isinstance(t, WeightRenaming)],
        [t for t in transforms if isinstance(t, WeightConverter)],
    )


def _stacks(converter: WeightConverter) -> bool:
    """Whether the converter does what `Recipe` can say: stack experts, then join parts on axis 1."""
    kinds = [type(op) for op in converter.operations]
    dims = [op.dim for op in converter.operations if isinstance(op, MergeModulelist | Concatenate)]
    return (kinds, dims) in (([MergeModulelist], [0]), ([MergeModulelist, Concatenate], [0, 1]))


def recipes(model: PreTrainedModel, checkpoint: Iterable[str]) -> tuple[dict[str, Recipe], list[str]]:
    """The recipe of every weight that the checkpoint can make, and the names that belong to no weight.

    Args:
        model: knows its state dict's names and the rules of its family.
        checkpoint: the names in the checkpoint.

    Returns:
        (state-dict name → recipe, checkpoint names left over).

    Raises:
        UnsupportedError: the family's rules change the weights in a way that is not supported.
        ModelError: two checkpoint tensors claim one weight.
    """
    renamings, converters = _split(model, legacy=True)
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    problems, clashes = Problems(), Problems()
    found: dict[str, Recipe] = {}
    gathered: dict[str, dict[str, list[str]]] = {}
    order: dict[str, WeightConverter] = {}
    unused: list[str] = []
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            unused.append(name)
        elif pattern is not None:
            gathered.setdefault(target, {}).setdefault(pattern, []).append(name)
            order[target] = next(c for c in converters if pattern in c.source_patterns)
        elif target in found:
            clashes.add("MODEL_TENSOR_TWICE", target, "two tensors claim this weight", got=f"{found[target]}, {name}")
        else:
            found[target] = plain(name)
    for target, parts in gathered.items():
        converter = order[target]
        if not _stacks(converter):
            operations = ", ".join(type(op).__name__ for op in converter.operations)
            problems.add("UNSUPPORTED_CONVERSION", target, "the weight is stored in another form", got=operations)
            continue
        lists = tuple(tuple(parts.get(pattern, ())) for pattern in converter.source_patterns)
        if len({len(part) for part in lists}) != 1:
            clashes.add(
                "MODEL_TENSOR_MISSING",
                target,
                "the experts' tensors are not complete",
                got=", ".join(f"{len(part)} of {p}" for p, part in zip(converter.source_patterns, lists, strict=True)),
            )
        found[target] = Recipe(lists, merged=True)
    clashes.raise_if_any(ModelError)
    problems.raise_if_any(UnsupportedError)
    return found, unused


def published(model: PreTrainedModel) -> dict[str, Recipe]:
    """The recipes that a published checkpoint of this family would have: for export from a config alone."""
    renamings, converters = _split(model, legacy=False)
    back = [r.reverse_transform() for r in reversed(renamings) if not isinstance(r, PrefixChange)]
    found: dict[str, Recipe] = {}
    for target, tensor in model.state_dict(keep_vars=True).items():
        for converter in converters:
            here = re.search(converter.reverse_transform().compiled_sources, target)
            if _stacks(converter) and here is not None:
                sources = [
                    [target.replace(here.group(0), p.replace("*", str(e)), 1) for e in range(tensor.shape[0])]
                    for p in converter.source_patterns
                ]
                parts = tuple(tuple(_rename(name, back) for name in part) for part in sources)
                found[target] = Recipe(parts, merged=True)
                break
        else:
            found[target] = plain(_rename(target, back))
    return found


def _rename(name: str, renamings: Iterable[WeightTransform]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def aliases(model: PreTrainedModel) -> dict[str, str]:
    """Each name of a tied weight → the first name of that weight in the state dict."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}


_NO_WEIGHTS = (re.compile(r"(^|\.)rotary_emb\.inv_freq$"), re.compile(r"(^|\.)attn\.(masked_)?bias$"))
"""Buffers that old checkpoints store although the model computes them itself."""


def surplus(model: PreTrainedModel, unused: Collection[str]) -> list[str]:
    """Those of the left-over names that are neither known buffers nor ignored by the model's class."""
    ignored = [re.compile(p) for p in (model._keys_to_ignore_on_load_unexpected or ())]
    return [n for n in unused if not any(p.search(n) for p in (*_NO_WEIGHTS, *ignored))]
