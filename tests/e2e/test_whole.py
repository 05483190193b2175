"""The main job on real weights: compile, verify strictly on one chip and on two, run, and make the same bytes again."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import calc
from calc.calbin.reader import open_calbin
from calc.core.isa import CSRS
from calc.sim.runtime import Device
from calc.stages.cost import cost
from calc.stages.golden import golden_tokens
from tests.conftest import GLASS, compiled, shared
from tests.e2e.models import ROOT, upcycled

NEEDED = {
    "digests",
    "rung exported: logits",
    "rung fused: KV",
    "rung bf16: logits",
    "rung program: logits",
    "rung program: KV",
    "program against transformers fp32: logits",
    "decode at t equals prefill row t",
    "chunked equals whole prefill: KV",
    "batch 4 equals batch 1, slot by slot",
    "strict equals fast, bit for bit",
}


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory):
    return shared(tmp_path_factory, "glass-moe", lambda path: upcycled(GLASS, path))


@pytest.fixture(scope="module")
def moe_calbins(tmp_path_factory, moe_model):
    return [
        compiled(
            tmp_path_factory,
            f"moe-{chips}chip.calbin",
            moe_model,
            prefill=(16,),
            batch=(1, 4),
            max_seq_len=64,
            target=f"calculet-{chips}chip",
        )
        for chips in (1, 2)
    ]


def assert_verified(path):
    report = calc.verify(path, strict=True)
    assert [c for c in report.checks if not c.ok] == []
    assert report.ok
    names = {c.name for c in report.checks}
    assert names >= NEEDED
    return report, names


def test_tiny_model_on_one_chip(tiny_calbin):
    _, names = assert_verified(tiny_calbin)
    assert {f"prompt of {n} (bucket {b})" for b in (16, 32) for n in (b - 1, b, b + 1)} <= names


def test_tiny_model_on_two_chips(tiny_two_chips):
    assert_verified(tiny_two_chips)


def test_mixture_of_experts_on_one_chip_and_on_two(moe_calbins):
    for path in moe_calbins:
        assert_verified(path)


def replay(path, mode="fast"):
    with open_calbin(path) as c:
        device = Device(c, mode)
        tokens = c.manifest.golden.tokens
        logits = [device.prefill(tokens[:20])]
        logits += [device.decode([tokens[t]], [t], [0])[0] for t in range(20, 26)]
        layers = range(len(c.manifest.model.layers))
        return np.stack(logits), [x for i in layers for x in device.kv(i, 0, 26)]


def test_two_chips_equal_one_bit_for_bit(tiny_calbin, tiny_two_chips, moe_calbins):
    for one, two in ((tiny_calbin, tiny_two_chips), moe_calbins):
        (a, kv_a), (b, kv_b) = replay(one), replay(two)
        np.testing.assert_array_equal(a, b)
        for x, y in zip(kv_a, kv_b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_against_transformers_itself(tiny_calbin):
    """Not through stored vectors: the simulator's logits and KV against a run of transformers made here."""
    from calc.frontend.reference import reference

    with open_calbin(tiny_calbin) as c:
        spec = c.manifest.model
    tokens = golden_tokens(GLASS, spec, 26)
    ref = reference(GLASS, tokens, list(range(19, 26)))
    got, kv = replay(tiny_calbin)
    np.testing.assert_allclose(got, ref.logits, atol=0.02 * np.abs(ref.logits).max())
    for i in range(len(spec.layers)):
        np.testing.assert_allclose(kv[2 * i], ref.keys[i], atol=0.02 * np.abs(ref.keys[i]).max())
        np.testing.assert_allclose(kv[2 * i + 1], ref.values[i], atol=0.02 * np.abs(ref.values[i]).max())


def test_the_plan_agrees_with_the_artefact(tiny_two_chips):
    """A dry run says the same bytes and cycles as the manifest, and as the clock on the stored program."""
    options = calc.CompileOptions(prefill=(16, 32), batch=(1, 4), max_seq_len=64, target="calculet-2chip")
    plan = calc.compile(GLASS, None, options)
    with open_calbin(tiny_two_chips) as c:
        m = c.manifest
        device = Device(c)
        assert plan.shard_bytes == tuple(s.nbytes for s in m.shards)
        for v, sub in zip(plan.variants, m.submodels, strict=True):
            assert (v.name, v.cycles, v.dram_bytes, v.macs) == (
                sub.name,
                sub.workload.cycles,
                sub.workload.dram_bytes,
                sub.workload.macs,
            )
            assert v.sram_peak == tuple(p.sram_peak for p in sub.chip_map)
            again = device.time(sub.name, [v.seq] * v.batch, [v.past] * v.batch)
            assert (again.cycles, again.dram_bytes, again.link_bytes) == (v.cycles, v.dram_bytes, v.link_bytes)


def test_counted_macs_equal_the_closed_form(tiny_calbin):
    """MACs of a decode step: every weight once, and two products per key and head."""
    with open_calbin(tiny_calbin) as c:
        m = c.manifest.model
        got = Device(c).time("decode_b1_s1", [1], [20]).macs
    h, kv, d, i = m.hidden, m.kv_heads * m.head_dim, m.head_dim, m.intermediate
    layer = h * h * 2 + h * kv * 2 + 3 * h * i + 2 * 21 * m.heads * d
    assert got == len(m.layers) * layer + m.vocab * h


@pytest.mark.slow
def test_same_bytes_whatever_the_surroundings(tmp_path, moe_model):
    """Two compiles: other working directory, hash seed, locale and number of jobs."""
    digests = []
    for seed, jobs, where in (("1", "1", ROOT), ("77", "2", tmp_path)):
        out = tmp_path / f"{seed}.calbin"
        code = (
            "import calc, sys; calc.compile(sys.argv[1], sys.argv[2], "
            f"calc.CompileOptions(prefill=(16,), batch=(1, 4), max_seq_len=48, quant='w4a16', jobs={jobs}))"
        )
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "LC_ALL": "C" if seed == "1" else "C.UTF-8",
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run([sys.executable, "-c", code, str(moe_model), str(out)], check=True, cwd=where, env=env)
        digests.append(out.read_bytes())
    assert digests[0] == digests[1]


def test_session_generates_the_same_tokens_as_transformers(tiny_calbin):
    import torch
    from transformers import AutoModelForCausalLM

    with open_calbin(tiny_calbin) as c:
        session = calc.Session(c)
        pieces: list[str] = []
        got = session.generate("Alice was beginning to", max_new_tokens=12, on_text=pieces.append)
        ids = session.prompt_ids("Alice was beginning to")
    model = AutoModelForCausalLM.from_pretrained(GLASS, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert list(got.tokens) == want.tolist()
    assert "".join(pieces) == got.text
    assert got.ttft > 0
    assert got.tpot > 0


def test_the_base_install_runs_without_torch(tiny_calbin):
    """Opening, verifying and generating import neither torch nor transformers."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'accelerate'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import calc\n"
        "assert calc.verify(sys.argv[1]).ok\n"
        "print(calc.Session(calc.open(sys.argv[1])).generate('Alice was', max_new_tokens=3).text)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_calbin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_csr_names_are_in_the_manifest(tiny_calbin):
    with open_calbin(tiny_calbin) as c:
        assert tuple(x.name for x in c.manifest.csrs) == CSRS


def test_cost_does_not_depend_on_the_surroundings(tiny_calbin):
    with open_calbin(tiny_calbin) as c:
        d = Device(c)
        assert d.time("prefill_b1_s16", [16], [0]).cycles == d.time("prefill_b1_s16", [16], [0]).cycles
        assert d.time("prefill_b1_s16", [8], [0]).macs < d.time("prefill_b1_s16", [16], [0]).macs
    assert cost.__doc__


def test_moe_decode_reads_the_routed_experts_only(moe_calbins):
    """Bytes of a decode step: every weight but the experts that were not chosen (2 of 4 in each layer)."""
    with open_calbin(moe_calbins[0]) as c:
        m = c.manifest
        experts = [w for w in m.weights if w.experts]
        assert len(experts) == 3 * len(m.model.layers)
        unchosen = sum(w.nbytes // w.experts * (w.experts - m.model.experts_per_token) for w in experts)
        tables = sum(w.nbytes for w in m.weights if w.name.startswith("rope."))
        streamed = sum(w.nbytes for w in m.weights) - unchosen - tables
        got = Device(c).time("decode_b1_s1", [1], [0]).dram_bytes
        kv = 2 * 2 * sum(s.heads * s.dim for s in m.states.states)  # one row written, one read
        # beside weights and KV: the token, its embedding row, its RoPE rows and the logits
        rest = got - streamed - kv
        row = 2 * m.model.hidden + 4 + 4 * m.model.head_dim + 4 * m.model.vocab
        assert 0 <= rest - row < 64 * len(m.weights)
