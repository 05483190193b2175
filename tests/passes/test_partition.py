"""Partition strategies: a split graph runs in ONNX Runtime to the numbers of the whole; refusals have words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from calc.core.errors import InternalError, UnsupportedError, UsageError
from calc.core.options import CompileOptions, no_progress
from calc.core.target import load_target
from calc.core.variant import Variant
from calc.passes.base import Graph
from calc.passes.calls import STRUCTURE, bind_functions, calls
from calc.passes.execute import ReplayCall, Replayed, replay
from calc.passes.partition import Board, strategies, strategy, tensor
from calc.passes.partition.layers import split_layers
from calc.passes.partition.tensor import even, heads_of
from calc.passes.recipe import load_recipe
from calc.passes.stages import Fused, choose_schemes, fuse, split
from calc.passes.verify import verify_chips
from calc.stages.source import Source, open_source
from tests.conftest import GLASS
from tests.field.field_models import save, t0
from tests.field.field_models import target as target_file
from tests.passes.graphs import graph

PLAN = (("prefill", 7, 0), ("prefill", 8, 7), ("decode", 1, 15), ("decode", 1, 16))
"""Two chunks, one of them padded, and two decode steps: (role, tokens, past)."""

ORDER = 1e-5
"""Relative: FP32 sums of the same terms in another order."""


@cache
def exported(model: Path) -> Source:
    return open_source(model, CompileOptions(prefill=(8,), max_seq_len=32), no_progress)


def fused(model: Path, quant: str = "bf16") -> Fused:
    source = exported(model)
    copies = {v: Graph(g.model.clone(), dict(g.weights)) for v, g in source.graphs().items()}  # passes change graphs
    out = fuse(source.exported.spec, source.context, copies, {}, no_progress)
    choose_schemes(out, load_recipe(quant))
    return out


def run(f: Fused) -> Replayed:
    """The plan in FP32, weights as they are stored."""
    graphs = {v.role: g for v, g in f.graphs.items() if v.batch == 1}
    for g in graphs.values():
        bind_functions(g, "fp32")
    rng = np.random.default_rng(5)
    todo = []
    for role, n, past in PLAN:
        ids = np.full((1, 8 if role == "prefill" else 1), 3, np.int64)
        ids[0, :n] = rng.integers(3, 60, n)
        todo.append(ReplayCall(role, ids, n, past))
    return replay(graphs, lambda g, name, _: np.asarray(g.weights[name].read(), np.float32), todo)


def on(tmp_path: Path, chips: int) -> str:
    return target_file(tmp_path / f"{chips}.toml", chips=chips)


def assert_same_numbers(a: Replayed, b: Replayed) -> None:
    """Not only to a tolerance: values that differ by a wrong head or column differ by their own size."""
    for got, want in zip([a.logits, *a.keys, *a.values], [b.logits, *b.keys, *b.values], strict=True):
        assert np.isfinite(got).all()
        assert np.abs(want).max() > 0.01
        np.testing.assert_allclose(got, want, rtol=0, atol=ORDER * np.abs(want).max())


def assert_split(f: Fused, chips: int, how: str) -> None:
    """Every call has a chip, every chip has work, and no chip reads what another made but by a transfer."""
    for v, g in f.graphs.items():
        todo = calls(g)
        verify_chips(v.name, todo, chips)
        assert {c.chip for c in todo} == set(range(chips))
        ops = {c.op for c in todo}
        assert ops >= ({"AllReduce", "AllGather"} if how == "tensor" else {"Send", "Recv"})
        assert g.model.graph.outputs[0].name == "logits"


def whole_and_split(model: Path, tmp_path: Path, chips: int, how: str) -> Fused:
    whole = run(fused(model))
    f = fused(model)
    part = split(f, load_target(on(tmp_path, chips)), how)
    assert_same_numbers(run(part), whole)
    assert_split(part, chips, how)
    return part


@pytest.mark.parametrize(("chips", "how"), [(2, "layers"), (4, "layers"), (3, "layers"), (2, "tensor"), (4, "tensor")])
def test_the_tiny_model(tmp_path: Path, chips: int, how: str) -> None:
    """Four query heads, two KV heads, an intermediate of 341: on four chips two of them share a KV head."""
    part = whole_and_split(GLASS, tmp_path, chips, how)
    todo = part.calls[part.first]
    if how == "tensor":
        attention = [c for c in todo if c.op == "Attention" and c.layer == 0]
        assert [c.attrs.heads for c in attention] == [4 // chips] * chips
        assert [c.attrs.kv_heads for c in attention] == [1] * chips
        down = {c.shape("w0")[1] for c in todo if c.op == "Linear" and c.attrs.partial and "down" in c.name}
        assert down == ({170, 171} if chips == 2 else {85, 86})
        parts = [g.parts for g in part.graphs.values()]
        firsts = [p.first for n, p in parts[0].items() if n.startswith("past_kv.0.key@")]
        assert firsts == ([0, 1] if chips == 2 else [0, 0, 1, 1])
        # each attention and each FFN of each layer, on each chip
        assert len([c for c in todo if c.op == "AllReduce"]) == 2 * 4 * chips


FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "biases": lambda: transformers.LlamaConfig(**t0(attention_bias=True, num_key_value_heads=4)),
    "qkv bias": lambda: transformers.Qwen2Config(**t0()),
    "q/k norm": lambda: transformers.Qwen3Config(**t0()),
    "one kv head": lambda: transformers.LlamaConfig(**t0(num_key_value_heads=1)),
    "odd sizes": lambda: transformers.LlamaConfig(**t0(vocab_size=67, intermediate_size=53, hidden_size=36)),
    "softcap": lambda: transformers.Gemma2Config(
        **t0(
            query_pre_attn_scalar=8,
            sliding_window=5,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "windows": lambda: transformers.MistralConfig(**t0(sliding_window=5)),
    "two ropes": lambda: transformers.Gemma3TextConfig(
        **t0(
            query_pre_attn_scalar=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=...,
        )
    ),
    "wide heads": lambda: transformers.LlamaConfig(**t0(head_dim=24)),
    "eight heads of four": lambda: transformers.LlamaConfig(
        **t0(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    ),
    "tied": lambda: transformers.LlamaConfig(**t0(tie_word_embeddings=True)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save(FAMILIES[request.param](), tmp_path_factory.mktemp("family") / "m")


def test_families_split_by_heads_and_columns(family: Path, tmp_path: Path) -> None:
    whole = run(fused(family))
    for chips in (2, 4):
        part = split(fused(family), load_target(on(tmp_path, chips)), "tensor")
        assert_same_numbers(run(part), whole)
        assert_split(part, chips, "tensor")
    part = split(fused(family), load_target(on(tmp_path, 2)), "layers")
    assert_same_numbers(run(part), whole)
    assert_split(part, 2, "layers")


def test_one_chip_is_not_split(tmp_path: Path) -> None:
    for how in strategies():
        part = split(fused(GLASS), load_target("calculet-1chip"), how)
        for todo in part.calls.values():
            assert {c.chip for c in todo} == {0}
            assert not {c.op for c in todo} & {"Send", "Recv", "AllReduce", "AllGather"}


@pytest.mark.parametrize("quant", ["w8a8", "w4a16", "w4a8", "w4z"])
def test_shares_have_the_scheme_of_the_whole(tmp_path: Path, quant: str) -> None:
    part = split(fused(GLASS, quant), load_target(on(tmp_path, 4)), "tensor")
    for g in part.graphs.values():
        shares = [n for n in g.weights if "@" in n and "." in n]
        assert shares
        for name in shares:
            whole = name.split("@")[0]
            assert g.schemes[name] == g.schemes[whole]
            assert str(g.schemes[name]).startswith(quant) or "embed" in whole or "lm_head" in whole


def test_shares_make_up_the_whole(tmp_path: Path) -> None:
    """Rows and columns of the shares, side by side, are the weight: none twice, none missing."""
    f = fused(GLASS)
    stored = {n: np.asarray(r.read(), np.float32) for n, r in next(iter(f.graphs.values())).weights.items()}
    part = split(f, load_target(on(tmp_path, 4)), "tensor")
    g = part.graphs[part.first]
    for suffix in ("mlp.gate_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.weight", "embed_tokens.weight"):
        whole = next(n for n in stored if n.endswith(suffix))
        found = {a: [n for n in g.weights if n.startswith(f"{whole}@") and n.endswith(a)] for a in ("rows", "columns")}
        for axis, names in found.items():
            if names:
                ordered = sorted(names, key=lambda n: int(n.split("@")[1].split("/")[0]))
                assert len(ordered) == 4
                data = [np.asarray(g.weights[n].read(), np.float32) for n in ordered]
                np.testing.assert_array_equal(np.concatenate(data, axis=0 if axis == "rows" else 1), stored[whole])
        assert found["rows"] or found["columns"]


# -- parts that no exported family has --------------------------------------------------------------------------------


def ort(g: Graph, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All of a graph in one piece."""
    import onnxruntime as rt

    from calc.passes.onnx_files import without_weights

    bind_functions(g, "fp32")
    options = rt.SessionOptions()
    options.log_severity_level = 3
    session = rt.InferenceSession(without_weights(g), options)
    given = {n: np.asarray(r.read(), np.float32) for n, r in g.weights.items()}
    names = {i.name for i in session.get_inputs()}
    return session.run(None, {n: v for n, v in {**given, **feeds}.items() if n in names})


FFN = """
    u = calc.Linear<n: int = 1, bias: int = {bias}, add: int = 0>(x, w_up{b0})
    a = calc.Activate<act: string = "gelu">(u)
    y = calc.Linear<n: int = 1, bias: int = {bias}, add: int = 1>(a, w_down{b1}, x)
"""


@pytest.mark.parametrize("chips", [2, 3, 4])
@pytest.mark.parametrize("bias", [0, 1])
def test_an_ungated_ffn(chips: int, bias: int) -> None:
    """Up, activation, down: the bias of the second is added once, whatever the number of chips."""

    def make() -> Graph:
        weights = "float[53,32] w_up, float[32,53] w_down" + (", float[53] w_bu, float[32] w_bd" if bias else "")
        body = FFN.format(bias=bias, b0=", w_bu" if bias else "", b1=", w_bd" if bias else "")
        shapes = {"u": (1, 5, 53), "a": (1, 5, 53), "y": (1, 5, 32)}
        return graph(f"float[1,5,32] x, {weights}", "float[1,5,32] y", body, shapes=shapes)

    x = np.random.default_rng(1).standard_normal((1, 5, 32)).astype(np.float32)
    (want,) = ort(make(), {"x": x})
    g = make()
    strategy("tensor", "test").partition(g, Board(chips))
    got = ort(g, {"x": x})
    np.testing.assert_allclose(got[0], want, rtol=0, atol=ORDER * np.abs(want).max())
    todo = calls(g)
    verify_chips("ffn", todo, chips)
    ups = [c for c in todo if c.op == "Linear" and not c.attrs.partial]
    assert sorted(c.shape("w0")[0] for c in ups) == sorted(b - a for a, b in even(53, chips))
    assert [c.attrs.bias for c in todo if c.op == "Linear" and c.attrs.partial] == [bias, *[0] * (chips - 1)]


def test_an_output_that_is_split_is_joined() -> None:
    body = """
    u = calc.Linear<n: int = 1, bias: int = 0, add: int = 0>(x, w_up)
    a = calc.Activate<act: string = "gelu">(u)
    y = calc.Linear<n: int = 1, bias: int = 0, add: int = 0>(a, w_down)
    """

    def make() -> Graph:
        shapes = {"u": (1, 5, 53), "a": (1, 5, 53), "y": (1, 5, 32)}
        inputs = "float[1,5,32] x, float[53,32] w_up, float[32,53] w_down"
        return graph(inputs, "float[1,5,32] y, float[1,5,53] a", body, shapes=shapes)

    x = np.random.default_rng(1).standard_normal((1, 5, 32)).astype(np.float32)
    want = ort(make(), {"x": x})
    g = make()
    strategy("tensor", "test").partition(g, Board(2))
    assert [o.name for o in g.model.graph.outputs] == ["y", "a"]
    for a, b in zip(ort(g, {"x": x}), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ORDER * np.abs(b).max())


def test_several_projections_of_one_share_are_our_bug() -> None:
    body = """
    u = calc.Linear<n: int = 1, bias: int = 0, add: int = 0>(x, w_up)
    a = calc.Activate<act: string = "gelu">(u)
    y, z = calc.Linear<n: int = 2, bias: int = 0, add: int = 0>(a, w_a, w_b)
    """
    shapes = {"u": (1, 5, 48), "a": (1, 5, 48), "y": (1, 5, 32), "z": (1, 5, 32)}
    weights = "float[48,32] w_up, float[32,48] w_a, float[32,48] w_b"
    g = graph(f"float[1,5,32] x, {weights}", "float[1,5,32] y, float[1,5,32] z", body, shapes=shapes)
    with pytest.raises(InternalError, match="several projections"):
        strategy("tensor", "test").partition(g, Board(2))


def test_shares_of_what_is_no_weight_are_our_bug() -> None:
    """What the rules before make is a weight; the strategy does not take that on trust."""
    body = """
    u = calc.Linear<n: int = 1, bias: int = 0, add: int = 0>(x, given)
    a = calc.Activate<act: string = "gelu">(u)
    y = calc.Linear<n: int = 1, bias: int = 0, add: int = 0>(a, w_down)
    """
    inputs = "float[1,5,32] x, float[48,32] given, float[32,48] w_down"
    shapes = {"u": (1, 5, 48), "a": (1, 5, 48), "y": (1, 5, 32)}
    g = graph(inputs, "float[1,5,32] y", body, shapes=shapes)
    with pytest.raises(InternalError, match="given is no weight"):
        strategy("tensor", "test").partition(g, Board(2))


def test_outputs_of_shares_that_overlap_in_part_are_our_bug() -> None:
    g = graph("float[1,5,32] x", "float[1,5,32] y", "y = Neg(x)")
    (node,) = g.model.graph
    out, s = node.outputs[0], tensor._Split(g, 2)
    with pytest.raises(InternalError, match="chip 1 holds a part"):
        tensor._join(s, node, out, [out, out], [(0, 20), (16, 32)], 2)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv", "chips"),
    [(4, 2, 3), (6, 2, 4), (6, 3, 2), (4, 4, 8), (12, 4, 6)],
    ids=["heads", "heads of a group", "half a group", "too few", "a group and a half"],
)
def test_heads_that_do_not_divide(tmp_path: Path, heads: int, kv: int, chips: int) -> None:
    config = transformers.LlamaConfig(**t0(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=heads * 8))
    f = fused(save(config, tmp_path / "m"))
    before = [n.name for g in f.graphs.values() for n in g.model.graph]
    with pytest.raises(UnsupportedError) as e:
        split(f, load_target(on(tmp_path, chips)), "tensor")
    assert set(e.value.codes) == {"PARTITION_HEADS"}
    assert len(e.value.problems) == 4  # both ops of both layers, at once
    assert e.value.problems[0].got == f"{heads} query heads, {kv} KV heads"
    assert "layers.0" in e.value.problems[0].where
    assert before == [n.name for g in f.graphs.values() for n in g.model.graph]


def test_experts_are_not_split(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    model = save(config, tmp_path / "m")
    with pytest.raises(UnsupportedError) as e:
        split(fused(model), load_target(on(tmp_path, 2)), "tensor")
    assert set(e.value.codes) == {"PARTITION_OP"}
    assert len(e.value.problems) == 2
    whole_and_split(model, tmp_path, 2, "layers")


def test_a_strategy_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as e:
        split(fused(GLASS), load_target("calculet-2chip"), "diagonal")
    assert e.value.codes == ("TARGET_SPLIT",)
    assert (e.value.problems[0].where, e.value.problems[0].expected) == ("--split", "layers or tensor")
    text = (Path(on(tmp_path, 2))).read_text().replace('split = "layers"', 'split = "diagonal"')
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(UsageError) as e:
        split(fused(GLASS), load_target(str(tmp_path / "odd.toml")))
    assert e.value.codes == ("TARGET_SPLIT",)
    assert e.value.problems[0].where.endswith(": split")


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 16, 341, 1024])
@pytest.mark.parametrize("chips", [1, 2, 3, 4, 16])
def test_even_shares(n: int, chips: int) -> None:
    bounds = even(n, chips)
    assert bounds[0][0] == 0 and bounds[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (8, 2), (8, 8), (16, 1), (32, 8)])
@pytest.mark.parametrize("chips", [1, 2, 4])
def test_each_chip_has_the_kv_heads_of_its_query_heads(heads: int, kv: int, chips: int) -> None:
    for (a, b), (first, end) in zip(*heads_of(heads, kv, chips), strict=True):
        assert {h // (heads // kv) for h in range(a, b)} == set(range(first, end))


@pytest.mark.parametrize(
    ("size", "chips", "want"),
    [
        ([0, 1, 1, 1, 1, 0], 2, (0, 0, 1, 1)),
        ([2, 1, 1, 1, 1, 0], 2, (0, 1, 1, 1)),
        ([0, 1, 1, 1, 1, 2], 2, (0, 0, 0, 1)),
        ([0, 5, 1, 1, 1, 0], 2, (0, 1, 1, 1)),
        ([0, 1, 1, 0], 4, (0, 1)),
    ],
)
def test_layers_so_that_the_largest_share_is_least(size: Sequence[int], chips: int, want: tuple[int, ...]) -> None:
    assert split_layers(size, chips) == want


def test_structure_nodes_run_on_no_chip(tmp_path: Path) -> None:
    """Slices of states and the joining of outputs only say what belongs where: they become no call."""
    part = split(fused(GLASS), load_target(on(tmp_path, 2)), "tensor")
    for v, g in part.graphs.items():
        structure = [n for n in g.model.graph if STRUCTURE in n.metadata_props]
        assert {n.op_type for n in structure} == {"Slice", "Concat"}
        assert not {n.name for n in structure} & {c.name for c in calls(g)}
        assert isinstance(v, Variant)
