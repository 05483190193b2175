"""A model directory → `ModelSpec`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from calc.core.errors import InternalError, Problems
from calc.core.spec import LayerSpec, ModelSpec
from calc.frontend.attention import AttentionFacts
from calc.frontend.experts import expert_modules
from calc.frontend.files import find
from calc.frontend.loaded import Loaded, load
from calc.frontend.norms import weight_of
from calc.frontend.trace import probe_layers

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_rms_eps", "norm_epsilon", "norm_eps")
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "hidden_activation_function")


@dataclass(frozen=True)
class Opened:
    """A model directory that was read and probed: what export and reference work on, so that a compile opens it once.

    Attributes:
        loaded: config, checkpoint and fake model.
        spec: what they say.
    """

    loaded: Loaded
    spec: ModelSpec


def open_model(model: Path | Opened, progress: Callable[[str], None] | None = None) -> Opened:
    """Read and check a model directory; one that is open already is given back.

    Args:
        model: a Hugging Face directory; with only config.json, weights are known by shape alone.
        progress: called with one line per step.

    Raises:
        ModelError: what is missing or contradictory.
        UnsupportedError: what calc cannot do.
    """
    if isinstance(model, Opened):
        return model
    loaded = load(model, progress)
    return Opened(loaded, spec_of(loaded))


def load_spec(model_dir: Path) -> ModelSpec:
    """Read and check a model directory; no tensor data is read but to compare tied weights.

    Args:
        model_dir: a Hugging Face directory; with only config.json, weights are known by shape alone.

    Raises:
        ModelError: what is missing or contradictory.
        UnsupportedError: what calc cannot do.
    """
    return open_model(model_dir).spec


def spec_of(loaded: Loaded) -> ModelSpec:
    """The spec of a loaded model. KV widths and windows are what a forward of one token was seen to use."""
    config = loaded.config.hf.get_text_config(decoder=True)
    vocab = int(config.vocab_size)
    layers, facts = _layers(loaded)
    heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    experts = max(layer.experts for layer in layers)
    softcaps = {f.softcap for f in facts.values() if f.softcap}
    return ModelSpec(
        name=loaded.model_dir.resolve().name,
        family=str(config.model_type),
        architecture=type(loaded.fake.model).__name__,
        layers=tuple(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=layers[0].kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate=int(_first(config, _WIDTHS) or 4 * hidden),
        vocab=vocab,
        activation=str(_first(config, _ACTIVATIONS) or ""),
        rms_eps=float(str(_first(config, _EPSILONS) or 0.0)),
        rope_parameters=json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True),
        tied_embeddings=_is_tied(loaded),
        experts=experts,
        experts_per_token=int(getattr(config, "num_experts_per_tok", 0) or 0) if experts else 0,
        norm_topk_prob=bool(getattr(config, "norm_topk_prob", True)) if experts else False,
        moe_intermediate=_moe_width(loaded),
        attn_softcap=max(softcaps, default=None),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        max_position_embeddings=int(config.max_position_embeddings),
        torch_dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        tokens=loaded.tokens,
        tokenizer=loaded.tokenizer,
        source_sha256=_digest(loaded),
    )


def _first(config: object, names: tuple[str, ...]) -> int | float | str | None:
    """The first of these config fields that is set."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float | str):
            return value
    return None


def _layers(loaded: Loaded) -> tuple[list[LayerSpec], dict[int, AttentionFacts]]:
    """One spec per decoder layer."""
    kv, facts = probe_layers(loaded.fake)
    silent = [i for i, layer in enumerate(kv) if not layer.kv_heads or i not in facts]
    if silent:
        raise InternalError(f"layers {silent} neither cached nor attended in a forward of one token")
    counts = _experts_by_layer(loaded, len(kv))
    return [
        LayerSpec(
            kv_heads=layer.kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            window=facts[i].window or None,
            experts=counts[i],
        )
        for i, layer in enumerate(kv)
    ], facts


def _experts_by_layer(loaded: Loaded, count: int) -> list[int]:
    """Routed experts of every layer, 0 for a dense FFN."""
    counts = [0] * count
    for path, module in expert_modules(loaded.fake.model).items():
        index = next((int(part) for part in path.split(".") if part.isdigit()), None)
        if index is not None and index < count:
            counts[index] = weight_of(module, "down_proj").shape[0]
    return counts


def _moe_width(loaded: Loaded) -> int:
    """Width of one expert, 0 without experts."""
    for module in expert_modules(loaded.fake.model).values():
        return int(weight_of(module, "down_proj").shape[2])
    return 0


def _is_tied(loaded: Loaded) -> bool:
    model = loaded.fake.model
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _digest(loaded: Loaded) -> str:
    """Digest over config.json and the names, shapes, dtypes and places of the checkpoint's tensors."""
    digest = hashlib.sha256()
    path = find(loaded.model_dir, "config.json", Problems())
    if path is not None:
        digest.update(path.read_bytes())
    for name, tensor in sorted(loaded.tensors.items()):
        place = getattr(tensor, "offset", -1)
        digest.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype}\0{place}\n".encode())
    return digest.hexdigest()
