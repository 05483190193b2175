"""Help, version, usage errors, and what loading the command line costs."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from calc.cli.app import VERBS, cli
from calc.core.options import CompileOptions

from .conftest import ROOT


def verb(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], check=False, capture_output=True, text=True, cwd=ROOT)


def test_help_lists_the_verbs_in_order(run):
    result = run("--help")
    assert result.exit_code == 0
    at = [result.stdout.index(f"\n  {name} ") for name in VERBS]
    assert at == sorted(at)
    assert "..." not in result.stdout.partition("Commands:")[2], "a verb's short help is cut off"


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_has_an_example_that_parses(run, name):
    text = run(name, "--help").stdout
    lines = text.partition("Example:\n")[2].strip().splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" <")[0])
        assert words[:2] == ["calc", name]
        verb(name).make_context(name, words[2:])


def test_help_is_fast_and_loads_nothing_heavy():
    heavy = ("numpy", "pydantic", "rich", "onnx_ir", "torch", "calc.api")
    load = "import sys, calc.cli.app as a; [a.cli.get_command(None, v) for v in a.VERBS]"
    assert python("-c", f"{load}; print([m for m in {heavy} if m in sys.modules])").stdout.strip() == "[]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python("-m", "calc", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time, which other work on the machine does not lengthen
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_version_and_module_entry(run):
    assert re.fullmatch(r"calc \d+\.\d+\.\d+\n", run("--version").stdout)
    assert python("-m", "calc", "--version").stdout == run("--version").stdout


def test_defaults_are_the_librarys():
    ours = {p.name: p for p in verb("compile").params}
    theirs = CompileOptions()
    assert ours["target"].default == theirs.target
    assert ours["quant"].default == theirs.quant
    assert ours["jobs"].default == theirs.jobs
    assert ours["prefill"].default == ",".join(map(str, theirs.prefill))
    assert ours["batch"].default == ",".join(map(str, theirs.batch))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compile"], "Missing argument"),
        (["nonsense"], "No such command"),
        (["compile", "m"], "give -o OUT.calbin, or --dry-run"),
        (["compile", "m", "--dry-run", "--keep-graphs", "g"], "--dry-run writes nothing"),
        (["compile", "m", "-o", "/nowhere/x.calbin"], "there is no directory '/nowhere'"),
        (["compile", "m", "-o", "/tmp"], "is a directory"),
        (["compile", "m", "--dry-run", "--prefill", "16,x"], "'16,x' is not a list of whole numbers"),
        (["compile", "m", "--dry-run", "--prefill", "0"], "0 is less than 1"),
        (["compile", "m", "--dry-run", "--jobs", "0"], "--jobs"),
        (["verify", "x", "--junit", "/nowhere/x.xml"], "there is no directory '/nowhere'"),
        (["inspect", "x", "--section", "memory", "--disassemble", "p"], "exclude each other"),
        (["inspect", "x", "--section", "memory", "--format", "json"], "whole manifest"),
        (["run", "x"], "give either -p TEXT or --prompt-ids"),
        (["run", "x", "-p", "a", "--prompt-ids", "1"], "give either -p TEXT or --prompt-ids"),
        (["run", "x", "-p", "a", "--top-p", "0"], "--top-p"),
        (["run", "x", "--prompt-ids", "-1"], "-1 is less than 0"),
        (["bench", "x", "--prompts", ""], "'' is not a list of whole numbers"),
    ],
)
def test_usage_errors_exit_with_2(run, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize("name", VERBS)
def test_the_manual_names_every_option(name):
    manual = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    chapter = manual.partition(f"\n## calc {name}\n")[2].partition("\n## calc ")[0]
    missing = [o for p in verb(name).params for o in p.opts if o.startswith("--") and o not in chapter]
    assert chapter
    assert [o for o in missing if o != "--format"] == []


def commands(text: str) -> list[list[str]]:
    """Lines of a script or a job that call calc."""
    lines = [re.sub(r"^[- ]*(run: |step \w+ )?", "", line) for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("calc ")]


@pytest.mark.parametrize("path", sorted((ROOT / "examples/ci").iterdir()), ids=lambda p: p.name)
def test_the_jobs_call_what_exists(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$out").mkdir()
    calls = commands(path.read_text(encoding="utf-8"))
    assert calls
    for name, *args in calls:
        verb(name).make_context(name, [a for a in args if a != "$@"])


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_build_script_stops_with_the_verbs_code_and_reason(tmp_path):
    bin_dir = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    script = ROOT / "examples/ci/build.sh"
    done = subprocess.run(
        ["bash", script, "./no-such-model", tmp_path / "out"], check=False, capture_output=True, text=True, env=env
    )
    assert done.returncode == 3
    assert "inventory: the input cannot be used" in done.stderr
    assert "MODEL_DIR_MISSING" in done.stderr
