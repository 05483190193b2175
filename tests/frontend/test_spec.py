"""`load_spec`: what is read, and which contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Edit
from frontend_models import edit_tensors, save_model, t0
from safetensors.torch import save_file

from calc.core.errors import ModelError, UnsupportedError
from calc.frontend.checkpoint import SINGLE, Checkpoint
from calc.frontend.spec import load_spec

MODEL = "model.layers.0.self_attn"


def refusal(model_dir: Path, kind: type[ModelError] | type[UnsupportedError] = ModelError) -> ModelError:
    with pytest.raises(kind) as caught:
        load_spec(model_dir)
    return caught.value  # type: ignore[return-value]


def only_config(model_dir: Path) -> Path:
    (model_dir / SINGLE).unlink()
    return model_dir


def drop(tensors: dict[str, torch.Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


def test_everything_is_read(llama: Path) -> None:
    spec = load_spec(llama)
    assert (spec.family, spec.architecture, spec.name) == ("llama", "LlamaForCausalLM", "llama")
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (32, 4, 2, 8)
    assert (spec.intermediate, spec.vocab, spec.activation, spec.rms_eps) == (48, 64, "silu", 1e-6)
    assert json.loads(spec.rope_parameters) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert [(layer.kv_heads, layer.key_dim, layer.value_dim, layer.window) for layer in spec.layers] == [
        (2, 8, 8, None)
    ] * 2
    assert (spec.tokenizer.kind, spec.tied_embeddings, spec.torch_dtype) == ("none", False, "float32")
    assert len(spec.source_sha256) == 64
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec


def test_config_alone_is_enough(llama: Path) -> None:
    want = load_spec(llama)
    got = load_spec(only_config(llama))
    assert got.model_copy(update={"source_sha256": want.source_sha256}) == want


def test_windows_are_per_layer(tmp_path: Path) -> None:
    mixed = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **t0(sliding_window=8, query_pre_attn_scalar=8, layer_types=mixed, rope_parameters=...)
    )
    spec = load_spec(save_model(config, tmp_path / "gemma3"))
    assert [layer.window for layer in spec.layers] == [8, None]


def test_missing_directory_and_config(tmp_path: Path, llama: Path) -> None:
    assert refusal(tmp_path / "nowhere").codes == ("MODEL_DIR_MISSING",)
    (llama / "config.json").unlink()
    assert refusal(llama).codes == ("MODEL_CONFIG_MISSING",)
    (llama / "config.json").write_text("{")
    assert refusal(llama).codes == ("MODEL_JSON_DAMAGED",)


def test_field_01_head_dim_is_the_configs(tmp_path: Path, edit: Edit) -> None:
    model = save_model(transformers.LlamaConfig(**t0(head_dim=16)), tmp_path / "m")
    spec = load_spec(model)
    assert (spec.head_dim, spec.layers[0].key_dim) == (16, 16)
    edit(model, head_dim=8)
    assert set(refusal(model).codes) == {"MODEL_SHAPE_MISMATCH"}


def test_field_06_heads_must_divide(llama: Path, edit: Edit) -> None:
    edit(llama, num_attention_heads=6, num_key_value_heads=4)
    assert refusal(llama).codes == ("MODEL_HEADS",)
    edit(llama, num_attention_heads=6, num_key_value_heads=3, head_dim=...)
    assert refusal(llama).codes == ("MODEL_HEADS",)


def test_field_10_false_tie_is_a_conflict(llama: Path, edit: Edit) -> None:
    edit(llama, tie_word_embeddings=True)
    error = refusal(llama)
    assert error.codes == ("MODEL_TIE_CONFLICT",)
    assert "lm_head.weight" in error.problems[0].where


def test_field_10_equal_copies_are_one_weight(llama: Path, edit: Edit) -> None:
    edit(llama, tie_word_embeddings=True)
    edit_tensors(llama / SINGLE, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_spec(llama).tied_embeddings
    edit_tensors(llama / SINGLE, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}))
    assert refusal(llama).codes == ("MODEL_TIE_CONFLICT",)


def test_field_12_missing_head_is_named(llama: Path) -> None:
    edit_tensors(llama / SINGLE, lambda t: drop(t, "lm_head.weight"))
    error = refusal(llama)
    assert [(p.code, p.where) for p in error.problems] == [("MODEL_TENSOR_MISSING", "lm_head.weight")]
    assert "tie_word_embeddings" in error.problems[0].hint


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_field_26_both_spellings_of_the_rope_type(llama: Path, edit: Edit, key: str) -> None:
    edit(llama, rope_parameters=..., rope_theta=10000.0, rope_scaling={key: "linear", "factor": 2.0})
    assert json.loads(load_spec(llama).rope_parameters)["rope_type"] == "linear"


def test_field_26_unknown_and_contradictory_rope_types(llama: Path, edit: Edit) -> None:
    edit(llama, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert refusal(llama).codes == ("MODEL_ROPE_TYPE",)
    edit(llama, rope_parameters={"rope_type": "linear", "type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert refusal(llama).codes == ("MODEL_ROPE_TYPE",)


def test_field_27_theta_is_read_where_it_stands(llama: Path, edit: Edit) -> None:
    edit(llama, rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    assert json.loads(load_spec(llama).rope_parameters)["rope_theta"] == 777.0
    edit(llama, rope_parameters=..., rope_theta=778.0)
    assert json.loads(load_spec(llama).rope_parameters)["rope_theta"] == 778.0


def test_field_27_theta_is_never_a_silent_default(llama: Path, edit: Edit) -> None:
    edit(llama, rope_parameters={"rope_type": "default"})
    error = refusal(llama)
    assert error.codes == ("MODEL_ROPE_THETA",)
    assert "10000.0" in error.problems[0].hint
    edit(llama, rope_parameters=...)
    assert refusal(llama).codes == ("MODEL_ROPE_THETA",)
    edit(llama, rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 6.0})
    assert refusal(llama).codes == ("MODEL_ROPE_THETA",)


@pytest.mark.parametrize("value", [0, float("nan"), -1, float("inf"), "5", True])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_field_33_softcaps_that_are_no_cap(llama: Path, edit: Edit, key: str, value: Any) -> None:
    edit(llama, **{key: value})
    assert refusal(llama).codes == ("MODEL_SOFTCAP",)


def test_field_37_every_tensor_is_consumed(llama: Path) -> None:
    extra = {f"{MODEL}.q_proj.extra": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(llama / SINGLE, lambda t: t.update(extra))
    error = refusal(llama)
    assert [(p.code, p.where) for p in error.problems] == [("MODEL_TENSOR_UNUSED", f"{MODEL}.q_proj.extra")]


def test_field_38_stated_bias_contradicts_the_tensors(tmp_path: Path, edit: Edit) -> None:
    model = save_model(transformers.LlamaConfig(**t0(attention_bias=True)), tmp_path / "m")
    edit(model, attention_bias=False)
    assert set(refusal(model).codes) == {"MODEL_TENSOR_UNUSED"}
    plain = save_model(transformers.LlamaConfig(**t0()), tmp_path / "p")
    edit(plain, attention_bias=True)
    assert set(refusal(plain).codes) == {"MODEL_TENSOR_MISSING"}


def test_field_45_scaled_weights_and_orphan_scales(llama: Path) -> None:
    name = f"{MODEL}.q_proj.weight"
    edit_tensors(llama / SINGLE, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert refusal(llama).codes == ("MODEL_SCALE_MISSING",)
    edit_tensors(llama / SINGLE, lambda t: t.update({f"{name}_scale_inv": torch.ones(1, 1)}))
    error = refusal(llama, UnsupportedError)
    assert error.codes == ("UNSUPPORTED_SCALED_WEIGHT",)
    edit_tensors(llama / SINGLE, lambda t: t.update({f"{MODEL}.z_proj.weight_scale_inv": torch.ones(1, 1)}))
    assert refusal(llama).codes == ("MODEL_ORPHAN_SCALE",)


def test_integers_are_no_weights(llama: Path) -> None:
    edit_tensors(llama / SINGLE, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    assert refusal(llama).codes == ("MODEL_DTYPE_UNSUPPORTED",)


def test_field_49_unicode_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "模型 é" / "tiny model"
    path.parent.mkdir()
    assert load_spec(save_model(transformers.LlamaConfig(**t0()), path)).name == "tiny model"


def test_field_63_each_mismatch_is_listed(llama: Path, edit: Edit) -> None:
    edit(llama, hidden_size=48, intermediate_size=40, vocab_size=60)
    error = refusal(llama)
    assert set(error.codes) == {"MODEL_SHAPE_MISMATCH"}
    assert len(error.problems) == 21
    embed = next(p for p in error.problems if p.where == "model.embed_tokens.weight")
    assert (embed.expected, embed.got) == ("[60, 48]", "[64, 32]")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_field_64_quantized_checkpoints(llama: Path, edit: Edit, method: str) -> None:
    edit(llama, quantization_config={"quant_method": method, "bits": 4})
    error = refusal(llama, UnsupportedError)
    assert error.codes == ("UNSUPPORTED_QUANTIZED_MODEL",)
    assert method in error.problems[0].what
    assert ("group_size" in error.problems[0].hint) == (method != "fp8")


def test_models_that_are_no_decoder(llama: Path, tmp_path: Path, edit: Edit) -> None:
    edit(llama, architectures=["LlamaForSequenceClassification"])
    assert refusal(llama, UnsupportedError).codes == ("UNSUPPORTED_ARCHITECTURE",)
    transformers.T5Config(d_model=8, num_layers=1, vocab_size=8).save_pretrained(tmp_path / "t5")
    assert refusal(tmp_path / "t5", UnsupportedError).codes == ("UNSUPPORTED_ARCHITECTURE",)


def test_unknown_family_and_invalid_config(llama: Path, edit: Edit) -> None:
    edit(llama, model_type="no_such_family")
    assert refusal(llama).codes == ("MODEL_CONFIG_INVALID",)
    edit(llama, auto_map={"AutoConfig": "code.Config"})  # code of the model's own is never run, nor asked about
    assert refusal(llama).codes == ("MODEL_CONFIG_INVALID",)
    edit(llama, auto_map=..., model_type="llama", hidden_size="wide")
    assert refusal(llama).codes == ("MODEL_CONFIG_INVALID",)


def test_incomplete_and_missing_experts(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**t0(num_local_experts=4, num_experts_per_tok=2))
    model = save_model(config, tmp_path / "m")
    stem = next(k for k in _names(model) if k.endswith("experts.3.w1.weight")).removesuffix("w1.weight")
    edit_tensors(model / SINGLE, lambda t: drop(t, f"{stem}w1.weight"))
    assert "MODEL_TENSOR_MISSING" in refusal(model).codes
    edit_tensors(model / SINGLE, lambda t: drop(t, f"{stem}w2.weight", f"{stem}w3.weight"))
    assert {p.expected for p in refusal(model).problems} == {"4 experts"}


def test_two_tensors_for_one_weight(llama: Path) -> None:
    edit_tensors(llama / SINGLE, lambda t: t.update({"norm.weight": torch.ones(32)}))
    assert refusal(llama).codes == ("MODEL_TENSOR_TWICE",)


@pytest.mark.parametrize(
    ("config", "kind", "count"),
    [
        (transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "linear_attention", 2),
        (
            transformers.Llama4TextConfig(
                **t0(layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], rope_parameters=...)
            ),
            "chunked_attention",
            1,
        ),
    ],
)
def test_layers_of_other_kinds_are_all_named(
    tmp_path: Path, config: transformers.PreTrainedConfig, kind: str, count: int
) -> None:
    config.save_pretrained(tmp_path / "m")
    error = refusal(tmp_path / "m", UnsupportedError)
    assert error.codes == ("UNSUPPORTED_LAYER",) * count
    assert error.problems[0].got == kind


def _names(model_dir: Path) -> list[str]:
    return list(Checkpoint.open(model_dir).tensors)


def test_a_single_file_wins_over_an_index(llama: Path) -> None:
    save_file({"x": torch.ones(1)}, llama / "other.safetensors")
    assert load_spec(llama).hidden == 32
