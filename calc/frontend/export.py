"""A model directory → prefill and decode graphs whose weights are lazy references."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from calc.core.errors import InternalError, ModelError, Problems, UsageError
from calc.core.exported import Exported
from calc.core.spec import ModelSpec
from calc.core.tensors import ArrayTensor, TensorRef
from calc.core.variant import Variant
from calc.frontend.cleanup import cleanup, strip
from calc.frontend.link import link
from calc.frontend.loaded import Loaded
from calc.frontend.mapping import aliases
from calc.frontend.spec import Opened, open_model
from calc.frontend.trace import MODEL, trace


def export(
    model: Path | Opened,
    variants: Sequence[Variant],
    max_seq_len: int,
    *,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export a decoder language model.

    Args:
        model: a Hugging Face directory, or one that is open. With only config.json, weights are known by shape alone.
        variants: the static shapes wanted.
        max_seq_len: valid tokens a KV slot can hold.
        progress: called with one line per step.

    Raises:
        UsageError: a variant or length that makes no sense.
        ModelError: the directory is missing, contradictory or damaged.
        UnsupportedError: the model uses what calc cannot do.
    """
    _check_request(variants, max_seq_len)
    opened = open_model(model, progress)
    loaded, spec = opened.loaded, opened.spec
    graphs: dict[Variant, ir.Model] = {}
    weights: dict[str, TensorRef] = {}
    for variant in dict.fromkeys(variants):
        if progress is not None:
            progress(f"exporting {variant.name}")
        graph, refs = _graph(loaded, spec, variant, max_seq_len)
        gc.collect()  # a trace leaves cycles behind, and the next one makes as many again
        graphs[variant] = graph
        weights.update(refs)
    return Exported(spec, graphs, weights)


def _check_request(variants: Sequence[Variant], max_seq_len: int) -> None:
    problems = Problems()
    if not variants:
        problems.add("USAGE_NO_VARIANT", "variants", "no static shape was asked for")
    if max_seq_len < 1:
        problems.add("USAGE_LENGTH", "max_seq_len", "the context must hold a token", expected=">= 1", got=max_seq_len)
    for v in variants:
        if v.batch < 1 or v.seq < 1 or (v.role == "decode" and v.seq != 1):
            problems.add(
                "USAGE_VARIANT", v.name, "the shape makes no sense", expected="batch, seq >= 1; decode has seq 1"
            )
        elif v.seq > max_seq_len:
            problems.add(
                "USAGE_VARIANT", v.name, "the bucket is longer than the context", expected=f"seq <= {max_seq_len}"
            )
    problems.raise_if_any(UsageError)


def _graph(
    loaded: Loaded, spec: ModelSpec, variant: Variant, max_seq_len: int
) -> tuple[ir.Model, dict[str, TensorRef]]:
    """One variant's graph and the references of its initializers."""
    traced = trace(loaded.fake, spec.layers, variant, max_seq_len)
    model = traced.model
    model.graph.name = variant.name
    _rename_weights(loaded, model)
    cleanup(model, loaded.recipes.keys() | traced.tables.keys(), MODEL)
    refs = link(model, loaded.recipes, loaded.tensors)
    for name, array in traced.tables.items():
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = ir.tensor(array, name=name)
            refs[name] = ArrayTensor(array)
    _check_complete(loaded, model, refs)
    return model, refs


def _check_complete(loaded: Loaded, model: ir.Model, refs: dict[str, TensorRef]) -> None:
    """Every checkpoint tensor is read by the graph, every initializer has a source, every value a shape and a type."""
    consumed = {source for ref in refs.values() for source in ref.sources}
    problems = Problems()
    for name in sorted({n for recipe in loaded.recipes.values() for n in recipe.names} - consumed):
        problems.add("MODEL_TENSOR_UNUSED", name, "the tensor belongs to the model, but its forward does not read it")
    problems.raise_if_any(ModelError)
    for name, value in model.graph.initializers.items():
        if name not in refs and value.const_value is None:
            raise InternalError(f"initializer {name!r} has no source")
    vague = [v.name for node in model.graph for v in node.outputs if v.shape is None or v.dtype is None]
    if vague:
        raise InternalError(f"values without a static shape or type: {vague}")


def _rename_weights(loaded: Loaded, model: ir.Model) -> None:
    """Initializers get their state-dict names; of a tied weight, the first."""
    first = aliases(loaded.fake.model)
    for name, value in list(model.graph.initializers.items()):
        bare = strip(name, MODEL)
        target = first.get(bare, bare)
        if target == name:
            continue
        known = model.graph.initializers.get(target)
        if known is not None:
            value.replace_all_uses_with(known)
            model.graph.initializers.pop(name)
            continue
        model.graph.initializers.pop(name)
        value.name = target
        model.graph.register_initializer(value)
