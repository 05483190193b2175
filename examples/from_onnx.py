"""Compile ONNX graphs that no exporter of ours made.

Builds the prefill and decode graphs of a small random Llama by hand, from standard ops and the semantic names calc
reads, compiles them and checks the simulator's logits against ONNX Runtime on the same graphs. Needs no torch.

    python examples/from_onnx.py [OUT_DIR]
"""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as rt
from onnx import numpy_helper

import calc
from calc.core.spec import LayerSpec, ModelSpec, SpecialTokens, TokenizerSpec

VOCAB, HIDDEN, HEADS, KV, DIM, INTER, LAYERS, CONTEXT, EPS = 96, 64, 4, 2, 16, 112, 2, 48, 1e-5


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> np.ndarray:
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    out = {"embed": matrix(VOCAB, HIDDEN), "head": matrix(VOCAB, HIDDEN), "norm": np.ones(HIDDEN, np.float32)}
    angle = np.outer(np.arange(2 * CONTEXT), 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2)))
    out["rope.0.cos"], out["rope.0.sin"] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    for i in range(LAYERS):
        out[f"{i}.norm1"] = out[f"{i}.norm2"] = np.ones(HIDDEN, np.float32)
        out[f"{i}.q"], out[f"{i}.o"] = matrix(HEADS * DIM, HIDDEN), matrix(HIDDEN, HEADS * DIM)
        out[f"{i}.k"], out[f"{i}.v"] = matrix(KV * DIM, HIDDEN), matrix(KV * DIM, HIDDEN)
        out[f"{i}.gate"], out[f"{i}.up"], out[f"{i}.down"] = (
            matrix(INTER, HIDDEN),
            matrix(INTER, HIDDEN),
            matrix(HIDDEN, INTER),
        )
    return out


def layer(i: int, seq: int) -> str:
    """One decoder layer in ONNX text: hidden states x<i> to x<i+1>."""
    heads = []
    for name, count in (("q", HEADS), ("k", KV), ("v", KV)):
        heads.append(
            f"""{name}w{i} = Transpose<perm=[1,0]>("{i}.{name}") {name}p{i} = MatMul(n{i}, {name}w{i})
            {name}s{i} = Constant<value_ints=[1,{seq},{count},{DIM}]>() {name}r{i} = Reshape({name}p{i}, {name}s{i})
            {name}h{i} = Transpose<perm=[0,2,1,3]>({name}r{i})"""
        )
    return f"""
    n{i} = RMSNormalization<axis=-1, epsilon={EPS}>(x{i}, "{i}.norm1")
    {" ".join(heads)}
    qe{i} = RotaryEmbedding(qh{i}, cos, sin) ke{i} = RotaryEmbedding(kh{i}, cos, sin)
    "kv.{i}.key" = TensorScatter<axis=2>("past_kv.{i}.key", ke{i}, past_kv_cur_seq_len)
    "kv.{i}.value" = TensorScatter<axis=2>("past_kv.{i}.value", vh{i}, past_kv_cur_seq_len)
    a{i} = Attention<is_causal=1, scale={DIM**-0.5}>(qe{i}, "kv.{i}.key", "kv.{i}.value", , , , valid)
    at{i} = Transpose<perm=[0,2,1,3]>(a{i}) as{i} = Constant<value_ints=[1,{seq},{HEADS * DIM}]>()
    af{i} = Reshape(at{i}, as{i})
    ow{i} = Transpose<perm=[1,0]>("{i}.o") op{i} = MatMul(af{i}, ow{i}) m{i} = Add(x{i}, op{i})
    n2{i} = RMSNormalization<axis=-1, epsilon={EPS}>(m{i}, "{i}.norm2")
    gw{i} = Transpose<perm=[1,0]>("{i}.gate") g{i} = MatMul(n2{i}, gw{i}) sg{i} = Sigmoid(g{i}) gs{i} = Mul(g{i}, sg{i})
    uw{i} = Transpose<perm=[1,0]>("{i}.up") u{i} = MatMul(n2{i}, uw{i}) h{i} = Mul(gs{i}, u{i})
    dw{i} = Transpose<perm=[1,0]>("{i}.down") d{i} = MatMul(h{i}, dw{i}) x{i + 1} = Add(m{i}, d{i})"""


def graph(seq: int, w: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The graph for a bucket of `seq` tokens; 1 is decode."""
    rows = CONTEXT + seq
    kv = [f"{i}.{x}" for i in range(LAYERS) for x in ("key", "value")]
    ins = ", ".join(f'float[1,{KV},{rows},{DIM}] "past_kv.{n}"' for n in kv)
    outs = ", ".join(f'float[1,{KV},{rows},{DIM}] "kv.{n}"' for n in kv)
    text = f"""<ir_version: 10, opset_import: ["" : 25]>
    hand_made (int64[1,{seq}] input_ids, int64[1] past_kv_cur_seq_len, int64[1] cur_seq_len, {ins})
        => (float[1,{VOCAB}] logits, {outs}) {{
    one = Constant<value_ints=[1]>() size = Constant<value_ints=[{seq}]>() valid = Add(past_kv_cur_seq_len, size)
    col = Unsqueeze(past_kv_cur_seq_len, one) steps = Constant<value_ints={list(range(seq))}>() pos = Add(col, steps)
    cos = Gather<axis=0>("rope.0.cos", pos) sin = Gather<axis=0>("rope.0.sin", pos)
    x0 = Gather<axis=0>(embed, input_ids) {"".join(layer(i, seq) for i in range(LAYERS))}
    nf = RMSNormalization<axis=-1, epsilon={EPS}>(x{LAYERS}, norm)
    last = Sub(cur_seq_len, one) at = Unsqueeze(last, one) row = GatherND<batch_dims=1>(nf, at)
    hw = Transpose<perm=[1,0]>(head) logits = MatMul(row, hw) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in w.items())
    return onnx.shape_inference.infer_shapes(model)


def spec() -> ModelSpec:
    return ModelSpec(
        name="hand-made",
        family="llama",
        architecture="LlamaForCausalLM",
        layers=(LayerSpec(kv_heads=KV, key_dim=DIM, value_dim=DIM),) * LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=KV,
        head_dim=DIM,
        intermediate=INTER,
        vocab=VOCAB,
        activation="silu",
        rms_eps=EPS,
        rope_parameters='{"rope_theta": 10000.0, "rope_type": "default"}',
        tied_embeddings=False,
        max_position_embeddings=CONTEXT,
        torch_dtype="float32",
        tokens=SpecialTokens(eos=(0,)),
        tokenizer=TokenizerSpec(kind="none"),
    )


def main(out: Path) -> float:
    """Compile, run and compare; returns the largest difference relative to the largest logit."""
    out.mkdir(parents=True, exist_ok=True)
    w = weights()
    for name, seq in (("prefill", 16), ("decode", 1)):
        onnx.save(graph(seq, w), out / f"{name}.onnx")
    (out / "model_spec.json").write_text(spec().model_dump_json())
    report = calc.compile_graphs(
        [out / "prefill.onnx"], [out / "decode.onnx"], out / "model_spec.json", out / "hand.calbin"
    )
    print(f"{report.path}: {report.nbytes} bytes, {report.variants[1].tokens_per_second:.0f} token/s predicted")
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 11)]
    with calc.open(out / "hand.calbin") as calbin:
        got = calc.Session(calbin).device.prefill(prompt)
    ids = np.zeros((1, 16), np.int64)
    ids[0, : len(prompt)] = prompt
    options = rt.SessionOptions()
    options.log_severity_level = 3  # KV buffers that are fed from numpy are copied, and each copy is warned of
    session = rt.InferenceSession(str(out / "prefill.onnx"), options)
    feeds = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs() if i.name.startswith("past_kv.")}
    lengths = {"past_kv_cur_seq_len": np.array([0]), "cur_seq_len": np.array([len(prompt)])}
    want = session.run(["logits"], {"input_ids": ids, **lengths, **feeds})[0][0]
    error = float(np.abs(got - want).max() / np.abs(want).max())
    print(f"simulator against ONNX Runtime fp32: largest difference {error:.1e} of the largest logit")
    return error


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/from_onnx"))
