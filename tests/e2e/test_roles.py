"""Artefacts of one role: made, verified strictly, run and timed; and what they cannot do says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import calc
from calc.calbin.reader import open_calbin
from calc.cli.app import cli
from calc.core.errors import RuntimeFault, UsageError
from calc.sim.runtime import Device
from tests.conftest import GLASS, compiled

WORDS = "Alice was beginning to get very tired"


@pytest.fixture(scope="module")
def prefill_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tiny-prefill.calbin", prefill=(16, 32), batch=(), max_seq_len=64)


@pytest.fixture(scope="module")
def decode_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tiny-decode.calbin", prefill=(), batch=(1, 4), max_seq_len=64)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], prog_name="calc")


def names_of_passed(path: Path) -> set[str]:
    report = calc.verify(path, strict=True)
    assert [c for c in report.checks if not c.ok] == []
    return {c.name for c in report.checks}


def test_prefill_only_verifies(prefill_only: Path) -> None:
    names = names_of_passed(prefill_only)
    assert {f"prompt of {n} (bucket {b})" for b in (16, 32) for n in (b - 1, b, b + 1)} <= names
    assert {"rung program: KV", "chunked equals whole prefill: KV", "strict equals fast, bit for bit"} <= names
    assert not [n for n in names if n.startswith(("decode", "batch"))]


def test_decode_only_verifies(decode_only: Path) -> None:
    names = names_of_passed(decode_only)
    assert {"rung program: logits", "batch 4 equals batch 1, slot by slot", "strict equals fast, bit for bit"} <= names
    assert not [n for n in names if "prefill" in n or "bucket" in n]


def test_each_gives_what_both_roles_give(prefill_only: Path, decode_only: Path, tiny_calbin: Path) -> None:
    """Logits of a prompt and of what follows it, whichever roles there are: the order of sums differs at most."""
    ids = [int(t) for t in np.random.default_rng(3).integers(3, 1000, 20)]
    found = {}
    for path in (tiny_calbin, prefill_only, decode_only):
        with open_calbin(path) as c:
            device = Device(c, "strict")
            logits = [device.prefill(ids)]
            for past in range(20, 24):
                token = int(np.argmax(found["tiny-1chip.calbin"][past - 20])) if found else int(np.argmax(logits[-1]))
                logits.append(
                    device.decode([token], [past], [0])[0]
                    if device.decode_batches
                    else device.prefill([token], past=past)
                )
            found[path.name] = np.stack(logits)
    want = found["tiny-1chip.calbin"]
    for got in found.values():
        assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) < 2e-3


def test_a_session_without_decode_gives_the_same_text(prefill_only: Path, tiny_calbin: Path) -> None:
    """Each token after the prompt goes through the smallest bucket, and costs what it costs."""
    with calc.open(prefill_only) as c, calc.open(tiny_calbin) as whole:
        got, want = (calc.Session(x).generate(WORDS, max_new_tokens=8) for x in (c, whole))
    assert (got.tokens, got.text) == (want.tokens, want.text)
    assert got.ttft == want.ttft
    assert got.tpot > 0


def test_a_session_without_prefill_gives_the_same_text(decode_only: Path, tiny_calbin: Path) -> None:
    with calc.open(decode_only) as c, calc.open(tiny_calbin) as whole:
        got, want = (calc.Session(x).generate(WORDS, max_new_tokens=8) for x in (c, whole))
    assert (got.tokens, got.text) == (want.tokens, want.text)
    assert got.ttft > want.ttft  # token by token


def test_bench(prefill_only: Path, decode_only: Path, tiny_calbin: Path) -> None:
    with calc.open(tiny_calbin) as c:
        both = {r.prompt: r for r in calc.bench(c, (1, 16, 40), (8,)).rows if r.batch == 1}
    with calc.open(prefill_only) as c:
        rows = calc.bench(c, (1, 16, 40), (8,)).rows
    assert [(r.ttft, r.prefill_macs, r.chunks) for r in rows] == [
        (r.ttft, r.prefill_macs, r.chunks) for r in both.values()
    ]
    assert all(r.tpot > 0 and r.decode_macs > 0 for r in rows)
    with calc.open(decode_only) as c:
        rows = [r for r in calc.bench(c, (1, 16, 40), (8,)).rows if r.batch == 1]
    assert [(r.tpot, r.decode_macs) for r in rows] == [(r.tpot, r.decode_macs) for r in both.values()]
    assert [r.chunks for r in rows] == [1, 16, 40]


def test_the_command_line(prefill_only: Path, decode_only: Path) -> None:
    """Each verb ends with a result or an error of one line and its hint; none with a traceback."""
    for path in (prefill_only, decode_only):
        assert run("verify", path).exit_code == 0
        assert run("inspect", path).exit_code == 0
        done = run("bench", path, "--format", "json", "--prompts", "16", "--outputs", "8")
        assert (done.exit_code, json.loads(done.stdout)["rows"][0]["prompt"]) == (0, 16)
        assert run("bench", path, "--prompts", "16", "--outputs", "8").exit_code == 0
        assert run("run", path, "-p", WORDS, "--max-new-tokens", "3").exit_code == 0


def test_no_role_at_all() -> None:
    with pytest.raises(UsageError) as e:
        calc.compile(GLASS, None, calc.CompileOptions(prefill=(), batch=()))
    assert e.value.codes == ("USAGE_NO_ROLE",)


def test_a_device_without_either_role(prefill_only: Path) -> None:
    """An artefact of another role than these two, as a host would see it."""
    with open_calbin(prefill_only) as c:
        c.manifest = c.manifest.model_copy(update={"submodels": ()})
        with pytest.raises(RuntimeFault) as e:
            Device(c).prefill([5, 6])
    assert e.value.codes == ("NO_SUCH_SUBMODEL",)
