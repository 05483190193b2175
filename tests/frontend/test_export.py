"""`export`: faults that users of other toolchains met, against transformers; the graphs' form; requests refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from conftest import Edit
from frontend_models import Runner, edit_tensors, golden, make, prefill_parity, runner, save_model, stepwise, t0

from calc.core.errors import InternalError, ModelError, UnsupportedError, UsageError
from calc.core.tensors import FileTensor, ShapeOnlyTensor
from calc.core.variant import Variant
from calc.frontend import export as export_module
from calc.frontend import spec as spec_module
from calc.frontend.checkpoint import SINGLE
from calc.frontend.export import export
from calc.frontend.files import owned_root

GATE = 2e-4
PREFILL, DECODE = Variant("prefill", 1, 16), Variant("decode", 1, 1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def count(graph: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in graph.graph)


def tokens(n: int, seed: int = 3) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 64, n)]


def test_field_02_03_kv_has_the_kv_heads_and_the_resolved_head_dim(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**t0(head_dim=16, num_key_value_heads=1))
    run = runner(save_model(config, tmp_path / "m"))
    shapes = {i.name: i.shape for i in run.sessions[PREFILL].get_inputs()}
    assert shapes["past_kv.0.key"] == shapes["past_kv.1.value"] == [1, 1, 48 + 16, 16]
    assert max(stepwise(run, tokens(14), 12)) <= GATE


def test_field_11_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = save_model(transformers.LlamaConfig(**t0(tie_word_embeddings=True)), tmp_path / "m")
    exported = export(model, [DECODE], 16)
    graph = exported.graphs[DECODE].graph
    assert exported.spec.tied_embeddings
    assert "lm_head.weight" not in graph.initializers
    readers = {node.op_type for node, _ in graph.initializers["model.embed_tokens.weight"].uses()}
    assert readers == {"Gather", "Transpose"}


def test_field_17_bf16_weights_are_read_bit_for_bit(tmp_path: Path) -> None:
    model = save_model(transformers.LlamaConfig(**t0()), tmp_path / "m", dtype=torch.bfloat16)
    exported = export(model, [PREFILL], 48)
    graph = exported.graphs[PREFILL]
    want = make(transformers.LlamaConfig(**t0()), dtype=torch.bfloat16).state_dict()
    assert exported.weights.keys() - want.keys() == {"rope.0.cos", "rope.0.sin"}
    for name, tensor in want.items():
        ref, value = exported.weights[name], graph.graph.initializers[name]
        assert isinstance(ref, FileTensor)
        assert (ref.dtype, value.dtype) == ("bf16", ir.DataType.BFLOAT16)
        assert {node.op_type for node, _ in value.uses()} == {"Cast"}
        assert np.array_equal(ref.read().view(np.uint16), tensor.view(torch.uint16).numpy())
        assert value.const_value is not None
        assert np.array_equal(value.const_value.numpy().view(np.uint16), tensor.view(torch.uint16).numpy())
    run = Runner(exported, tmp_path / "out")
    sequence = tokens(12)
    assert run.check([golden(model, sequence)], run.step(PREFILL, [sequence])) <= GATE


@pytest.mark.parametrize(
    "config",
    [
        transformers.PhiConfig(
            **t0(
                num_key_value_heads=4,
                rope_parameters={**LLAMA3, "rope_type": "default", "partial_rotary_factor": 0.5},
                head_dim=...,
            )
        ),
        transformers.Glm4Config(
            **t0(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
        ),
    ],
    ids=["halves", "neighbours"],
)
def test_field_23_partial_rotary_pairs_the_right_elements(
    tmp_path: Path, config: transformers.PreTrainedConfig
) -> None:
    model = save_model(config, tmp_path / "m")
    exported = export(model, [PREFILL], 48)
    assert count(exported.graphs[PREFILL], "RotaryEmbedding") == 4
    assert prefill_parity(model, exported) <= GATE


def test_field_25_llama3_scaling_at_far_positions(tmp_path: Path) -> None:
    model = save_model(transformers.LlamaConfig(**t0(rope_parameters=LLAMA3)), tmp_path / "m")
    run = runner(model, max_seq_len=64)
    sequence = tokens(62)
    gold = golden(model, sequence)
    worst = [run.check([gold], run.step(PREFILL, [sequence[i : i + 16]])) for i in range(0, 48, 16)]
    worst += [run.check([gold], run.step(DECODE, [[token]])) for token in sequence[48:]]
    assert max(worst) <= GATE
    plain = golden(save_model(transformers.LlamaConfig(**t0()), tmp_path / "plain"), sequence)
    for position, differs in ((0, False), (15, True), (60, True)):
        assert bool(np.abs(gold[1][0][position] - plain[1][0][position]).max() > 1e-2) == differs


def test_field_28_window_at_every_decode_step(tmp_path: Path) -> None:
    run = runner(save_model(transformers.MistralConfig(**t0(sliding_window=8)), tmp_path / "m"))
    assert [layer.window for layer in run.exported.spec.layers] == [8, 8]
    assert max(stepwise(run, tokens(11), 6)) <= GATE


def test_field_30_prefill_longer_than_the_window_in_mixed_layers(tmp_path: Path) -> None:
    mixed = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **t0(sliding_window=8, query_pre_attn_scalar=8, layer_types=mixed, rope_parameters=...)
    )
    run = runner(save_model(config, tmp_path / "m"))
    attention = [n for n in run.exported.graphs[PREFILL].graph if n.op_type == "Attention"]
    assert [n.attributes["left_window_size"].as_int() for n in attention] == [7, -1]
    tables = {name for name in run.exported.weights if name.startswith("rope.")}
    assert tables == {"rope.0.cos", "rope.0.sin", "rope.1.cos", "rope.1.sin"}
    assert max(stepwise(run, tokens(15), 13)) <= GATE


@pytest.mark.parametrize("norm", [True, False])
def test_field_34_norm_topk_prob(tmp_path: Path, norm: bool) -> None:
    config = transformers.Qwen3MoeConfig(
        **t0(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=norm)
    )
    model = save_model(config, tmp_path / "m")
    exported = export(model, [PREFILL], 16)
    assert (exported.spec.norm_topk_prob, exported.spec.experts, exported.spec.experts_per_token) == (norm, 4, 2)
    assert exported.spec.moe_intermediate == 24
    assert prefill_parity(model, exported) <= GATE


def test_field_35_shared_expert_and_unequal_gates(tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        **t0(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            head_dim=...,
        )
    )
    model = save_model(config, tmp_path / "m")
    assert prefill_parity(model, export(model, [PREFILL], 48)) <= GATE


def test_field_37_biases_count(tmp_path: Path) -> None:
    model = save_model(transformers.Qwen2Config(**t0(head_dim=...)), tmp_path / "m")
    exported = export(model, [PREFILL], 48)
    biases = [name for name in exported.weights if name.endswith("_proj.bias")]
    assert len(biases) == 6
    assert all(np.abs(exported.weights[name].read()).max() > 0.01 for name in biases)
    assert prefill_parity(model, exported) <= GATE


def test_field_38_silent_config_takes_the_tensors_word(tmp_path: Path, edit: Edit) -> None:
    model = save_model(transformers.LlamaConfig(**t0(attention_bias=True)), tmp_path / "m")
    run_config = model / "config.json"
    gold = golden(model, tokens(12))
    edit(model, attention_bias=...)
    said: list[str] = []
    exported = export(model, [PREFILL], 48, progress=said.append)
    assert any("attention_bias" in line for line in said)
    assert run_config.exists()
    run = Runner(exported, tmp_path / "out")
    assert run.check([gold], run.step(PREFILL, [tokens(12)])) <= GATE


def test_merged_experts_in_the_checkpoint_are_sliced(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    model = save_model(config, tmp_path / "m", dtype=torch.float16)
    state = make(config, dtype=torch.float16).state_dict()
    edit_tensors(model / SINGLE, lambda t: (t.clear(), t.update(state)))
    exported = export(model, [PREFILL], 48)
    graph = exported.graphs[PREFILL]
    assert count(graph, "Slice") == 4
    assert exported.weights["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 96, 32)
    assert prefill_parity(model, exported) <= GATE


def test_experts_are_referred_to_one_by_one(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    exported = export(save_model(config, tmp_path / "m", dtype=torch.bfloat16), [DECODE], 16)
    graph = exported.graphs[DECODE]
    experts = [n for n in exported.weights if ".experts." in n]
    assert len(experts) == 2 * 4 * 3
    assert all(exported.weights[n].sources == (n,) for n in experts)
    nodes = [n for n in graph.graph if n.op_type == "Experts"]
    assert [(n.domain, n.attributes["activation"].as_string()) for n in nodes] == [("calc", "silu")] * 2
    assert [[d.shape[i] for i in range(3)] for d in nodes[0].inputs[3:] if d and d.shape] == [
        [4, 48, 32],
        [4, 48, 32],
        [4, 32, 48],
    ]
    assert [f.name for f in graph.functions.values()] == ["Experts"]


def test_a_config_alone_gives_the_same_graph(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**t0(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24))
    model = save_model(config, tmp_path / "m")
    full = export(model, [DECODE], 16)
    (model / SINGLE).unlink()
    bare = export(model, [DECODE], 16)
    assert bare.weights.keys() == full.weights.keys()
    for name, ref in bare.weights.items():
        assert (ref.shape, ref.dtype) == (full.weights[name].shape, full.weights[name].dtype)
        assert isinstance(ref, ShapeOnlyTensor) == (not name.startswith("rope."))
    assert [n.name for n in bare.graphs[DECODE].graph] == [n.name for n in full.graphs[DECODE].graph]
    with pytest.raises(InternalError):
        bare.weights["lm_head.weight"].read()


def test_form_of_the_graph(llama: Path) -> None:
    graph = export(llama, [PREFILL], 48).graphs[PREFILL]
    kv = [f"{i}.{part}" for i in range(2) for part in ("key", "value")]
    assert [v.name for v in graph.graph.inputs] == [
        "input_ids",
        "past_kv_cur_seq_len",
        "cur_seq_len",
        *(f"past_kv.{n}" for n in kv),
    ]
    assert [v.name for v in graph.graph.outputs] == ["logits", *(f"kv.{n}" for n in kv)]
    want = {
        "RMSNormalization": 5,
        "RotaryEmbedding": 4,
        "TensorScatter": 4,
        "Attention": 2,
        "MatMul": 15,
        "GatherND": 1,
    }
    assert {op: count(graph, op) for op in want} == want
    assert count(graph, "Cast") == 0
    for node in graph.graph:
        assert all(v.shape is not None and v.dtype is not None for v in node.outputs)
        if node.op_type == "MatMul":
            weight = node.inputs[1]
            assert weight is not None
            transpose = weight.producer()
            assert transpose is not None
            assert transpose.op_type == "Transpose"
    named = {n.name: n for n in graph.graph}
    q_proj = named["model.layers.1.self_attn.q_proj/MatMul"]
    assert dict(q_proj.metadata_props) == {"calc.scope": "model.layers.1.self_attn.q_proj", "calc.layer": "1"}
    head = named["lm_head/MatMul"]
    assert dict(head.metadata_props) == {"calc.scope": "lm_head"}
    assert list((head.inputs[0].shape if head.inputs[0] else None) or ()) == [1, 32]
    attributes = named["model.layers.0.self_attn/Attention"].attributes
    assert attributes["scale"].as_float() == pytest.approx(8**-0.5)
    assert attributes["is_causal"].as_int() == 1


def digest(model_dir: Path, out: Path) -> str:
    run = Runner(export(model_dir, [PREFILL, DECODE], 48), out)
    return hashlib.sha256(
        b"".join((run.directory / f"{n}.onnx").read_bytes() for n in ("prefill", "decode"))
    ).hexdigest()


@pytest.mark.slow
def test_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    model = save_model(config, tmp_path / "m", dtype=torch.bfloat16)
    here = Path(__file__)
    code = (
        "import sys; from pathlib import Path; from test_export import digest; print(digest(*map(Path, sys.argv[1:])))"
    )
    env = {
        **os.environ,
        "PYTHONHASHSEED": "4711",
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[2])]),
    }
    command = [sys.executable, "-W", "ignore", "-c", code, str(model), str(tmp_path / "there")]
    there = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert there.stdout.split()[-1] == digest(model, tmp_path / "here")


@pytest.mark.parametrize(
    ("variants", "length", "code"),
    [
        ([], 16, "USAGE_NO_VARIANT"),
        ([DECODE], 0, "USAGE_LENGTH"),
        ([Variant("decode", 1, 2)], 16, "USAGE_VARIANT"),
        ([Variant("prefill", 0, 2)], 16, "USAGE_VARIANT"),
        ([Variant("prefill", 1, 32)], 16, "USAGE_VARIANT"),
    ],
)
def test_requests_that_make_no_sense(llama: Path, variants: list[Variant], length: int, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(llama, variants, length)
    assert code in caught.value.codes


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(tmp_path: Path, kind: str) -> None:
    extra: dict[str, Any] = {"factor": 2.0}
    if kind == "longrope":
        extra.update(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)
    parameters = {"rope_type": kind, "rope_theta": 1e4, **extra}
    limit = 32 if kind == "longrope" else 128
    config = transformers.LlamaConfig(**t0(rope_parameters=parameters))
    model = save_model(config, tmp_path / "m")
    assert export(model, [DECODE], limit).weights["rope.0.cos"].shape == (limit + 1, 4)
    with pytest.raises(UnsupportedError) as caught:
        export(model, [DECODE], limit + 1)
    assert caught.value.code == "UNSUPPORTED_ROPE_LENGTH"


def test_a_weight_that_no_graph_reads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = export_module.link

    def forgetful(*args: Any) -> Any:
        refs = real(*args)
        del refs["lm_head.weight"]
        return refs

    monkeypatch.setattr(export_module, "link", forgetful)
    with pytest.raises(ModelError) as caught:
        export(llama, [DECODE], 16)
    assert caught.value.codes == ("MODEL_TENSOR_UNUSED",)


def test_a_compile_opens_and_probes_the_model_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec, export and reference work on one opened model, golden vectors included."""
    import calc

    count = {"load": 0, "probe_layers": 0}

    def counted(name: str) -> Any:
        real = getattr(spec_module, name)

        def call(*args: Any) -> Any:
            count[name] += 1
            return real(*args)

        return call

    for name in count:
        monkeypatch.setattr(spec_module, name, counted(name))
    out = llama.parent / "m.calbin"
    calc.compile(llama, out, calc.CompileOptions(prefill=(8,), max_seq_len=32, check_passes=False))
    assert out.exists()
    assert count == {"load": 1, "probe_layers": 1}


def test_silent_layers_are_our_bug(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = spec_module.probe_layers
    monkeypatch.setattr(spec_module, "probe_layers", lambda fake: (real(fake)[0], {}))
    with pytest.raises(InternalError, match="neither cached nor attended"):
        export(llama, [DECODE], 16)


def test_owned_root(tmp_path: Path) -> None:
    assert owned_root(tmp_path / "a" / "snapshots" / "rev") == tmp_path / "a"
