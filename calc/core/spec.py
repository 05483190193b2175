"""`ModelSpec`: a model's hyperparameters, tokenizer, special tokens and chat template, frozen (requirement R12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Frozen(BaseModel):
    """A model whose fields cannot change and which refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Make a model's field take the names of a registry, asked at the time: a ``Literal`` that need not be written out.

    Args:
        names: gives the registered names.

    Raises:
        PydanticCustomError: (when it validates) another name; the finding is that of a ``Literal``.
    """

    def check(value: str) -> str:
        allowed = tuple(names())
        if value not in allowed:
            raise PydanticCustomError("literal_error", "Input should be one of {names}", {"names": ", ".join(allowed)})
        return value

    return AfterValidator(check)


class LayerSpec(Frozen):
    """One decoder layer.

    Attributes:
        kv_heads: heads in the KV cache.
        key_dim, value_dim: width of one key and of one value row.
        window: attention window in tokens including the query's own, None for full attention.
        experts: number of routed experts, 0 for a dense FFN.
    """

    kv_heads: int = Field(gt=0)
    key_dim: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    window: int | None = Field(default=None, gt=0)
    experts: int = Field(default=0, ge=0)


class SpecialTokens(Frozen):
    """Special token ids. `eos` is the union of every source (config, generation_config, tokenizer), sorted."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None


class TokenizerSpec(Frozen):
    """The tokenizer: its file's digest and what a host needs to build a prompt."""

    kind: Literal["tokenizers", "none"]
    sha256: str = ""
    vocab_size: int = 0
    add_bos: bool = False
    chat_template: str | None = None


class ModelSpec(Frozen):
    """A decoder language model.

    Attributes:
        name: directory or hub name, without its path.
        family: `config.model_type`.
        architecture: the Hugging Face class.
        head_dim: width of one query head.
        rope_parameters: as normalised by the config (JSON text, keys sorted).
        max_position_embeddings: context the model was trained for.
        dynamic_dims: names of the dimensions that vary at run time and what bounds each.
        source_sha256: digest over config.json and the names, shapes, dtypes and bytes' location of the checkpoint.
    """

    name: str
    family: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    vocab: int = Field(gt=0)
    activation: str
    rms_eps: float
    rope_parameters: str
    tied_embeddings: bool
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    norm_topk_prob: bool = False
    moe_intermediate: int = Field(default=0, ge=0)
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    max_position_embeddings: int = Field(gt=0)
    torch_dtype: str
    tokens: SpecialTokens
    tokenizer: TokenizerSpec
    dynamic_dims: dict[str, str] = Field(
        default_factory=lambda: {
            "cur_seq_len": "valid tokens in the call, 1..bucket",
            "past_kv_cur_seq_len": "valid tokens in the slot before the call, 0..max_seq_len - cur_seq_len",
            "batch": "sequences in the call, one of the compiled batches",
        }
    )
    source_sha256: str = ""
