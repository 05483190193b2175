"""The seams one by one: operators against formulas, probes against modules, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from conftest import Edit
from frontend_models import save_model, t0
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter

from calc.core.errors import InternalError, ModelError, UnsupportedError
from calc.core.variant import Variant
from calc.frontend import build, functions, link, mapping, ops
from calc.frontend import export as export_module
from calc.frontend.attention import AttentionSeam
from calc.frontend.checkpoint import SINGLE
from calc.frontend.experts import activation_name
from calc.frontend.export import export
from calc.frontend.loaded import load
from calc.frontend.norms import patched_norms
from calc.frontend.rope import RopeSeam, patched_rope
from calc.frontend.spec import load_spec

DECODE = Variant("decode", 1, 1)


def test_field_32_softcap_beyond_the_cap() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator) * 6 for _ in range(3))
    cap = 2.0
    scores = q @ k.transpose(2, 3)
    assert scores.abs().max() > 2 * cap
    capped = cap * torch.tanh(scores / cap)
    causal = torch.ones(5, 5).tril().bool()
    want = capped.masked_fill(~causal, -math.inf).softmax(-1) @ v
    length = torch.tensor([5])
    assert torch.allclose(ops.attention(q, k, v, length, 1.0, cap, 0), want, atol=1e-6)
    node = oh.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=1, scale=1.0, softcap=cap)
    real, index = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    inputs = [oh.make_tensor_value_info(n, real, [1, 2, 5, 8]) for n in "qkv"]
    graph = oh.make_graph(
        [node],
        "g",
        [*inputs, oh.make_tensor_value_info("n", index, [1])],
        [oh.make_tensor_value_info("y", real, [1, 2, 5, 8])],
    )
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", ops.OPSET)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), "n": length.numpy()}
    (got,) = session.run(None, feed)
    assert np.abs(np.asarray(got) - want.numpy()).max() < 1e-5


def test_attention_window_groups_and_lengths() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 3, 8, generator=generator)
    k, v = (torch.randn(2, 2, 12, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([5, 9])
    got = ops.attention(q, k, v, lengths, 0.5, 0.0, 4)
    for b, n in enumerate(lengths.tolist()):
        for h in range(4):
            for i in range(3):
                at = n - 3 + i
                seen = range(max(0, at - 3), at + 1)
                p = torch.tensor([float(q[b, h, i] @ k[b, h // 2, j]) * 0.5 for j in seen]).softmax(0)
                want = sum(w * v[b, h // 2, j] for w, j in zip(p, seen, strict=True))
                assert torch.allclose(got[b, h, i], torch.as_tensor(want), atol=1e-5)


def test_kv_write_and_last_row() -> None:
    out = ops.kv_write(torch.zeros(2, 1, 6, 1), torch.ones(2, 1, 2, 1), torch.tensor([0, 3]))
    assert out[:, 0, :, 0].tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
    rows = ops.last_row(torch.arange(12.0).reshape(2, 3, 2), torch.tensor([1, 3]))
    assert rows.tolist() == [[0, 1], [10, 11]]


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_experts_function_is_what_the_operator_computes(activation: str) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, gate_up, down = (torch.randn(s, generator=generator) for s in ((5, 8), (4, 12, 8), (4, 8, 6)))
    ids = torch.tensor([[0, 1], [3, 2], [1, 1], [2, 0], [3, 3]])
    weights = torch.rand(5, 2, generator=generator)
    want = ops.experts(hidden, ids, weights, gate_up, down, activation)
    names = ("hidden", "ids", "weights", "gate", "up", "down")
    arrays = [t.numpy() for t in (hidden, ids, weights, gate_up[:, :6], gate_up[:, 6:], down)]
    node = oh.make_node("Experts", names, ["out"], domain="calc", activation=activation)
    kinds = [oh.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    inputs = [oh.make_tensor_value_info(n, k, a.shape) for n, k, a in zip(names, kinds, arrays, strict=True)]
    graph = oh.make_graph([node], "g", inputs, [oh.make_tensor_value_info("out", kinds[0], [5, 8])])
    function = ir.serde.serialize_function(functions.experts_function(activation))
    opsets = [oh.make_opsetid("", ops.OPSET), oh.make_opsetid("calc", 1)]
    model = oh.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, dict(zip(names, arrays, strict=True)))
    assert np.abs(np.asarray(got) - want.numpy()).max() < 1e-5


def test_experts_function_of_an_unknown_activation() -> None:
    with pytest.raises(InternalError, match="no body"):
        functions.experts_function("cubic")


def test_activation_names() -> None:
    assert activation_name(nn.SiLU()) == "silu"
    assert activation_name(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert activation_name(nn.GELU()) == "gelu"
    assert activation_name(nn.ReLU()) is None


class Plus(nn.Module):
    """Looks like an RMSNorm, adds where it would multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Needy(Plus):
    """Looks like an RMSNorm, wants a second input."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * gate


def test_norms_are_recognised_by_what_they_compute() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.ModuleList([LlamaRMSNorm(8), Gemma3RMSNorm(8), Plus(), Needy(), nn.LayerNorm(8)])
    x = torch.randn(2, 8)
    want = [model[i](x) for i in (0, 1)]
    with patched_norms(model):
        assert ["forward" in vars(m) for m in model] == [True, True, False, False, False]
        assert all(torch.allclose(model[i](x), w, atol=1e-6) for i, w in enumerate(want))
    assert not any("forward" in vars(m) for m in model)


def test_unknown_rotations_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.llama.modeling_llama as llama_code

    model = build.empty_model(transformers.LlamaConfig(**t0()))

    def scaled(q: Any, k: Any, cos: Any, sin: Any, *_: Any) -> tuple[Any, Any]:
        return q * 2, k * 2

    monkeypatch.setattr(llama_code, "apply_rotary_pos_emb", scaled)
    seam = RopeSeam()
    with patched_rope(model, seam, 4, 4):
        assert llama_code.apply_rotary_pos_emb is scaled
        assert "forward" not in vars(model.model.rotary_emb)
    assert len(seam.tables) == 0


def test_decomposed_rotation_still_computes_the_same(tmp_path: Path) -> None:
    from frontend_models import prefill_parity

    config = transformers.DeepseekV3Config(
        **t0(
            num_key_value_heads=4,
            head_dim=...,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        )
    )
    model = save_model(config, tmp_path / "m")
    variant = Variant("prefill", 1, 8)
    exported = export(model, [variant], 16)
    assert not any(n.op_type == "RotaryEmbedding" for n in exported.graphs[variant].graph)
    assert prefill_parity(model, exported) <= 2e-4


def attend(seam: AttentionSeam, **changes: Any) -> None:
    module = nn.Module()
    for key, value in {"layer_idx": 0, "is_causal": True, **changes.pop("module", {})}.items():
        setattr(module, key, value)
    q = torch.zeros(1, 1, 1, 4)
    seam(module, q, q, q, changes.pop("mask", None), **changes)


def test_attention_that_is_refused() -> None:
    seam = AttentionSeam(kv_len=torch.tensor([1]))
    attend(seam)
    assert seam.facts[0].scale == 0.5
    cases: list[tuple[str, dict[str, Any]]] = [
        ("attention sinks", {"s_aux": torch.zeros(1)}),
        ("not causal", {"module": {"is_causal": False}}),
        ("mask", {"mask": torch.zeros(1)}),
    ]
    for word, changes in cases:
        with pytest.raises(UnsupportedError, match=word) as caught:
            attend(seam, **changes)
        assert caught.value.code == "UNSUPPORTED_ATTENTION"
    with pytest.raises(InternalError, match="outside of a trace"):
        attend(AttentionSeam())


def test_experts_that_are_refused(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**t0(num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE))
    config.save_pretrained(tmp_path / "m")
    with pytest.raises(UnsupportedError) as caught:
        load_spec(tmp_path / "m")
    assert set(caught.value.codes) == {"UNSUPPORTED_EXPERTS"}
    assert {p.what for p in caught.value.problems} >= {"the experts have biases", "the experts have transposed weights"}


ROPE = {"rope_type": "default", "rope_theta": 1e4}


def test_a_forward_that_cannot_be_expressed(tmp_path: Path) -> None:
    config = transformers.DeepseekV2Config(
        **t0(
            num_key_value_heads=4,
            head_dim=...,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
            n_routed_experts=4,
        )
    )
    config.save_pretrained(tmp_path / "m")
    with pytest.raises(UnsupportedError) as caught:
        export(tmp_path / "m", [DECODE], 16)
    assert caught.value.code == "UNSUPPORTED_GRAPH"


def test_conversions_that_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "self_attn.q_proj.weight"
    rules = [WeightConverter(name, name, operations=[Transpose(0, 1)])]
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda *_, **__: rules)
    with pytest.raises(UnsupportedError) as caught:
        load_spec(llama)
    assert caught.value.codes == ("UNSUPPORTED_CONVERSION",) * 2


def test_buffers_without_data_are_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.empty_model

    def meta(config: transformers.PreTrainedConfig) -> Any:
        model = real(config)
        model.register_buffer("lost", torch.empty(1, device="meta"))
        return model

    monkeypatch.setattr(build, "empty_model", meta)
    with pytest.raises(InternalError, match="lost"):
        build.fake_model(transformers.LlamaConfig(**t0()))


def test_wiring_faults_are_our_bugs(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(llama, [DECODE], 16)
    graph = exported.graphs[DECODE]
    refs = {k: v for k, v in exported.weights.items() if k != "rope.0.cos"}
    node = next(iter(graph.graph))
    shape, node.outputs[0].shape = node.outputs[0].shape, None
    with pytest.raises(InternalError, match="static shape"):
        export_module._check_complete(load(llama), graph, exported.weights)
    node.outputs[0].shape = shape
    graph.graph.initializers["rope.0.cos"].const_value = None
    with pytest.raises(InternalError, match=r"rope\.0\.cos"):
        export_module._check_complete(load(llama), graph, refs)
    config = transformers.MixtralConfig(**t0(num_local_experts=2, num_experts_per_tok=1))
    model = save_model(config, tmp_path / "moe")
    names = iter(("silu", "gelu"))
    experts = link.Linker.experts
    monkeypatch.setattr(link.Linker, "experts", lambda self, node: (experts(self, node), next(names))[1])
    with pytest.raises(InternalError, match="several activations"):
        export(model, [DECODE], 16)
    monkeypatch.undo()
    real = link.Linker._projections
    monkeypatch.setattr(
        link.Linker, "_projections", lambda self, merged, count, node: real(self, merged, 3 - count, node)
    )
    with pytest.raises(InternalError, match="projections"):
        export(model, [DECODE], 16)


def test_the_same_tensor_twice_in_the_config_only_case(llama: Path, edit: Edit) -> None:
    edit(llama, tie_word_embeddings=True)
    (llama / SINGLE).unlink()
    weights = export(llama, [DECODE], 16).weights
    assert "lm_head.weight" not in weights
    edit(llama, num_attention_heads=3)
    with pytest.raises(ModelError):
        load_spec(llama)
