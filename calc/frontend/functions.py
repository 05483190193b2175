"""The model-local ONNX functions that exported graphs use: an op of the domain ``calc``, a body of standard ops."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

from calc.core.errors import InternalError

_ACTIVATION = {
    "silu": "s = Sigmoid (g)\n    a = Mul (g, s)",
    "gelu_tanh": 'a = Gelu <approximate: string = "tanh"> (g)',
    "gelu": 'a = Gelu <approximate: string = "none"> (g)',
}

_EXPERTS = """
<opset_import: ["" : 25], domain: "calc">
Experts <activation> (hidden, ids, weights, gate, up, down) => (out)
{
    axis0 = Constant <value_ints: ints = [0]> ()
    axis1 = Constant <value_ints: ints = [1]> ()
    last = Constant <value_ints: ints = [-1]> ()
    gate_t = Transpose <perm: ints = [0, 2, 1]> (gate)
    up_t = Transpose <perm: ints = [0, 2, 1]> (up)
    down_t = Transpose <perm: ints = [0, 2, 1]> (down)
    g = MatMul (hidden, gate_t)
    u = MatMul (hidden, up_t)
    ACTIVATION
    h = Mul (a, u)
    y = MatMul (h, down_t)
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    count = Shape <start: int = 0, end: int = 1> (gate)
    n = Squeeze (count, axis0)
    range = Range (zero, n, one)
    chosen = Unsqueeze (ids, last)
    hit = Equal (chosen, range)
    hit_f = CastLike (hit, weights)
    w = Unsqueeze (weights, last)
    share_k = Mul (hit_f, w)
    share = ReduceSum <keepdims: int = 0> (share_k, axis1)
    share_t = Transpose <perm: ints = [1, 0]> (share)
    share_3 = Unsqueeze (share_t, last)
    weighted = Mul (y, share_3)
    out = ReduceSum <keepdims: int = 0> (weighted, axis0)
}
"""


def experts_function(activation: str) -> ir.Function:
    """`calc::Experts`: routed gated experts, dense over the experts.

    ``out[t] = sum over j of weights[t, j] * down[e] (act(gate[e] x) * up[e] x)`` with ``e = ids[t, j]``, ``x =
    hidden[t]``. Inputs: hidden [T,H]; ids, weights [T,k]; gate, up [E,I,H]; down [E,H,I]. A function cannot choose by
    a string attribute: the body is the given activation's, and the attribute says which it is.

    Args:
        activation: silu, gelu_tanh or gelu.
    """
    if activation not in _ACTIVATION:
        raise InternalError(f"no body for the activation {activation!r}")
    proto: onnx.FunctionProto = onnx.parser.parse_function(_EXPERTS.replace("ACTIVATION", _ACTIVATION[activation]))
    return ir.serde.deserialize_function(proto)
