"""The attention seam: Hugging Face's attention interface → one causal `Attention` without a mask tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from calc.core.errors import InternalError, Problem, UnsupportedError
from calc.frontend import ops

NAME = "calc"


@dataclass(frozen=True)
class AttentionFacts:
    """What one layer's attention asked for. `window` counts the query's own position; 0 is none, as of `softcap`."""

    scale: float
    softcap: float
    window: int


@dataclass
class AttentionSeam:
    """Stands in for the attention implementation during one trace.

    Attributes:
        kv_len: valid rows of every sequence's KV after this call's write, [B] int64; set by the caller of the model.
        facts: layer index → what its attention asked for, filled while the model runs.
    """

    kv_len: Tensor | None = None
    facts: dict[int, AttentionFacts] = field(default_factory=dict)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: object,
    ) -> tuple[Tensor, None]:
        """Attention over the whole KV buffer, in the interface's form: [B,S,Hq,D] and no weights."""
        layer = getattr(module, "layer_idx", None)
        if self.kv_len is None or not isinstance(layer, int):
            raise InternalError("the attention seam was entered outside of a trace")
        unsupported = {
            "attention sinks": options.get("s_aux") is not None,
            "attention that is not causal": not getattr(module, "is_causal", True),
            "a mask of the model's own": attention_mask is not None,
        }
        for what in (w for w, present in unsupported.items() if present):
            raise UnsupportedError(
                Problem("UNSUPPORTED_ATTENTION", f"layer {layer}", f"the layer uses {what}", hint="not supported")
            )
        scale = _number(options, "scaling") or query.shape[-1] ** -0.5
        facts = AttentionFacts(scale, _number(options, "softcap"), int(_number(options, "sliding_window")))
        self.facts[layer] = facts
        out = ops.attention(query, key, value, self.kv_len, facts.scale, facts.softcap, facts.window)
        return out.transpose(1, 2).contiguous(), None


def _number(options: dict[str, object], key: str) -> float:
    """A numeric option; 0 if it is absent or None."""
    value = options.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _configs(model: PreTrainedModel) -> dict[int, PreTrainedConfig]:
    """Every config that a module of the model reads, by identity."""
    found = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in found if isinstance(config, PreTrainedConfig)}


@contextmanager
def patched_attention(model: PreTrainedModel, seam: AttentionSeam) -> Iterator[None]:
    """Route every attention of `model` through `seam`. No mask function has its name, so masks are None."""
    configs = _configs(model)
    before = {key: config._attn_implementation for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS[NAME] = seam
    try:
        for config in configs.values():
            config._attn_implementation = NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        del ALL_ATTENTION_FUNCTIONS[NAME]


class FixedLayer(StaticLayer):
    """One layer's KV as a fixed buffer: explicit tensors in, new tensors out, nothing mutated."""

    def __init__(self, keys: Tensor, values: Tensor, past: Tensor) -> None:
        self.keys, self.values, self.past = keys, values, past
        self.max_cache_len = keys.shape[2]
        self.device = keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the call's rows at the past length of each sequence."""
        self.keys = ops.kv_write(self.keys, key_states, self.past)
        self.values = ops.kv_write(self.values, value_states, self.past)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions are passed explicitly; no model may derive them from here."""
        return 0


class RecordingLayer(StaticLayer):
    """Keeps nothing but the shapes of what a layer would cache."""

    def __init__(self) -> None:
        self.is_initialized = True
        self.kv_heads = self.key_dim = self.value_dim = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Note the widths and hand the states back."""
        self.kv_heads, self.key_dim = key_states.shape[1], key_states.shape[3]
        self.value_dim = value_states.shape[3]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Nothing is cached."""
        return 0


def make_cache(layers: list[FixedLayer] | list[RecordingLayer]) -> Cache:
    """A transformers cache over these layers."""
    return Cache(layers=list(layers))
