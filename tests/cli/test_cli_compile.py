"""The verbs that read a model. One real compile and one real export; the rest looks at what they made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import calc
from calc.core.options import CompileReport, RungReport

from .conftest import ROOT, fits_schema

MODEL = ROOT / "examples/glassllm-en"
SMALL = ("--prefill", "16", "--max-seq-len", "64")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, CompileReport]:
    """A calbin that the command line compiled, and the report it printed."""
    from click.testing import CliRunner

    from calc.cli.app import cli

    where = tmp_path_factory.mktemp("compile")
    out, graphs = where / "out.calbin", where / "graphs"
    args = ["compile", str(MODEL), "-o", str(out), *SMALL, "--no-golden", "--keep-graphs", str(graphs)]
    result = CliRunner().invoke(cli, [*args, "--quant", "w8a8", "--format", "json"])
    assert result.exit_code == 0, result.output
    fits_schema(result.stdout, "compile")
    return out, CompileReport.model_validate_json(result.stdout)


def test_compile_writes_what_it_says(made):
    out, report = made
    assert report.path == str(out)
    assert report.nbytes == out.stat().st_size
    assert "w8a8" in report.quant
    assert [v.name for v in report.variants] == [s.name for s in calc.open(out).manifest.submodels]
    assert list((out.parent / "graphs").glob("*.onnx"))


def test_a_calbin_without_golden_vectors_cannot_be_verified(run, made):
    result = run("verify", made[0])
    assert result.exit_code == 1
    assert "GOLDEN_MISSING" in result.stderr


def test_compile_tables(run, made, monkeypatch):
    rungs = (
        RungReport(
            name="bf16",
            reference="fused",
            metric="rel_rms",
            logits=0.2,
            kv=0.001,
            gate_logits=0.05,
            gate_kv=0.05,
            ok=False,
        ),
        RungReport(
            name="program",
            reference="bf16",
            metric="rel_rms",
            logits=None,
            kv=None,
            gate_logits=0.02,
            gate_kv=0.02,
            ok=True,
        ),
    )
    asked = {}

    def compile(model, out, options, progress, **more):  # noqa: A001
        asked.update(out=out, options=options, **more)
        return made[1].model_copy(update={"rungs": rungs, "path": None})

    monkeypatch.setattr("calc.api.compile", compile)
    result = run("compile", "m", "--dry-run", "--target", "t", "--jobs", 3, "--batch", "1,4", "--no-check-passes")
    assert result.exit_code == 0
    for text in ("prefill_b1_s16", "decode_b1_s1", "0.2 > 0.05", "FAILED", "by calc verify", "gate 0.02", "dry run"):
        assert text in result.stdout
    options = asked["options"]
    assert (asked["out"], asked["keep_graphs"]) == (None, None)
    assert (options.target, options.jobs, options.batch, options.check_passes) == ("t", 3, (1, 4), False)
    assert options.golden


def test_compile_says_where_the_file_is(run, made, monkeypatch):
    monkeypatch.setattr("calc.api.compile", lambda *a, **k: made[1])
    result = run("compile", "m", "-o", "x.calbin")
    assert result.stdout.rstrip().splitlines()[-1].startswith(f"{made[0]}: ")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--target", "nope"], 2, "TARGET_UNKNOWN"),
        (["--quant", "nope"], 2, "RECIPE_UNKNOWN"),
        (["--batch", "65"], 2, "USAGE_BATCH"),
        (["--max-seq-len", "64", "--prefill", "128"], 6, "BUCKET_TOO_LONG"),
    ],
)
def test_compile_refuses_before_it_works(run, args, code, said):
    result = run("compile", MODEL, "--dry-run", *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


def test_export_then_inventory(run, tmp_path):
    result = run("export", MODEL, "-o", tmp_path / "graphs", *SMALL, "--format", "json")
    assert result.exit_code == 0
    report = fits_schema(result.stdout, "export")
    sizes = {Path(f["path"]).name: f["nbytes"] for f in report["files"]}
    assert sizes == {name: (tmp_path / "graphs" / name).stat().st_size for name in sizes}
    assert {"prefill.onnx", "decode.onnx", "model_spec.json"} <= set(sizes)

    graph = tmp_path / "graphs/prefill.onnx"
    human = run("inventory", graph)
    assert human.exit_code == 0
    assert "every op runs on the NPU" in human.stdout
    assert "calc.Attention" in human.stdout
    assert fits_schema(run("inventory", graph, "--format", "json").stdout, "inventory")["ok"]


def test_export_for_people(run, tmp_path, monkeypatch):
    file = tmp_path / "prefill.onnx"
    file.write_bytes(b"x" * 2048)
    monkeypatch.setattr("calc.api.export", lambda *a, **k: (file,))
    result = run("export", "m", "-o", tmp_path)
    assert str(file) in result.stdout
    assert "2.00 KiB" in result.stdout


def test_inventory_exits_with_1_and_lists_findings(run, monkeypatch):
    from calc.passes.inventory import Finding, GraphInventory, InventoryReport, OpEntry

    findings = tuple(Finding(where=f"layer {i}", reason="no kernel") for i in range(60))
    op = OpEntry(
        op="Conv", domain="", klass="unsupported", count=60, shapes=("1x1", "2x2"), dtypes=("float",),
        macs=9, bytes=9, macs_share=1.0, bytes_share=1.0, findings=findings,
    )  # fmt: skip
    graph = GraphInventory(name="prefill", nodes=60, fused=60, macs=9, bytes=9, ops=(op,))
    report = InventoryReport(model="m", ok=False, graphs=(graph,))
    monkeypatch.setattr("calc.api.inventory", lambda *a, **k: report)
    human = run("inventory", "m.onnx")
    assert human.exit_code == 1
    assert "NOT SUPPORTED" in human.stdout
    assert "layer 39" in human.stdout
    assert "20 more: --format json lists all" in human.stdout
    result = run("inventory", "m.onnx", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == json.loads(report.model_dump_json())
