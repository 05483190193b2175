"""What each verb that reads a calbin prints."""

from __future__ import annotations

import json
from xml.etree.ElementTree import parse

import pytest

import calc

from .conftest import change_manifest, damage, fits_schema


def loosen(manifest: dict) -> None:
    """Gates that no measurement meets."""
    for rung in manifest["golden"]["rungs"]:
        rung["gate_logits"] = rung["gate_kv"] = 1e-12


@pytest.fixture(scope="module")
def failing(tiny_two_chips, tmp_path_factory):
    return change_manifest(tiny_two_chips, tmp_path_factory.mktemp("gates") / "failing.calbin", loosen)


# -- verify


def test_verify_says_ok(run, tiny_two_chips, tmp_path):
    xml = tmp_path / "report.xml"
    result = run("verify", tiny_two_chips, "--junit", xml)
    assert result.exit_code == 0
    assert "\nok: " in result.stdout
    assert "rung program: logits" in result.stdout
    assert "digests" in result.stderr, "a log is told the stage"
    root = parse(xml).getroot()
    assert (root.get("failures"), root.get("errors")) == ("0", "0")
    assert root.get("tests") == str(len(root.findall(".//testcase")))


def test_verify_json_is_the_report(run, tiny_two_chips):
    result = run("verify", tiny_two_chips, "--format", "json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert fits_schema(result.stdout, "verify")["ok"]


def test_verify_exits_with_1_when_a_check_fails(run, failing, tmp_path):
    xml = tmp_path / "report.xml"
    result = run("verify", failing, "--junit", xml)
    assert result.exit_code == 1
    assert "FAILED: " in result.stdout
    assert " > 1e-12" in result.stdout
    suite = parse(xml).getroot()[0]
    bad = suite.findall("./testcase/failure")
    assert suite.get("failures") == str(len(bad)) != "0"
    assert "value" in (bad[0].text or "")
    assert "gate 1e-12" in (bad[0].text or "")
    assert bad[0].get("message", "").endswith("> 1e-12")


def test_verify_junit_tells_of_a_file_that_cannot_be_verified(run, tiny_two_chips, tmp_path):
    section = next(s for s in calc.open(tiny_two_chips).manifest.sections if s.kind == "weights")
    bad = damage(tiny_two_chips, tmp_path / "bad.calbin", section.offset + 100, b"\x55\xaa\x55")
    xml = tmp_path / "report.xml"
    result = run("verify", bad, "--junit", xml)
    assert result.exit_code == 3
    assert "CALBIN_DIGEST" in result.stderr
    root = parse(xml).getroot()
    assert root.get("errors") == "1"
    assert root.find(".//error").get("type") == "CALBIN_DIGEST"


def test_a_value_that_is_not_finite_is_null_in_json(run, monkeypatch):
    from calc.sim.verify import Check, VerifyReport

    check = Check(name="x", ok=False, metric="rel_rms", value=float("inf"), gate=0.1)
    report = VerifyReport(calbin="c", model="m", mode="strict", ok=False, checks=(check,))
    asked = {}
    monkeypatch.setattr("calc.api.verify", lambda path, **more: asked.update(more) or report)
    result = run("verify", "c", "--strict", "--format", "json")
    assert result.exit_code == 1
    assert asked["strict"] is True
    assert fits_schema(result.stdout, "verify")["checks"][0]["value"] is None


# -- inspect


def test_inspect_summary(run, tiny_two_chips):
    result = run("inspect", tiny_two_chips)
    assert result.exit_code == 0
    m = calc.open(tiny_two_chips).manifest
    for name in (m.model.name, m.target.name, *(s.name for s in m.submodels), *(s.sha256[:16] for s in m.sections)):
        assert name in result.stdout
    assert "Verification ladder" in result.stdout


def test_inspect_json_is_the_manifest(run, tiny_two_chips):
    document = fits_schema(run("inspect", tiny_two_chips, "--format", "json").stdout, "calbin-manifest")
    assert document == json.loads(calc.open(tiny_two_chips).manifest.model_dump_json())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("manifest", ["Provenance", "recipe_sha256", "axis 1 < cur_seq_len", "fuse-linear"]),
        ("memory", ["kv.3.value", "weight_ring", "Largest buffers of decode_b1_s1, chip 1"]),
        ("programs", ["prefill_b1_s32: ", "halt", "gemm"]),
    ],
)
def test_inspect_sections(run, tiny_two_chips, section, said):
    result = run("inspect", tiny_two_chips, "--section", section)
    assert result.exit_code == 0
    assert [s for s in said if s not in result.stdout] == []


def test_inspect_limit(run, tiny_two_chips):
    full, short = (run("inspect", tiny_two_chips, "--section", "memory", *x).stdout for x in ([], ["--limit", 2]))
    assert len(short.splitlines()) < len(full.splitlines()) / 4


def test_inspect_without_golden_vectors(run, tiny_two_chips, monkeypatch):
    artefact = calc.open(tiny_two_chips)
    artefact.manifest = artefact.manifest.model_copy(update={"golden": None})
    monkeypatch.setattr("calc.api.open", lambda path: artefact)
    assert "No golden vectors" in run("inspect", tiny_two_chips).stdout


def test_inspect_disassembles(run, tiny_two_chips):
    both = run("inspect", tiny_two_chips, "--disassemble", "decode_b1_s1").stdout
    one = run("inspect", tiny_two_chips, "--disassemble", "decode_b1_s1:1").stdout
    assert both.endswith(one)
    assert both.startswith("; decode_b1_s1, chip 0: ")
    assert len(run("inspect", tiny_two_chips, "--disassemble", "decode_b1_s1:0", "--limit", 5).stdout.splitlines()) == 5


@pytest.mark.parametrize("which", ["nothing", "decode_b1_s1:7", ":0"])
def test_inspect_refuses_programs_that_are_not_there(run, tiny_two_chips, which):
    result = run("inspect", tiny_two_chips, "--disassemble", which)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "CALBIN_NO_SUCH" in result.stderr


def rename(manifest: dict) -> None:
    manifest["model"]["name"] = "<script>alert(1)</script>\x1b[2Jx"


def test_names_in_a_file_are_not_obeyed(run, tiny_two_chips, tmp_path):
    evil = change_manifest(tiny_two_chips, tmp_path / "evil.calbin", rename)
    page = tmp_path / "page.html"
    result = run("inspect", evil, "--html", page)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Jx" in result.stdout
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_inspect_html_is_one_page_with_maps(run, tiny_two_chips, tmp_path):
    page = tmp_path / "page.html"
    result = run("inspect", tiny_two_chips, "--html", page)
    assert f"wrote {page}" in result.stderr
    text = page.read_text(encoding="utf-8")
    m = calc.open(tiny_two_chips).manifest
    maps = m.target.chips + sum(len(s.chip_map) for s in m.submodels)
    assert text.count("<svg") == text.count("</svg>") == maps
    assert "http" not in text, "the page loads nothing"
    assert all(s.name in text for s in m.submodels)


# -- run


def test_run_streams_the_answer_alone(run, tiny_two_chips):
    result = run("run", tiny_two_chips, "-p", "Alice was", "--max-new-tokens", 8, "--no-chat")
    want = calc.Session(calc.open(tiny_two_chips)).generate("Alice was", max_new_tokens=8)
    assert result.exit_code == 0
    assert result.stdout == want.text + "\n"
    assert result.stderr == ""


def test_run_stats_are_on_stderr(run, tiny_two_chips):
    plain = run("run", tiny_two_chips, "-p", "Alice", "--max-new-tokens", 4)
    result = run("run", tiny_two_chips, "-p", "-", "--max-new-tokens", 4, "--stats", input="Alice")
    assert result.stdout == plain.stdout
    assert "generated 4, finish: length" in result.stderr
    assert "TTFT" in result.stderr
    assert "calculet-2chip, predicted" in result.stderr


def test_run_json_and_sampling(run, tiny_two_chips):
    options = ["--max-new-tokens", 6, "--format", "json", "--temperature", 1.5, "--top-k", 50, "--top-p", 0.9]
    first, same, other = (
        fits_schema(run("run", tiny_two_chips, "--prompt-ids", "5,6,7", *options, "--seed", s).stdout, "run")["tokens"]
        for s in (1, 1, 2)
    )
    assert first == same != other
    assert len(first) == 6


def test_run_strict_equals_fast(run, tiny_two_chips):
    args = ["run", tiny_two_chips, "-p", "Alice", "--max-new-tokens", 3]
    assert run(*args, "--mode", "strict").stdout == run(*args).stdout


def test_run_without_a_tokenizer_prints_ids(run, tiny_two_chips, monkeypatch):
    artefact = calc.open(tiny_two_chips)
    model = artefact.manifest.model
    model = model.model_copy(update={"tokenizer": model.tokenizer.model_copy(update={"kind": "none"})})
    artefact.manifest = artefact.manifest.model_copy(update={"model": model})
    monkeypatch.setattr("calc.api.open", lambda path: artefact)
    result = run("run", tiny_two_chips, "--prompt-ids", "5,6", "--max-new-tokens", 3)
    assert len(result.stdout.split(",")) == 3


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["-p", ""], 3, "PROMPT_EMPTY"),
        (["-p", "word " * 200], 6, "PROMPT_TOO_LONG"),
        (["--prompt-ids", "5,99999"], 3, "TOKEN_RANGE"),
    ],
)
def test_run_refuses(run, tiny_two_chips, args, code, said):
    result = run("run", tiny_two_chips, *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


# -- bench


def test_bench_table_and_json(run, tiny_two_chips):
    args = ["bench", tiny_two_chips, "--prompts", "1,16,100", "--outputs", "8"]
    human = run(*args)
    assert human.exit_code == 0
    assert "TTFT ms" in human.stdout
    assert "skipped: prompt 100 > capacity 64" in human.stdout
    report = fits_schema(run(*args, "--format", "json").stdout, "bench")
    assert {(r["prompt"], r["batch"]) for r in report["rows"]} == {(1, 1), (1, 4), (16, 1), (16, 4)}


def test_bench_fails_when_nothing_fits(run, tiny_two_chips):
    result = run("bench", tiny_two_chips, "--prompts", "5000,6000")
    assert result.exit_code == 6
    assert result.stderr.count("BENCH_NOTHING_FITS") == 2
