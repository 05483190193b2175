"""Every fusion on its pattern, on near misses that it must refuse with a reason, and the reason in the inventory."""

from __future__ import annotations

import pytest

from calc.core.errors import InternalError, UnsupportedError
from calc.passes.base import Graph, Refusal, Rule, dims
from calc.passes.calls import calls
from calc.passes.fuse.activate import FuseActivate
from calc.passes.fuse.add import FuseAdd
from calc.passes.fuse.attention_kv import FuseAttentionKv
from calc.passes.fuse.bias import FuseBias
from calc.passes.fuse.embed import FuseEmbed
from calc.passes.fuse.glu import FuseGlu
from calc.passes.fuse.join_linears import JoinLinears
from calc.passes.fuse.last_row import FuseLastRow
from calc.passes.fuse.linear import FuseLinear
from calc.passes.fuse.lm_head import FuseLmHead
from calc.passes.fuse.moe import FuseMoe
from calc.passes.fuse.qk_norm_rope import FuseQkNormRope
from calc.passes.fuse.residual import FuseResidual
from calc.passes.fuse.rms_norm import FuseRmsNorm
from calc.passes.inventory import report, take_stock
from calc.passes.order import fusion_passes
from tests.passes.graphs import graph, ops, refusal

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


@pytest.mark.parametrize("rule", PATTERNS)
def test_the_pattern_fuses(rule: type[Rule]) -> None:
    g = build(rule)
    outputs = [(v.name, tuple(v.shape)) for v in g.model.graph.outputs]
    r = rule()
    assert r.run(g) == 1
    # each Mul, Add or Gather is an anchor: those that belong to the match refuse before it is found
    assert {x.rule for x in r.refusals} <= {r.name}
    assert PATTERNS[rule][1] in [n.op_type for n in g.model.graph if n.domain == "calc"]
    assert [(v.name, tuple(v.shape)) for v in g.model.graph.outputs] == outputs


def test_what_the_fused_ops_say() -> None:
    def fused(rule: type[Rule], *changes: tuple[str, str]) -> dict[str, object]:
        g = build(rule, *changes)
        assert rule().run(g) == 1
        (node,) = [n for n in g.model.graph if n.domain == "calc" and n.op_type == PATTERNS[rule][1]]
        return {k: a.value for k, a in node.attributes.items()} | {"ins": [v.name for v in node.inputs]}

    assert fused(FuseLinear)["ins"] == ["x", "w", "wb"]
    assert fused(FuseEmbed)["scale"] == 4.0
    assert (fused(FuseGlu)["act"], fused(FuseGlu)["ins"]) == ("silu", ["x", "w1", "w2"])
    assert fused(FuseGlu, ("s = Sigmoid(g)\na = Mul(g, s)", 'a = Gelu<approximate = "tanh">(g)'))["act"] == "gelu_tanh"
    assert fused(FuseGlu, ("s = Sigmoid(g)\na = Mul(g, s)", "a = Gelu(g)"))["act"] == "gelu"
    assert fused(FuseGlu, ("s = Sigmoid(g)\na = Mul(g, s)", "a = Swish(g)"))["act"] == "silu"
    rope = fused(FuseQkNormRope)
    assert (rope["heads"], rope["kv_heads"], rope["head_dim"], rope["norm"], rope["rotary_dim"]) == (4, 2, 8, 1, 8)
    attention = fused(FuseAttentionKv)
    assert (attention["window"], attention["softcap"], attention["scale"]) == (5, 3.0, 0.25)
    head = fused(FuseLmHead)
    assert (head["softcap"], head["ins"]) == (5.0, ["x", "w"])
    assert fused(FuseLastRow)["ins"] == ["x", "cur_seq_len"]  # ahead of the norm
    assert fused(FuseGlu, ("Sigmoid(g)", "Sigmoid(u)"))["act"] == "sigmoid"  # the first product is a gate of its own
    assert fused(FuseActivate)["act"] == "silu"
    assert fused(FuseActivate, ("s = Sigmoid(x)\ny = Mul(x, s)", "y = Tanh(x)"))["act"] == "tanh"
    assert fused(FuseBias)["ins"] == ["x", "wb"]
    assert fused(FuseAdd)["ins"] == ["a", "b"]
    moe = fused(FuseMoe)
    assert (moe["top_k"], moe["norm_topk"], moe["hidden"]) == (2, 1, 32)
    plain = (("total = ReduceSum<keepdims = 1>(top, last)\nn = Div(top, total)", ""), ("ids, n,", "ids, top,"))
    assert fused(FuseMoe, *plain)["norm_topk"] == 0
    assert (fused(JoinLinears)["n"], fused(JoinLinears)["ins"]) == (2, ["x", "w1", "w2"])
    assert fused(FuseResidual)["ins"] == ["x", "w", "r"]


SPLIT = "q, k or v are not split into heads by Reshape and Transpose"
MERGE = "the heads are not merged by Transpose and Reshape"
WRITES = "keys and values do not come from linear KV writes on axis 2"
DIFFERENT = "q and k are normed or rotated differently"
GATED = "not an activation of one projection times another projection of the same input"
SOLE = "no operand is the sole output of a projection, experts or a norm"
Changes = list[tuple[str, str]]

NEAR: list[tuple[type[Rule], str, Changes, str]] = [
    (
        FuseLinear,
        "not transposed",
        [("Transpose<perm = [1, 0]>(w)", "Identity(wt)"), ("float[16,32] w,", "float[32,16] wt,")],
        "transposed 2-D weight",
    ),
    (
        FuseLinear,
        "transposed to itself",
        [("perm = [1, 0]", "perm = [0, 1]"), ("float[16,32] w,", "float[32,16] w,")],
        "transposed 2-D weight",
    ),
    (FuseLinear, "not a weight", [("float[16,32] w,", "float[16,32] a,"), ("(w)", "(a)")], "transposed 2-D weight"),
    (FuseEmbed, "columns", [("axis = 0", "axis = 1")], "not a lookup of input_ids in the rows"),
    (FuseEmbed, "other ids", [("input_ids", "ids"), ("input_ids", "ids")], "not a lookup of input_ids"),
    (
        FuseEmbed,
        "not a weight",
        [("float[64,32] w", "float[64,32] table"), ("(w,", "(table,")],
        "not a lookup of input_ids",
    ),
    (FuseGlu, "two inputs", [("(x, w2)", "(x2, w2)"), (X, f"{X}, float[1,4,32] x2")], GATED),
    (FuseGlu, "unknown activation", [("s = Sigmoid(g)\na = Mul(g, s)", "a = Relu(g)")], GATED),
    (FuseGlu, "swish with a beta", [("s = Sigmoid(g)\na = Mul(g, s)", "a = Swish<alpha = 1.7>(g)")], GATED),
    (
        FuseGlu,
        "a projection with bias",
        [
            ("bias = 0, add = 0>(x, w2)", "bias = 1, add = 0>(x, w2, wb)"),
            (X, f"{X}, float[16] wb"),
        ],
        GATED,
    ),
    (FuseAttentionKv, "not causal", [("is_causal = 1", "is_causal = 0")], "attention is not causal"),
    (FuseAttentionKv, "no valid length", [(", , , , valid)", ")")], "a mask or past inputs"),
    (FuseAttentionKv, "a mask", [(", , , , valid)", ", mask, , , valid)")], "a mask or past inputs"),
    (FuseAttentionKv, "a circular write", [("<axis = 2>(past_k", '<axis = 2, mode = "circular">(past_k')], WRITES),
    (FuseAttentionKv, "no KV write", [("(qt, kk, vv,", "(qt, kt, vv,")], WRITES),
    (
        FuseAttentionKv,
        "q not split",
        [
            ("qt = Transpose<perm = [0, 2, 1, 3]>(q4)", "qt = Identity(x4)"),
            ("float[1,4,32] q", "float[1,4,4,8] x4, float[1,4,32] q"),
        ],
        SPLIT,
    ),
    (
        FuseAttentionKv,
        "v not split",
        [
            ("vt = Transpose<perm = [0, 2, 1, 3]>(v4)", "vt = Identity(x4)"),
            ("float[1,4,32] q", "float[1,2,4,8] x4, float[1,4,32] q"),
        ],
        SPLIT,
    ),
    (
        FuseAttentionKv,
        "heads not swapped back",
        [("at = Transpose<perm = [0, 2, 1, 3]>(a)", "at = Transpose<perm = [0, 1, 2, 3]>(a)")],
        MERGE,
    ),
    (
        FuseAttentionKv,
        "read twice",
        [("y = Reshape(at, os)", "b = Neg(a)\ny = Reshape(at, os)"), ("outputs", "y, b, kk, vv")],
        MERGE,
    ),
    (FuseAttentionKv, "not flattened", [("y = Reshape(at, os)", "y = Identity(at)")], MERGE),
    (FuseAttentionKv, "split again", [("[1, 4, 32]", "[1, 4, 4, 8]")], MERGE),
    (
        FuseAttentionKv,
        "values written elsewhere",
        [("(past_v, vt, past_kv_cur_seq_len)", "(past_v, vt, other)")],
        "not written at past_kv_cur_seq_len",
    ),
    (
        FuseAttentionKv,
        "both written elsewhere",
        [("vt, past_kv_cur_seq_len)", "vt, other)"), ("kt, past_kv_cur_seq_len)", "kt, other)")],
        "not written at past_kv_cur_seq_len",
    ),
    (FuseAttentionKv, "one key too few", [("value_int = 4", "value_int = 3")], "the valid keys are not"),
    (
        FuseAttentionKv,
        "keys of another length",
        [("valid = Add(past_kv_cur_seq_len", "valid = Add(other")],
        "the valid keys are not",
    ),
    (FuseQkNormRope, "no KV write", [("(qt, kk, vv,", "(qt, kt, vv,")], "do not come from a KV write"),
    (
        FuseQkNormRope,
        "only q is rotated",
        [("kt = RotaryEmbedding<interleaved = 0>(k5, cos, sin)", "kt = Identity(k5)")],
        "not rotated by RotaryEmbedding",
    ),
    (FuseQkNormRope, "another table", [("(k5, cos, sin)", "(k5, cos2, sin)")], DIFFERENT),
    (FuseQkNormRope, "another pairing", [("<interleaved = 0>(k5", "<interleaved = 1>(k5")], DIFFERENT),
    (FuseQkNormRope, "another epsilon", [("0.000001>(k4", "0.1>(k4")], DIFFERENT),
    (
        FuseQkNormRope,
        "only q is normed",
        [
            ("kn = RMSNormalization<axis = -1, epsilon = 0.000001>(k4, w_gk)", "kn = Identity(k4)"),
            ("Transpose<perm = [0, 2, 1, 3]>(kn)", "Transpose<perm = [0, 2, 1, 3]>(k4)"),
        ],
        DIFFERENT,
    ),
    (
        FuseQkNormRope,
        "cos and sin of different positions",
        [("sin = Gather<axis = 0>(w_sin, pos)", "sin = Gather<axis = 0>(w_sin, pos2)")],
        "rows of different positions",
    ),
    (
        FuseQkNormRope,
        "positions one too far",
        [("[0, 1, 2, 3]>()\nfour", "[1, 2, 3, 4]>()\nfour")],
        "the positions are not past_kv_cur_seq_len onwards",
    ),
    (
        FuseQkNormRope,
        "positions of another past",
        [("Unsqueeze(past_kv_cur_seq_len", "Unsqueeze(other")],
        "the positions are not",
    ),
    (
        FuseQkNormRope,
        "tables that are computed",
        [("cos = Gather<axis = 0>(w_cos, pos)", "cg = Gather<axis = 0>(w_cos, pos)\ncos = Neg(cg)")],
        "not rows of a table",
    ),
    (
        FuseQkNormRope,
        "heads not swapped",
        [("q5 = Transpose<perm = [0, 2, 1, 3]>(qn)", "q5 = Transpose<perm = [0, 1, 2, 3]>(qn)")],
        "heads are not split",
    ),
    (
        FuseQkNormRope,
        "heads not split",
        [("q4 = Reshape(q, qs)", "q4 = Neg(x4)"), ("float[1,4,32] q", "float[1,4,4,8] x4, float[1,4,32] q")],
        "heads are not split",
    ),
    (
        FuseQkNormRope,
        "a norm over all heads",
        [
            ("axis = -1, epsilon = 0.000001>(q4", "axis = 2, epsilon = 0.000001>(q4"),
            ("float[8] w_gq", "float[4,8] w_gq"),
        ],
        "one value per column",
    ),
    (
        FuseQkNormRope,
        "a norm's scale that is computed",
        [("(q4, w_gq)", "(q4, ng)"), ("q4 = Reshape(q, qs)", "q4 = Reshape(q, qs)\nng = Neg(w_gq)")],
        "one value per column",
    ),
    (
        FuseLastRow,
        "rows chosen otherwise",
        [("Sub(cur_seq_len", "Sub(other"), ("int64[1] cur_seq_len", "int64[1] cur_seq_len, int64[1] other")],
        "not chosen by cur_seq_len - 1",
    ),
    (FuseLastRow, "the row before", [("value_int = 1", "value_int = 2")], "not chosen by cur_seq_len - 1"),
    (
        FuseLastRow,
        "a product of the length",
        [("Sub(cur_seq_len, one)", "Mul(cur_seq_len, one)")],
        "not chosen by cur_seq_len - 1",
    ),
    (
        FuseLastRow,
        "a clip at one",
        [("j = Unsqueeze(i, ax)", "m = Max(i, one)\nj = Unsqueeze(m, ax)")],
        "not chosen by cur_seq_len - 1",
    ),
    (
        FuseLastRow,
        "rows of rows",
        [("float[1,4,32] x", "float[1,4,2,32] x")],
        "not one row of each sequence",
    ),
    (
        FuseLmHead,
        "a bias",
        [("bias = 0", "bias = 1"), ("(x, w)", "(x, w, wb)"), ("float[1,32] x", "float[1,32] x, float[64] wb")],
        "not a plain projection",
    ),
    (
        FuseLmHead,
        "not the graph's output",
        [("y = Mul(t, cap)", "m = Mul(t, cap)\ny = Neg(m)")],
        "not the graph's",
    ),
    (
        FuseLmHead,
        "factors that differ",
        [("y = Mul(t, cap)", "c2 = Constant<value_float = 6.0>()\ny = Mul(t, c2)")],
        "the softcap's two factors differ",
    ),
    (FuseLmHead, "a product before tanh", [("d = Div(l, cap)", "d = Mul(l, cap)")], "the softcap's two factors differ"),
    (
        FuseLmHead,
        "a factor of zero",
        [("d = Div(l, cap)", "o = Constant<value_float = 0.0>()\nd = Mul(l, o)")],
        "the softcap's two factors differ",
    ),
    (FuseLmHead, "scaled without a cap", [("t = Tanh(d)\n", "t = Sigmoid(d)\n")], "scaled, but not by a softcap"),
    (
        FuseLmHead,
        "a scale alone",
        [("d = Div(l, cap)\nt = Tanh(d)\ny = Mul(t, cap)", "y0 = Div(l, cap)\ny = Neg(y0)")],
        "scaled, but not by a softcap",
    ),
    (
        FuseMoe,
        "not a reshape",
        [("f = Reshape(x, rows)", "f = Neg(x2)"), (X, f"{X}, float[4,32] x2")],
        "not a reshape of the layer's rows",
    ),
    (
        FuseMoe,
        "divided by something else",
        [("n = Div(top, total)", "n = Div(top, top)")],
        "not normalised by their sum",
    ),
    (
        FuseMoe,
        "summed over tokens",
        [
            ("ReduceSum<keepdims = 1>(top, last)", "ReduceSum<keepdims = 1>(top, zero)"),
            ("rows = Const", "zero = Constant<value_ints = [0]>()\nrows = Const"),
        ],
        "not normalised by their sum",
    ),
    (
        FuseMoe,
        "ids of another choice",
        [("total = Red", "t2, i2 = TopK<axis = -1>(p, two)\ntotal = Red"), ("(f, ids,", "(f, i2,")],
        "the same TopK",
    ),
    (FuseMoe, "sigmoid router", [("Softmax<axis = -1>(z)", "Sigmoid(z)")], "not softmax then top-k"),
    (FuseMoe, "softmax over tokens", [("Softmax<axis = -1>", "Softmax<axis = 0>")], "not softmax then top-k"),
    (FuseMoe, "the smallest", [("TopK<axis = -1>", "TopK<axis = -1, largest = 0>")], "not softmax then top-k"),
    (
        FuseMoe,
        "router with a bias",
        [("bias = 0", "bias = 1"), ("(f, w_r)", "(f, w_r, wb)"), (X, f"{X}, float[4] wb")],
        "not a projection of the experts' input",
    ),
    (
        FuseMoe,
        "experts that are computed",
        [("w_u, w_d)", "nu, w_d)"), ("e = calc", "nu = Neg(w_u)\ne = calc")],
        "not weights of the checkpoint",
    ),
    (
        FuseMoe,
        "a shared expert",
        [("y = Reshape(e, back)", "h = Add(e, f)\ny = Reshape(h, back)")],
        "not reshaped back",
    ),
    (
        JoinLinears,
        "one with a bias",
        [("bias = 0, add = 0>(x, w2)", "bias = 1, add = 0>(x, w2, wb)")],
        "no other projection of its input is like it",
    ),
    (JoinLinears, "of two inputs", [("(x, w2)", "(x2, w2)"), (X, f"{X}, float[1,4,32] x2")], "no other projection"),
    (
        JoinLinears,
        "residuals",
        [
            ("add = 0>(x, w1)", "add = 1>(x, w1, r)"),
            ("add = 0>(x, w2)", "add = 1>(x, w2, r)"),
            (X, f"{X}, float[1,4,16] r"),
        ],
        "several outputs or a residual",
    ),
    (FuseActivate, "a product", [("s = Sigmoid(x)", "s = Neg(x)")], "not an activation"),
    (FuseActivate, "of four axes", [("float[1,4,32] x", "float[1,2,4,32] x")], "not over the rows"),
    (FuseAdd, "a weight", [("Add(a, b)", "Add(a, wb)"), ("b = Neg(x2)\n", "")], "not a sum of two activations"),
    (FuseAdd, "broadcast", [("float[1,4,32] x2", "float[1,1,32] x2")], "not rows of one shape"),
    (FuseBias, "one value for all", [("float[32] wb", "float[1] wb")], "no operand is a weight"),
    (
        FuseBias,
        "not a weight",
        [("float[32] wb", "float[32] beta"), ("Add(x, wb)", "Add(x, beta)")],
        "no operand is a weight",
    ),
    (FuseRmsNorm, "rank 4", [("float[1,4,32] x", "float[1,1,4,32] x")], "not a norm of the model's rows"),
    (
        FuseRmsNorm,
        "scale that is computed",
        [("y = RMSNormalization<axis = -1, epsilon = 0.00001>(x, wg)", "ng = Neg(wg)\ny = RMSNormalization(x, ng)")],
        "not a norm of the model's rows",
    ),
    (
        FuseRmsNorm,
        "over rows and columns",
        [("axis = -1", "axis = 1"), ("float[32] wg", "float[4,32] wg")],
        "not a norm of the model's rows",
    ),
    (FuseResidual, "read twice", [("y = Add(r, l)", "y = Add(r, l)\nb = Neg(l)"), ("outputs", "y, b")], SOLE),
    (FuseResidual, "an output", [("outputs", "y, l")], SOLE),
    (FuseResidual, "has one already", [("add = 0>(x, w)", "add = 1>(x, w, r)")], SOLE),
    (FuseResidual, "broadcast", [("float[1,4,32] r", "float[32] r")], SOLE),
    (FuseResidual, "two others", [("Add(r, l)", "Add(r, x)"), ("outputs", "y, l")], SOLE),
]


@pytest.mark.parametrize(("rule", "case", "changes", "reason"), NEAR, ids=[f"{r.name}: {c}" for r, c, _, _ in NEAR])
def test_near_misses_are_refused_with_a_reason(rule: type[Rule], case: str, changes: Changes, reason: str) -> None:
    g = build(rule, *changes)
    assert reason in refusal(rule(), g), case


@pytest.mark.parametrize("rule", [r for r in PATTERNS if r not in (JoinLinears, FuseLmHead)])
def test_the_reason_is_in_the_inventory_and_in_the_error(rule: type[Rule]) -> None:
    """The first near miss of each rule whose anchor stays: named with its reason wherever a user looks."""
    shown = 0
    for kind, _, changes, reason in NEAR:
        if kind is not rule:
            continue
        stock = take_stock("g", build(rule, *changes))
        text = "\n".join(f.reason for e in stock.ops if e.klass in ("unsupported", "cpu-fallback") for f in e.findings)
        g = build(rule, *changes)
        passes = fusion_passes()
        for p in passes:
            p.run(g)
        if not any(rule().is_anchor(n) for n in g.model.graph):
            continue  # another rule took the node in
        try:
            calls(g, [r for p in passes if isinstance(p, Rule) for r in p.refusals])
        except UnsupportedError as e:
            error = "\n".join(p.what for p in e.problems)
            if f"{rule.name}: " in error and reason in error:
                assert f"{rule.name}: " in text
                assert reason in text
                assert not report("g", [stock]).ok or "host can compute" in text
                shown += 1
    assert shown, rule.name


def test_values_without_a_shape_are_a_refusal_and_a_finding() -> None:
    g = graph(f"{X}, float[16,32] w", "y", "u = com.acme.Foo(x)\nt = Transpose<perm = [1, 0]>(w)\ny = MatMul(u, t)")
    for v in g.model.graph.outputs:
        v.shape = None
    rule = FuseLinear()
    assert rule.run(g) == 0
    assert rule.refusals == [Refusal("n2", "fuse-linear", "value y has no static shape: None")]
    with pytest.raises(UnsupportedError) as caught:
        calls(g, rule.refusals)
    assert "fuse-linear: value y has no static shape" in caught.value.problems[-1].what
    with pytest.raises(InternalError, match="no static shape"):
        dims(g.model.graph.outputs[0])


def test_a_calc_node_behind_an_unknown_shape() -> None:
    body = "u = com.acme.Foo(x)\ny = calc.Linear<n = 1, bias = 0, add = 0>(u, w)"
    g = graph(f"{X}, float[16,32] w", "float[1,4,16] y", body)
    with pytest.raises(UnsupportedError) as caught:
        calls(g)
    assert [p.what.split(";")[0] for p in caught.value.problems] == [
        "no NPU kernel computes com.acme.Foo here",
        "Linear cannot run on the NPU",
    ]
    stock = take_stock("g", g)
    assert {e.op for e in stock.ops if e.klass == "unsupported"} == {"Foo", "Linear"}


def test_a_broken_constraint_is_named() -> None:
    g = build(FuseAttentionKv, ("softcap = 3.0", "softcap = -3.0"))
    assert FuseAttentionKv().run(g) == 1
    with pytest.raises(UnsupportedError) as caught:
        calls(g)
    (problem,) = [p for p in caught.value.problems if p.code == "OP_CONSTRAINT"]
    assert problem.got == "softcap -3.0"
    assert any("softcap" in f.reason for e in take_stock("g", g).ops for f in e.findings)


def test_a_fused_linear_keeps_a_bias_of_another_width_out() -> None:
    g = build(FuseLinear, ("float[16] wb", "float[1] wb"))
    assert FuseLinear().run(g) == 1
    assert ops(g)[-1] == "Add"
