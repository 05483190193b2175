"""Every fusion's pattern, and how a test changes it."""

from __future__ import annotations

from calc.passes.base import Graph, Rule
from calc.passes.fuse.activate import FuseActivate
from calc.passes.fuse.add import FuseAdd
from calc.passes.fuse.attention_kv import FuseAttentionKv
from calc.passes.fuse.bias import FuseBias
from calc.passes.fuse.embed import FuseEmbed
from calc.passes.fuse.glu import FuseGlu
from calc.passes.fuse.join_linears import JoinLinears
from calc.passes.fuse.last_row import FuseLastRow
from calc.passes.fuse.layer_norm import FuseLayerNorm
from calc.passes.fuse.linear import FuseLinear
from calc.passes.fuse.lm_head import FuseLmHead
from calc.passes.fuse.moe import FuseMoe
from calc.passes.fuse.qk_norm_rope import FuseQkNormRope
from calc.passes.fuse.residual import FuseResidual
from calc.passes.fuse.rms_norm import FuseRmsNorm
from tests.passes.graphs import graph

X = "float[1,4,32] x"
LINEAR = (
    f"{X}, float[16,32] w, float[16] wb",
    "y",
    "t = Transpose<perm = [1, 0]>(w)\nm = MatMul(x, t)\ny = Add(m, wb)",
)
EMBED = (
    "int64[1,4] input_ids, float[64,32] w",
    "y",
    "e = Gather<axis = 0>(w, input_ids)\nc = Constant<value_float = 4.0>()\ny = Mul(e, c)",
)
GLU = (
    f"{X}, float[16,32] w1, float[16,32] w2",
    "y",
    """
g = calc.Linear<n = 1, bias = 0, add = 0>(x, w1)
u = calc.Linear<n = 1, bias = 0, add = 0>(x, w2)
s = Sigmoid(g)
a = Mul(g, s)
y = Mul(a, u)""",
)
ATTENTION = (
    "float[1,4,32] q, float[1,4,16] k, float[1,4,16] v, float[1,2,12,8] past_k, float[1,2,12,8] past_v, "
    "int64[1] past_kv_cur_seq_len, int64[1] other, float[4,12] mask, float[20,4] w_cos, float[20,4] w_sin, "
    "float[20,4] w_cos2, float[8] w_gq, float[8] w_gk",
    "y, kk, vv",
    """
qs = Constant<value_ints = [1, 4, 4, 8]>()
ks = Constant<value_ints = [1, 4, 2, 8]>()
ax = Constant<value_ints = [1]>()
ar = Constant<value_ints = [0, 1, 2, 3]>()
four = Constant<value_int = 4>()
q4 = Reshape(q, qs)
k4 = Reshape(k, ks)
v4 = Reshape(v, ks)
qn = RMSNormalization<axis = -1, epsilon = 0.000001>(q4, w_gq)
kn = RMSNormalization<axis = -1, epsilon = 0.000001>(k4, w_gk)
q5 = Transpose<perm = [0, 2, 1, 3]>(qn)
k5 = Transpose<perm = [0, 2, 1, 3]>(kn)
vt = Transpose<perm = [0, 2, 1, 3]>(v4)
col = Unsqueeze(past_kv_cur_seq_len, ax)
pos = Add(col, ar)
pos2 = Add(ar, col)
cos = Gather<axis = 0>(w_cos, pos)
sin = Gather<axis = 0>(w_sin, pos)
cos2 = Gather<axis = 0>(w_cos2, pos)
qt = RotaryEmbedding<interleaved = 0>(q5, cos, sin)
kt = RotaryEmbedding<interleaved = 0>(k5, cos, sin)
kk = TensorScatter<axis = 2>(past_k, kt, past_kv_cur_seq_len)
vv = TensorScatter<axis = 2>(past_v, vt, past_kv_cur_seq_len)
valid = Add(past_kv_cur_seq_len, four)
a = Attention<is_causal = 1, scale = 0.25, softcap = 3.0, left_window_size = 4>(qt, kk, vv, , , , valid)
at = Transpose<perm = [0, 2, 1, 3]>(a)
os = Constant<value_ints = [1, 4, 32]>()
y = Reshape(at, os)""",
)
UNROTATED = (
    ATTENTION[0],
    ATTENTION[1],
    ATTENTION[2]
    .replace("qt = RotaryEmbedding<interleaved = 0>(q5, cos, sin)", "qt = Transpose<perm = [0, 2, 1, 3]>(q4)")
    .replace("kt = RotaryEmbedding<interleaved = 0>(k5, cos, sin)", "kt = Transpose<perm = [0, 2, 1, 3]>(k4)"),
)
LAST = (
    f"{X}, int64[1] cur_seq_len, float[32] wg",
    "r",
    """
one = Constant<value_int = 1>()
ax = Constant<value_ints = [1]>()
i = Sub(cur_seq_len, one)
j = Unsqueeze(i, ax)
n = RMSNormalization<axis = -1, epsilon = 0.00001>(x, wg)
r = GatherND<batch_dims = 1>(n, j)""",
)
HEAD = (
    "float[1,32] x, float[64,32] w, float[64,32] w2",
    "y",
    """
cap = Constant<value_float = 5.0>()
l = calc.Linear<n = 1, bias = 0, add = 0>(x, w)
d = Div(l, cap)
t = Tanh(d)
y = Mul(t, cap)""",
)
MOE = (
    f"{X}, float[4,32] w_r, float[4,8,32] w_g, float[4,8,32] w_u, float[4,32,8] w_d, float[32,8] w_t",
    "y",
    """
rows = Constant<value_ints = [4, 32]>()
back = Constant<value_ints = [1, 4, 32]>()
two = Constant<value_ints = [2]>()
last = Constant<value_ints = [-1]>()
f = Reshape(x, rows)
z = calc.Linear<n = 1, bias = 0, add = 0>(f, w_r)
p = Softmax<axis = -1>(z)
top, ids = TopK<axis = -1>(p, two)
total = ReduceSum<keepdims = 1>(top, last)
n = Div(top, total)
e = calc.Experts<activation = "silu">(f, ids, n, w_g, w_u, w_d)
y = Reshape(e, back)""",
)
JOIN = (
    f"{X}, float[16,32] w1, float[16,32] w2, float[16] wb",
    "y, z",
    """
y = calc.Linear<n = 1, bias = 0, add = 0>(x, w1)
z = calc.Linear<n = 1, bias = 0, add = 0>(x, w2)""",
)
ACTIVATE = (X, "y", "s = Sigmoid(x)\ny = Mul(x, s)")
ADD = (f"{X}, float[1,4,32] x2, float[32] wb", "y", "a = Neg(x)\nb = Neg(x2)\ny = Add(a, b)")
BIAS = (f"{X}, float[32] wb", "y", "y = Add(x, wb)")
LAYER_NORM = (
    f"{X}, float[32] wg, float[32] wb",
    "y",
    "y = LayerNormalization<axis = -1, epsilon = 0.00001>(x, wg, wb)",
)
POST = (f"{X}, float[32] wg", "y", "y = RMSNormalization<axis = -1, epsilon = 0.00001>(x, wg)")
RESIDUAL = (
    f"{X}, float[1,4,32] r, float[32,32] w",
    "y",
    "l = calc.Linear<n = 1, bias = 0, add = 0>(x, w)\ny = Add(r, l)",
)
SHAPES = {
    "g": (1, 4, 16),
    "u": (1, 4, 16),
    "z": (4, 4),
    "e": (4, 32),
    "n": (1, 4, 32),
    "l": (1, 4, 32),
    "m": (1, 4, 16),
}

OTHER_SHAPES = {FuseLmHead: {"l": (1, 64)}, JoinLinears: {"y": (1, 4, 16), "z": (1, 4, 16)}}

PATTERNS: dict[type[Rule], tuple[tuple[str, str, str], str]] = {
    FuseLinear: (LINEAR, "Linear"),
    FuseEmbed: (EMBED, "Embed"),
    FuseGlu: (GLU, "Glu"),
    FuseQkNormRope: (ATTENTION, "QkNormRope"),
    FuseAttentionKv: (UNROTATED, "Attention"),
    FuseLmHead: (HEAD, "LmHead"),
    FuseMoe: (MOE, "Moe"),
    FuseLastRow: (LAST, "LastRow"),
    JoinLinears: (JOIN, "Linear"),
    FuseActivate: (ACTIVATE, "Activate"),
    FuseAdd: (ADD, "Add"),
    FuseBias: (BIAS, "Bias"),
    FuseRmsNorm: (POST, "RmsNorm"),
    FuseLayerNorm: (LAYER_NORM, "LayerNorm"),
    FuseResidual: (RESIDUAL, "Linear"),
}


def build(rule: type[Rule], *changes: tuple[str, str]) -> Graph:
    """The rule's pattern with text changes; outputs of calc nodes, which ONNX cannot infer, get their shapes."""
    inputs, outputs, body = PATTERNS[rule][0]
    for old, new in changes:
        if old == "outputs":
            outputs = new
        elif old in body:
            body = body.replace(old, new, 1)
        else:
            assert old in inputs, old
            inputs = inputs.replace(old, new, 1)
    return graph(inputs, outputs, body, shapes=OTHER_SHAPES.get(rule, SHAPES))
