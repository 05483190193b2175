"""A model directory taken together: config, checkpoint and fake model, and the proof that they agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calc.core.errors import ModelError, Problems, UnsupportedError
from calc.core.spec import SpecialTokens, TokenizerSpec
from calc.core.tensors import ShapeOnlyTensor, TensorRef
from calc.frontend.build import FakeModel, fake_model
from calc.frontend.checkpoint import Checkpoint, has_weights
from calc.frontend.config import ModelConfig, read_config
from calc.frontend.mapping import Recipe, aliases, published, recipes, surplus
from calc.frontend.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLOATS = frozenset({"f32", "f16", "bf16", "f64"})
_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv")
_COMPARE_ROWS = 4096


@dataclass(frozen=True)
class Loaded:
    """A consistent model.

    Attributes:
        model_dir: where it is.
        config: its configuration.
        fake: the model without data.
        recipes: state-dict name (first of each tied group) → how the checkpoint makes it.
        tensors: checkpoint name → reference.
        tokenizer: what a host needs to build a prompt.
        tokens: special token ids.
    """

    model_dir: Path
    config: ModelConfig
    fake: FakeModel
    recipes: dict[str, Recipe]
    tensors: Mapping[str, TensorRef]
    tokenizer: TokenizerSpec
    tokens: SpecialTokens

    @property
    def has_weights(self) -> bool:
        """Whether the tensors can be read."""
        return not any(isinstance(t, ShapeOnlyTensor) for t in self.tensors.values())


def load(model_dir: Path, progress: Callable[[str], None] | None = None) -> Loaded:
    """Open a model directory and check that config and checkpoint describe one model.

    Raises:
        ModelError, UnsupportedError: everything that a stage found wrong, at once.
    """
    say = progress or (lambda _: None)
    config = read_config(model_dir)
    checkpoint = Checkpoint.open(model_dir) if has_weights(model_dir) else None
    if checkpoint is not None:
        _refuse_scaled(checkpoint)
        _infer_bias(config, checkpoint, say)
    problems = Problems()
    vocab = int(config.hf.get_text_config(decoder=True).vocab_size)
    tokenizer, tokens = read_tokenizer(model_dir, config, vocab, problems)
    problems.raise_if_any(ModelError)  # before the build: torch refuses a padding id out of range in its own words
    say(f"building {config.hf.model_type} without data")
    fake = fake_model(config.hf)
    if checkpoint is None:
        found = published(fake.model)
        shapes = _shapes(fake.model, found, config)
        return Loaded(model_dir, config, fake, _first_names(fake.model, found), shapes, tokenizer, tokens)
    found, unused = recipes(fake.model, checkpoint.tensors)
    for name in surplus(fake.model, unused):
        problems.add(
            "MODEL_TENSOR_UNUSED",
            name,
            "the checkpoint holds a tensor that the model of this config does not use",
            hint="config.json does not describe this checkpoint",
        )
    chosen = _resolve(fake.model, found, checkpoint, config, problems)
    _check_shapes(fake.model, chosen, checkpoint, problems)
    problems.raise_if_any(ModelError)
    return Loaded(model_dir, config, fake, chosen, checkpoint.tensors, tokenizer, tokens)


def _refuse_scaled(checkpoint: Checkpoint) -> None:
    """Scaled weights are refused, and so is a scale that belongs to no weight."""
    orphans, scaled = Problems(), Problems()
    for name in checkpoint.tensors:
        stem, _, leaf = name.rpartition(".")
        if leaf not in _SCALES:
            continue
        if f"{stem}.weight" in checkpoint.tensors:
            scaled.add(
                "UNSUPPORTED_SCALED_WEIGHT",
                f"{stem}.weight",
                "the weight is stored with a scale of its own",
                expected="bf16, f16 or f32 weights",
                got=f"{checkpoint.tensors[f'{stem}.weight'].dtype} with {leaf}",
                hint="use the original checkpoint, or dequantise it first",
            )
        else:
            orphans.add("MODEL_ORPHAN_SCALE", name, "the scale belongs to no weight")
    for name, tensor in checkpoint.tensors.items():
        stem = name.rpartition(".")[0]
        if tensor.dtype.startswith("f8") and not any(f"{stem}.{s}" in checkpoint.tensors for s in _SCALES):
            orphans.add("MODEL_SCALE_MISSING", name, "the weight is stored in 8 bits without a scale")
    orphans.raise_if_any(ModelError)
    scaled.raise_if_any(UnsupportedError)


def _infer_bias(config: ModelConfig, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """Where the config is silent about attention_bias, the checkpoint decides."""
    present = any(name.endswith("self_attn.q_proj.bias") for name in checkpoint.tensors)
    if "attention_bias" in config.raw or getattr(config.hf, "attention_bias", None) in (None, present):
        return
    config.hf.attention_bias = present
    say(f"attention_bias is absent from config.json; the checkpoint's tensors say {present}")


def _first_names(model: PreTrainedModel, found: dict[str, Recipe]) -> dict[str, Recipe]:
    """Recipes of tied weights only under their first name."""
    return {name: found[name] for name, first in aliases(model).items() if name == first}


def _resolve(
    model: PreTrainedModel,
    found: dict[str, Recipe],
    checkpoint: Checkpoint,
    config: ModelConfig,
    problems: Problems,
) -> dict[str, Recipe]:
    """The recipe of each distinct weight; a weight that nothing makes is a problem, and so is a false tie."""
    groups: dict[str, list[str]] = {}
    for name, first in aliases(model).items():
        groups.setdefault(first, []).append(name)
    chosen: dict[str, Recipe] = {}
    for first, names in groups.items():
        made = [found[n] for n in names if n in found]
        if not made:
            problems.add(
                "MODEL_TENSOR_MISSING",
                first,
                "the checkpoint lacks a weight that the model of this config has",
                hint="config.json does not describe this checkpoint"
                if config.hf.tie_word_embeddings
                else "if the output shares the embedding's weights, config.json must say tie_word_embeddings: true",
            )
            continue
        chosen[first] = made[0]
        for other in made[1:]:
            if not _same(checkpoint, made[0], other):
                problems.add(
                    "MODEL_TIE_CONFLICT",
                    " and ".join((*made[0].names, *other.names)),
                    "config.json ties these weights, but the checkpoint holds two different tensors",
                    hint="set tie_word_embeddings to false in config.json if the model was trained untied",
                )
    return chosen


def _same(checkpoint: Checkpoint, a: Recipe, b: Recipe) -> bool:
    """Whether two plain recipes read the same bytes."""
    one, two = (checkpoint.tensors[r.names[0]] for r in (a, b))
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return all(
        np.array_equal(one.rows(i, j).view(np.uint8), two.rows(i, j).view(np.uint8))
        for i in range(0, one.shape[0], _COMPARE_ROWS)
        for j in (min(i + _COMPARE_ROWS, one.shape[0]),)
    )


def _expected(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that each checkpoint tensor of a recipe must have."""
    if not recipe.merged:
        return shape
    return (shape[1] // len(recipe.parts), *shape[2:])


def _check_shapes(
    model: PreTrainedModel, chosen: dict[str, Recipe], checkpoint: Checkpoint, problems: Problems
) -> None:
    """Every tensor has the shape that the config implies and a floating dtype; every expert is there."""
    state = model.state_dict(keep_vars=True)
    for target, recipe in chosen.items():
        shape = tuple(state[target].shape)
        if recipe.merged and len(recipe.parts[0]) != shape[0]:
            problems.add(
                "MODEL_TENSOR_MISSING",
                target,
                "the checkpoint does not hold every expert",
                expected=f"{shape[0]} experts",
                got=f"{len(recipe.parts[0])} experts",
            )
        expected = _expected(recipe, shape)
        for name in recipe.names:
            tensor = checkpoint.tensors[name]
            if tensor.shape != expected:
                problems.add(
                    "MODEL_SHAPE_MISMATCH",
                    name,
                    "the tensor's shape contradicts config.json",
                    expected=list(expected),
                    got=list(tensor.shape),
                )
            elif tensor.dtype not in _FLOATS and state[target].is_floating_point():
                problems.add(
                    "MODEL_DTYPE_UNSUPPORTED",
                    name,
                    "the weight is not stored as floating-point numbers",
                    expected="bf16, f16, f32 or f64",
                    got=tensor.dtype,
                )


def _shapes(model: PreTrainedModel, found: dict[str, Recipe], config: ModelConfig) -> dict[str, TensorRef]:
    """References known by shape alone, in the dtype the config announces."""
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    dtype = names.get(str(config.hf.dtype).removeprefix("torch."), "bf16")
    state = model.state_dict(keep_vars=True)
    tensors: dict[str, TensorRef] = {}
    for target, recipe in found.items():
        shape = _expected(recipe, tuple(state[target].shape))
        kind = dtype if state[target].is_floating_point() else "i64"
        tensors.update({name: ShapeOnlyTensor(shape, kind, (name,)) for name in recipe.names})
    return tensors
