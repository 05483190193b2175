"""One static shape of a model → an ONNX graph with the semantic inputs and outputs."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.onnx.errors import OnnxExporterError
from transformers.modeling_utils import PreTrainedModel

from calc.core.errors import Problem, UnsupportedError
from calc.core.roles import CURRENT, IDS, LOGITS, PAST, WHICH, kv_name, state_input
from calc.core.spec import LayerSpec
from calc.core.variant import Variant
from calc.frontend import ops
from calc.frontend.attention import (
    AttentionFacts,
    AttentionSeam,
    FixedLayer,
    RecordingLayer,
    make_cache,
    patched_attention,
)
from calc.frontend.build import FakeModel
from calc.frontend.experts import patched_experts
from calc.frontend.norms import patched_norms
from calc.frontend.rope import RopeSeam, patched_rope
from calc.frontend.translate import translate

MODEL = "hf"
"""Attribute of `Decoder` that holds the Hugging Face model: the prefix of its names in the traced program."""


@dataclass(frozen=True)
class Traced:
    """A raw graph.

    Attributes:
        model: weights are initializers without data, named as in the traced program.
        tables: the RoPE tables by initializer name, float32 [C, R/2].
    """

    model: ir.Model
    tables: dict[str, NDArray[np.float32]]


def input_names(layers: int) -> list[str]:
    """The graph's inputs, in order."""
    return [IDS, PAST, CURRENT, *(state_input(kv_name(i, which)) for i in range(layers) for which in WHICH)]


def output_names(layers: int) -> list[str]:
    """The graph's outputs, in order."""
    return [LOGITS, *(kv_name(i, which) for i in range(layers) for which in WHICH)]


class Decoder(nn.Module):
    """The model over explicit, fixed-size KV buffers."""

    def __init__(self, model: PreTrainedModel, attention: AttentionSeam, rope: RopeSeam) -> None:
        super().__init__()
        self.hf = model
        self.rope = rope.tables
        self.attention = attention

    def forward(
        self, input_ids: Tensor, past_kv_cur_seq_len: Tensor, cur_seq_len: Tensor, kv: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits of every sequence's last valid token, then the updated buffers."""
        seq = input_ids.shape[1]
        self.attention.kv_len = past_kv_cur_seq_len + seq
        layers = [FixedLayer(k, v, past_kv_cur_seq_len) for k, v in zip(kv[0::2], kv[1::2], strict=True)]
        head = self.hf.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, args: (ops.last_row(args[0], cur_seq_len), *args[1:]))
        try:
            out = self.hf(
                input_ids=input_ids,
                position_ids=past_kv_cur_seq_len[:, None] + torch.arange(seq),
                cache=make_cache(layers),
                use_cache=True,
            )
        finally:
            hook.remove()
        return out.logits, *(t for layer in layers for t in (layer.keys, layer.values))


@contextmanager
def _seams(
    model: PreTrainedModel, attention: AttentionSeam, rope: RopeSeam, capacity: int, max_seq_len: int
) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patched_norms(model))
        stack.enter_context(patched_rope(model, rope, capacity, max_seq_len))
        stack.enter_context(patched_experts(model))
        stack.enter_context(patched_attention(model, attention))
        stack.enter_context(torch.no_grad())
        yield


def probe_layers(fake: FakeModel) -> tuple[list[RecordingLayer], dict[int, AttentionFacts]]:
    """What every layer caches and how it attends, from a forward of one token without data."""
    count = fake.model.config.get_text_config(decoder=True).num_hidden_layers
    layers = [RecordingLayer() for _ in range(count)]
    attention = AttentionSeam()
    with _seams(fake.model, attention, RopeSeam(), 1, 1), fake.mode:
        attention.kv_len = torch.ones(1, dtype=torch.int64)
        fake.model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64),
            position_ids=torch.zeros(1, 1, dtype=torch.int64),
            cache=make_cache(layers),
            use_cache=True,
        )
    return layers, attention.facts


def trace(fake: FakeModel, layers: Sequence[LayerSpec], variant: Variant, max_seq_len: int) -> Traced:
    """The raw graph of one variant.

    Args:
        fake: the model.
        layers: the KV cache's widths.
        variant: the static shape.
        max_seq_len: valid tokens a slot can hold; the KV buffers are ``max_seq_len + variant.seq`` rows long, so that
            a padded bucket fits at every legal past length.
    """
    batch, seq, capacity = variant.batch, variant.seq, max_seq_len + variant.seq
    attention, rope = AttentionSeam(), RopeSeam()
    with _no_collection(), _seams(fake.model, attention, rope, capacity, max_seq_len), _quiet():
        decoder = Decoder(fake.model, attention, rope).eval()
        with fake.mode, _refusals(fake.model):
            kv = [
                torch.zeros(batch, layer.kv_heads, capacity, width)
                for layer in layers
                for width in (layer.key_dim, layer.value_dim)
            ]
            counts = [torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.int64)]
            args = (torch.zeros(batch, seq, dtype=torch.int64), *counts, kv)
            program = torch.export.export(decoder, args, strict=False)
            model = translate(program, input_names(len(layers)), output_names(len(layers)))
    tables = {f"rope.{name}": buffer.numpy() for name, buffer in rope.tables.named_buffers()}
    return Traced(model, tables)


@contextmanager
def _refusals(model: PreTrainedModel) -> Iterator[None]:
    """What torch cannot trace or translate is a finding about the model, in torch's words."""
    try:
        yield
    except (OnnxExporterError, GuardOnDataDependentSymNode, UserError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "No ONNX function" in line or "<class" in line), lines[0])
        raise UnsupportedError(
            Problem(
                "UNSUPPORTED_GRAPH",
                type(model).__name__,
                "the model's forward cannot be expressed as a static graph",
                got=reason,
                hint="the family needs a seam in calc/frontend",
            )
        ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Tracing makes millions of objects that all stay alive: searching them for garbage takes a fifth of an export."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's chatter (optional packages it lacks, deprecations inside torch) is nothing a user can act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
