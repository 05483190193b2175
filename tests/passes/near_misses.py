"""Near misses of the fusions' patterns, each with the reason why it is refused."""

from __future__ import annotations

from calc.passes.base import Rule
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
from tests.passes.fusions import X

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
    (FuseLayerNorm, "rank 4", [("float[1,4,32] x", "float[1,1,4,32] x")], "not a norm of the model's rows"),
    (
        FuseLayerNorm,
        "over rows and columns",
        [("axis = -1", "axis = 1"), ("float[32] wg, float[32] wb", "float[4,32] wg, float[4,32] wb")],
        "not a norm of the model's rows",
    ),
    (
        FuseLayerNorm,
        "a bias made on the way",
        [("wg, wb)", "wg, b)"), ("float[32] wb", "float[32] b")],
        "its bias is no weight",
    ),
    (
        FuseLayerNorm,
        "its mean is read",
        [("y = Layer", "y, mean = Layer"), ("wg, wb)", "wg, wb)\nm = Neg(mean)"), ("outputs", "y, m")],
        "its mean or deviation is used",
    ),
    (FuseResidual, "read twice", [("y = Add(r, l)", "y = Add(r, l)\nb = Neg(l)"), ("outputs", "y, b")], SOLE),
    (FuseResidual, "an output", [("outputs", "y, l")], SOLE),
    (FuseResidual, "has one already", [("add = 0>(x, w)", "add = 1>(x, w, r)")], SOLE),
    (FuseResidual, "broadcast", [("float[1,4,32] r", "float[32] r")], SOLE),
    (FuseResidual, "two others", [("Add(r, l)", "Add(r, x)"), ("outputs", "y, l")], SOLE),
]
