"""The operators that the seams put into the traced program, each with an eager body and its ONNX form.

Every one of them is a `torch.library.custom_op`: the exported program also runs in torch, and the exporter turns each
into one standard node (the experts into one node of the domain ``calc``, whose function body is standard).
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from onnx.defs import OpSchema
from onnxscript import values
from torch import Tensor

OPSET = 25
MERGED_EXPERTS = "MergedExperts"
_op = values.Opset("", OPSET)
_calc = values.Opset("calc", 1)


@torch.library.custom_op("calc::kv_write", mutates_args=())
def kv_write(buffer: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """`buffer` [B,H,C,D] with `rows` [B,H,S,D] written at row `start[b]` of sequence b."""
    out = buffer.clone()
    for b, at in enumerate(start.tolist()):
        out[b, :, at : at + rows.shape[2]] = rows[b]
    return out


@kv_write.register_fake
def _(buffer: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(buffer)


@torch.library.custom_op("calc::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor, scale: float, softcap: float, window: int) -> Tensor:
    """Causal attention of `q` [B,Hq,S,D] over the first `kv_len[b]` rows of `k`, `v` [B,Hkv,C,D].

    Query i stands at position ``kv_len[b] - S + i``. `softcap` 0 means none, `window` 0 means no window; otherwise a
    query sees its own and the ``window - 1`` positions before it.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    at = (kv_len - q.shape[2])[:, None, None, None] + torch.arange(q.shape[2])[None, None, :, None]
    key_at = torch.arange(k.shape[2])[None, None, None, :]
    seen = key_at <= at
    if window:
        seen = seen & (key_at > at - window)
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor, scale: float, softcap: float, window: int) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("calc::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., D] divided by its root mean square over D, times `weight` [D]."""
    return F.rms_norm(x, weight.shape, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("calc::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R elements of `x` [B,H,S,D] by `cos`, `sin` [B,S,R/2]; pairs are halves or neighbours."""
    r = 2 * cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    part = x[..., :r]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., : r // 2], part[..., r // 2 :])
    real, imag = a * c - b * s, a * s + b * c
    turned = torch.stack((real, imag), -1).flatten(-2) if interleaved else torch.cat((real, imag), -1)
    return torch.cat((turned, x[..., r:]), -1)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("calc::last_row", mutates_args=())
def last_row(hidden: Tensor, count: Tensor) -> Tensor:
    """Row ``count[b] - 1`` of `hidden` [B,S,H] for each sequence b: [B,H]."""
    return hidden[torch.arange(hidden.shape[0]), count - 1].clone()


@last_row.register_fake
def _(hidden: Tensor, count: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[2])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}
"""Activations that an expert may have, by the name the node carries."""


@torch.library.custom_op("calc::experts", mutates_args=())
def experts(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Routed experts over tokens.

    Args:
        hidden: [T,H].
        ids: the experts of each token, [T,k].
        weights: their shares, [T,k].
        gate_up: [E,2I,H], gate first.
        down: [E,H,I].
        activation: of the gate, a key of `ACTIVATIONS`.

    Returns:
        [T,H]: for each token the sum over its k experts of ``weight · down(act(gate(x)) · up(x))``.
    """
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        gate, up = F.linear(hidden, gate_up[e]).chunk(2, -1)
        out += share * F.linear(ACTIVATIONS[activation](gate) * up, down[e])
    return out


@experts.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    return torch.empty_like(hidden)


Value = object
"""What a translation gets and gives: the exporter's symbolic tensors."""


def _linear(x: Value, weight: Value, bias: Value | None = None) -> Value:
    product = _op.MatMul(x, _op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else _op.Add(product, bias)


def _kv_write(buffer: Value, rows: Value, start: Value) -> Value:
    return _op.TensorScatter(buffer, rows, start, axis=2, mode="linear")


def _attention(q: Value, k: Value, v: Value, kv_len: Value, scale: float, softcap: float, window: int) -> Value:
    optional: dict[str, float | int] = {}
    if softcap:
        optional["softcap"] = softcap
    if window:
        optional["left_window_size"] = window - 1
    outputs = _op.Attention(q, k, v, None, None, None, kv_len, is_causal=1, scale=scale, **optional)
    return cast(tuple[Value, ...], outputs)[0]


def _rms_norm(x: Value, weight: Value, eps: float) -> Value:
    return _op.RMSNormalization(x, weight, axis=-1, epsilon=eps)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Value:
    width = int(cos.shape[-1]) * 2
    partial = {} if width == int(x.shape[-1]) else {"rotary_embedding_dim": width}
    return _op.RotaryEmbedding(x, cos, sin, interleaved=int(interleaved), **partial)


def _last_row(hidden: Value, count: Value) -> Value:
    one = _op.Constant(value_ints=[1])
    index = _op.Unsqueeze(_op.Sub(count, one), one)
    return _op.GatherND(hidden, index, batch_dims=1)


def _merged_experts() -> values.Op:
    """The node that stands for a layer's experts until the link stage knows how the checkpoint stores them."""
    real, index = ["tensor(float)"], ["tensor(int64)"]
    kinds = {"hidden": "T", "ids": "I", "weights": "T", "gate_up": "T", "down": "T"}
    schema = OpSchema(
        MERGED_EXPERTS,
        "calc",
        1,
        inputs=[OpSchema.FormalParameter(name, kind) for name, kind in kinds.items()],
        outputs=[OpSchema.FormalParameter("out", "T")],
        type_constraints=[("T", real, ""), ("I", index, "")],
        attributes=[OpSchema.Attribute("activation", OpSchema.AttrType.STRING, "", required=True)],
    )
    return values.Op(_calc, MERGED_EXPERTS, schema)


def _experts(hidden: Value, ids: Value, weights: Value, gate_up: Value, down: Value, activation: str) -> Value:
    return _merged_experts()(hidden, ids, weights, gate_up, down, activation=activation)


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """The torch operators, each with the function that writes its ONNX nodes."""
    return {
        torch.ops.aten.linear.default: _linear,
        torch.ops.calc.kv_write.default: _kv_write,
        torch.ops.calc.attention.default: _attention,
        torch.ops.calc.rms_norm.default: _rms_norm,
        torch.ops.calc.rotary.default: _rotary,
        torch.ops.calc.last_row.default: _last_row,
        torch.ops.calc.experts.default: _experts,
    }
