"""Every fusion on its pattern, on near misses that it must refuse with a reason, and the reason in the inventory."""

from __future__ import annotations

import pytest

from calc.core.errors import InternalError, UnsupportedError
from calc.passes.base import Refusal, Rule, dims
from calc.passes.calls import calls
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
from calc.passes.inventory import report, take_stock
from calc.passes.order import fusion_passes
from tests.passes.fusions import PATTERNS, X, build
from tests.passes.graphs import graph, ops, refusal
from tests.passes.near_misses import NEAR, Changes


def test_every_fusion_has_a_pattern_and_near_misses() -> None:
    rules = {type(p) for p in fusion_passes() if isinstance(p, Rule)}
    assert rules == set(PATTERNS)
    assert rules - {rule for rule, *_ in NEAR} == set()


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
    assert fused(FuseLayerNorm)["ins"] == ["x", "wg", "wb"]
    without = (("(x, wg, wb)", "(x, wg)"), (", float[32] wb", ""))
    assert (fused(FuseLayerNorm, *without)["bias"], fused(FuseLayerNorm, *without)["ins"]) == (0, ["x", "wg"])
    layer = ("RMSNormalization<axis = -1, epsilon = 0.00001>(x, wg)", "LayerNormalization<axis = -1>(x, wg, wg)")
    assert fused(FuseLastRow, layer)["ins"] == ["x", "cur_seq_len"]  # ahead of this norm, too
    assert fused(FuseResidual)["ins"] == ["x", "w", "r"]


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
