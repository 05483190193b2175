"""`config.json`, read and checked before anything is built from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calc.core.errors import ModelError, Problems, UnsupportedError
from calc.frontend.files import JsonObject, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_THETA_KEYS = ("rope_theta", "rotary_emb_base")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_GROUPED = frozenset({"gptq", "awq"})


@dataclass(frozen=True)
class ModelConfig:
    """A model's configuration.

    Attributes:
        raw: config.json as it is: tells what was said from what a class supplies as its default.
        generation: generation_config.json, empty if there is none.
        hf: the parsed form.
    """

    raw: JsonObject
    generation: JsonObject
    hf: PreTrainedConfig


def read_config(model_dir: Path) -> ModelConfig:
    """Read and check a model's configuration.

    Raises:
        ModelError: every contradiction found in config.json.
        UnsupportedError: a sound model of a kind that is not supported (not a causal LM, quantized).
    """
    problems = Problems()
    if not model_dir.is_dir():
        problems.add(
            "MODEL_DIR_MISSING", str(model_dir), "there is no such directory", hint="check the path or the hub id"
        )
        problems.raise_if_any(ModelError)
    raw = read_json(model_dir, "config.json", problems)
    generation = read_json(model_dir, "generation_config.json", problems) or {}
    if raw is None:
        if not problems.items:
            problems.add("MODEL_CONFIG_MISSING", str(model_dir), "the directory has no config.json")
        raise ModelError(problems.items)
    _check_heads(raw, problems)
    _check_softcaps(raw, problems)
    _check_rope_types(raw, problems)
    problems.raise_if_any(ModelError)
    _refuse_quantized(raw)
    config = ModelConfig(raw, generation, _parse(model_dir, raw, problems))
    _refuse_architecture(config)
    _refuse_layers(config)
    _check_rope_theta(config, problems)
    problems.raise_if_any(ModelError)
    return config


def _check_heads(raw: JsonObject, problems: Problems) -> None:
    """Query heads must divide evenly among KV heads, and the hidden size among heads if no head_dim is given."""
    heads, kv_heads, hidden = (raw.get(k) for k in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if not isinstance(heads, int) or heads <= 0:
        return
    if isinstance(kv_heads, int) and (kv_heads <= 0 or heads % kv_heads):
        problems.add(
            "MODEL_HEADS",
            "config.json: num_key_value_heads",
            "the query heads cannot be divided evenly among the KV heads",
            expected=f"a divisor of {heads}",
            got=kv_heads,
        )
    if raw.get("head_dim") is None and isinstance(hidden, int) and hidden % heads:
        problems.add(
            "MODEL_HEADS",
            "config.json: hidden_size",
            "no head_dim is given and the hidden size cannot be divided evenly among the heads",
            expected=f"a multiple of {heads}",
            got=hidden,
        )


def _check_softcaps(raw: JsonObject, problems: Problems) -> None:
    """A soft cap is absent, null, or finite and positive."""
    for key in _SOFTCAPS:
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            problems.add(
                "MODEL_SOFTCAP",
                f"config.json: {key}",
                "the soft cap is not a positive number",
                expected="a finite number above 0, or null for none",
                got=value,
            )


def _rope_dicts(raw: JsonObject) -> dict[str, JsonObject]:
    """Every dict of RoPE parameters in the config, by where it stands."""
    found: dict[str, JsonObject] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if not isinstance(value, dict):
            continue
        nested = {k: v for k, v in value.items() if isinstance(v, dict)}
        if nested:
            found.update({f"{key}.{k}": v for k, v in nested.items()})
        else:
            found[key] = value
    return found


def _check_rope_types(raw: JsonObject, problems: Problems) -> None:
    """`rope_type` and its old spelling `type` must agree and be known."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    for where, parameters in _rope_dicts(raw).items():
        kinds = {k: parameters[k] for k in ("rope_type", "type") if k in parameters}
        if len(set(map(str, kinds.values()))) > 1:
            problems.add("MODEL_ROPE_TYPE", f"config.json: {where}", "rope_type and type contradict", got=kinds)
        for key, kind in kinds.items():
            if str(kind) not in known:
                problems.add(
                    "MODEL_ROPE_TYPE",
                    f"config.json: {where}.{key}",
                    "the RoPE type is not known",
                    expected=", ".join(known),
                    got=kind,
                )


def _check_rope_theta(config: ModelConfig, problems: Problems) -> None:
    """A model that rotates says its base itself: a class's default is never taken silently, nor one of two bases."""
    if not getattr(config.hf, "rope_parameters", None):
        return
    raw = config.raw
    said = {key: raw[key] for key in _THETA_KEYS if raw.get(key) is not None}
    dicts = _rope_dicts(raw)
    lacking = [where for where, p in dicts.items() if p.get("rope_theta") is None]
    if not said and (lacking or not dicts):
        default = getattr(config.hf, "default_theta", None)
        problems.add(
            "MODEL_ROPE_THETA",
            "config.json: " + (", ".join(lacking) or "rope_theta"),
            "the model rotates, but its config does not say the base rope_theta",
            hint=f'write "rope_theta" into config.json if you know it (the family\'s default is {default})',
        )
    for key, value in said.items():
        for where, parameters in dicts.items():
            nested = "." in where
            theta = parameters.get("rope_theta")
            if theta is not None and not nested and theta != value:
                problems.add(
                    "MODEL_ROPE_THETA",
                    f"config.json: {where}.rope_theta",
                    f"two different bases are given, here and in {key}",
                    got=f"{theta} and {value}",
                )


def _refuse_quantized(raw: JsonObject) -> None:
    """A checkpoint that some tool has quantized is refused: its integers cannot be read as weights."""
    settings = raw.get("quantization_config")
    if settings is None:
        return
    problems = Problems()
    fields: JsonObject = settings if isinstance(settings, dict) else {}
    method = str(fields.get("quant_method", "unknown")).lower()
    problems.add(
        "UNSUPPORTED_QUANTIZED_MODEL",
        "config.json: quantization_config",
        f"the checkpoint is already quantized ({method})",
        expected="bf16, f16 or f32 weights",
        got=", ".join(f"{k}={v}" for k, v in sorted(fields.items())),
        hint="use the original checkpoint; calc quantizes it itself"
        + (" (group_size is missing as well)" if method in _GROUPED and "group_size" not in fields else ""),
    )
    problems.raise_if_any(UnsupportedError)


def _parse(model_dir: Path, raw: JsonObject, problems: Problems) -> PreTrainedConfig:
    """The transformers config, or a problem in the words of its validation."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        problems.add(
            "MODEL_CONFIG_INVALID",
            "config.json",
            "transformers cannot make a model config of it",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint=f"model_type is {raw.get('model_type')!r}",
        )
        raise ModelError(problems.items) from error
    return config


def _refuse_architecture(config: ModelConfig) -> None:
    """Only decoder language models: one that transformers maps to a causal LM, and that says it is that class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    problems = Problems()
    family = str(config.hf.model_type)
    named = config.raw.get("architectures") or []
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    names = [str(n) for n in named] if isinstance(named, list) else [str(named)]
    encoder = bool(getattr(config.hf, "is_encoder_decoder", False))
    if expected is None or encoder or (names and expected not in names):
        problems.add(
            "UNSUPPORTED_ARCHITECTURE",
            "config.json: architectures",
            "the model is no causal language model",
            expected=expected or "a class that ends in ForCausalLM",
            got=", ".join(names) or family,
        )
    problems.raise_if_any(UnsupportedError)


def _refuse_layers(config: ModelConfig) -> None:
    """Every layer must keep keys and values of its own, attended to causally, perhaps through a window."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    problems = Problems()
    kinds, _ = get_layer_types_and_kwargs(config.hf.get_text_config(decoder=True))
    for i, kind in enumerate(kinds):
        if kind not in _LAYER_TYPES:
            problems.add(
                "UNSUPPORTED_LAYER",
                f"layer {i}",
                f"the layer is of a kind that is not supported: {kind}",
                expected=", ".join(sorted(_LAYER_TYPES)),
                got=kind,
            )
    problems.raise_if_any(UnsupportedError)
