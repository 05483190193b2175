"""transformers' own answer, computed layer by layer so that memory does not grow with the number of layers.

The vocabulary's matrices are larger than any layer. Of the embedding only the rows of the tokens at hand are read, and
the head multiplies by a block of its rows at a time.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from calc.core.errors import InternalError, Problems, UsageError
from calc.core.heap import trim
from calc.core.tensors import TensorRef
from calc.frontend.build import empty_model
from calc.frontend.loaded import Loaded, load
from calc.frontend.mapping import Recipe, aliases
from calc.frontend.spec import Opened

Floats = NDArray[np.float32]
_ALIGNMENT = 64  # bytes: what torch's allocator gives, and what MKL asks for to give the same bits again


@dataclass(frozen=True)
class Reference:
    """A float32 run over one sequence.

    Attributes:
        logits: [len(rows), V].
        keys: per layer [T, Hkv, D], every token's key, also where attention slides.
        values: likewise.
    """

    logits: Floats
    keys: list[Floats]
    values: list[Floats]


def reference(model: Path | Opened, tokens: Sequence[int], rows: Sequence[int]) -> Reference:
    """What transformers computes in float32: one forward over all of `tokens`.

    Args:
        model: a Hugging Face directory with weights, or one that is open.
        tokens: T token ids.
        rows: positions whose logits are wanted.

    Raises:
        UsageError: a token or row out of range, or no weights.
        ModelError: the directory is damaged.
    """
    logits, cache = _run(model, tokens, rows, torch.float32)
    keys = [_token_major(getattr(layer, "keys", None)) for layer in cache.layers]
    values = [_token_major(getattr(layer, "values", None)) for layer in cache.layers]
    return Reference(logits, keys, values)


def bf16_logits(model: Path | Opened, tokens: Sequence[int], rows: Sequence[int]) -> Floats:
    """The bfloat16 run of transformers, as a yardstick of what bfloat16 costs: [len(rows), V] as float32."""
    return _run(model, tokens, rows, torch.bfloat16)[0]


def _token_major(state: Tensor | None) -> Floats:
    if state is None:
        raise InternalError("a layer cached nothing")
    return state[0].transpose(0, 1).contiguous().float().numpy()


def _run(
    source: Path | Opened, tokens: Sequence[int], rows: Sequence[int], dtype: torch.dtype
) -> tuple[Floats, DynamicCache]:
    loaded = source.loaded if isinstance(source, Opened) else load(source)
    _check_request(loaded, tokens, rows)
    model = empty_model(loaded.config.hf, dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    cache = DynamicCache()  # without a config every layer keeps all of its tokens; masks still slide
    chosen = torch.tensor(list(rows), dtype=torch.int64)
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, chosen], *args[1:]))
    with torch.no_grad(), _vocabulary(model, loaded, tokens, dtype) as done, _streamed(model, loaded, dtype, done):
        out = model(input_ids=torch.tensor([list(tokens)], dtype=torch.int64), cache=cache, use_cache=True)
    hook.remove()
    logits = out.logits[0].float().numpy()
    del model, head, out
    gc.collect()  # modules and hooks refer to one another, and weights with them
    trim()
    return logits, cache


def _check_request(loaded: Loaded, tokens: Sequence[int], rows: Sequence[int]) -> None:
    problems = Problems()
    vocab = loaded.config.hf.get_text_config(decoder=True).vocab_size
    if not tokens:
        problems.add("USAGE_NO_TOKENS", "tokens", "the sequence is empty")
    if bad := [t for t in tokens if not 0 <= t < vocab]:
        problems.add("USAGE_TOKEN_RANGE", "tokens", "ids out of range", expected=f"0..{vocab - 1}", got=bad)
    if bad := [r for r in rows if not 0 <= r < len(tokens)]:
        problems.add("USAGE_ROW_RANGE", "rows", "rows out of range", expected=f"0..{len(tokens) - 1}", got=bad)
    if not loaded.has_weights:
        problems.add("USAGE_NO_WEIGHTS", str(loaded.model_dir), "the directory has a config but no weights")
    problems.raise_if_any(UsageError)


def decoder_layers(model: nn.Module, count: int) -> dict[str, nn.Module]:
    """Path → decoder layer: the first list of modules of the right length."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{path}.{i}": layer for i, layer in enumerate(module)}
    raise InternalError(f"the model has no list of {count} layers")


_HEAD_ROWS = 8192
"""Rows of the head that are multiplied by at a time."""


@contextmanager
def _vocabulary(
    model: PreTrainedModel, loaded: Loaded, tokens: Sequence[int], dtype: torch.dtype
) -> Iterator[frozenset[str]]:
    """Give the embedding the rows of `tokens` and the head its rows block by block, where both are plain.

    Yields:
        Names of the weights that are taken care of.
    """
    first = aliases(loaded.fake.model)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    done: dict[str, nn.Module] = {}
    for module, kind in ((embedding, nn.Embedding), (head, nn.Linear)):
        name = f"{names.get(id(module))}.weight"
        recipe = loaded.recipes.get(first.get(name, ""))
        if isinstance(module, kind) and recipe is not None and not recipe.merged:
            done[name] = module
    shared = {first[name] for name in done}
    if any(name not in done for name, owner in first.items() if owner in shared):
        yield frozenset()  # something else reads a weight of theirs
        return
    for name, module in done.items():
        ref = loaded.tensors[loaded.recipes[first[name]].names[0]]
        if module is embedding:
            _assign(model, name, nn.Parameter(_rows_of(ref, set(tokens), dtype), requires_grad=False))
        elif isinstance(module, nn.Linear):
            setattr(module, "forward", partial(_by_rows, module, ref, dtype))  # noqa: B010 - mypy forbids a method
    try:
        yield frozenset(shared)
    finally:
        vars(head).pop("forward", None)


def _rows_of(ref: TensorRef, rows: set[int], dtype: torch.dtype) -> Tensor:
    """A tensor as large as `ref` that holds these rows alone; pages that nothing is written to take no memory."""
    width = int(np.prod(ref.shape[1:], dtype=np.int64))
    memory = mmap.mmap(-1, ref.shape[0] * width * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # else each row would take 2 MiB
    table = torch.frombuffer(memory, dtype=dtype).view(ref.shape)
    for row in rows:
        table[row] = _to_torch(ref, row, row + 1)[0].to(dtype)
    return table


def _by_rows(head: nn.Linear, ref: TensorRef, dtype: torch.dtype, x: Tensor) -> Tensor:
    """``x @ w.T + b``; each column of the result is the same whatever other rows of `w` are there."""
    bias: Tensor | None = getattr(head, "bias", None)
    out = []
    for start in range(0, ref.shape[0], _HEAD_ROWS):
        stop = min(start + _HEAD_ROWS, ref.shape[0])
        w = _to_torch(ref, start, stop).to(dtype)
        out.append(nn.functional.linear(x, w, None if bias is None else bias[start:stop]))
    return torch.cat(out, -1)


@contextmanager
def _streamed(model: PreTrainedModel, loaded: Loaded, dtype: torch.dtype, done: Collection[str]) -> Iterator[None]:
    """Weights outside of the decoder layers are loaded now, a layer's only while it runs."""
    layers = decoder_layers(model, model.config.get_text_config(decoder=True).num_hidden_layers)
    owners = {
        name: next((p for p in layers if name.startswith(p + ".")), "") for name in loaded.recipes if name not in done
    }
    _fill(model, loaded, [n for n, owner in owners.items() if not owner], dtype)
    hooks = []
    for path, layer in layers.items():
        names = [n for n, owner in owners.items() if owner == path]

        def before(_: nn.Module, __: object, names: list[str] = names) -> None:
            _fill(model, loaded, names, dtype)

        def after(_: nn.Module, __: object, ___: object, names: list[str] = names) -> None:
            _empty(model, names)
            trim()

        hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fill(model: PreTrainedModel, loaded: Loaded, names: Sequence[str], dtype: torch.dtype) -> None:
    """Put real weights into the model, under every name that a tied weight has."""
    groups: dict[str, list[str]] = {}
    for name, first in aliases(loaded.fake.model).items():
        groups.setdefault(first, []).append(name)
    for name in names:
        tensor = read_weight(loaded.recipes[name], loaded.tensors)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        parameter = nn.Parameter(tensor, requires_grad=False)
        for alias in groups[name]:
            _assign(model, alias, parameter)


def _empty(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Drop the data of these weights."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        old = getattr(model.get_submodule(owner), leaf)
        _assign(model, name, nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False))


def _assign(model: PreTrainedModel, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = parameter
    else:
        module._buffers[leaf] = parameter.data


def read_weight(recipe: Recipe, tensors: Mapping[str, TensorRef]) -> Tensor:
    """The weight that a recipe makes, in the checkpoint's dtype."""
    parts = [[_to_torch(tensors[name]) for name in part] for part in recipe.parts]
    if not recipe.merged:
        return parts[0][0]
    return torch.cat([torch.stack(part) for part in parts], 1)


def _to_torch(ref: TensorRef, start: int = 0, stop: int | None = None) -> Tensor:
    """A tensor of the checkpoint, or some of its rows."""
    array = ref.read() if stop is None else ref.rows(start, stop)
    if ref.dtype == "bf16":
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    # A BLAS may add in another order where data is not aligned as it likes; torch's own memory always is, and numpy's
    # depends on what was allocated before, so that two compiles could differ in the last bit.
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
