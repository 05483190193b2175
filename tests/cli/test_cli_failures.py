"""Every way to fail: what stderr says and the exit code."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest

from calc.cli.failures import failed
from calc.core.errors import CapacityError, InternalError, Problem, UnsupportedError

from .conftest import damage, fits_schema

TWO = [Problem("A_CODE", "here", "first", "1", "2", "do this", 7), Problem("B_CODE", "there", "second \x1b[31m")]
CASES = [
    (CapacityError(TWO), 6, "A_CODE"),
    (UnsupportedError(TWO), 1, "B_CODE"),
    (InternalError("an invariant"), 70, "INTERNAL"),
    (ValueError("unforeseen"), 70, "INTERNAL"),
    (KeyboardInterrupt(), 130, "INTERRUPTED"),
    (MemoryError(), 6, "OUT_OF_MEMORY"),
    (OSError(errno.ENOSPC, "No space left on device", "out"), 5, "DISK_FULL"),
    (PermissionError(errno.EACCES, "Permission denied", "out"), 5, "DISK_IO"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "HF_MISSING"),
    (ModuleNotFoundError("No module named 'calc.gone'", name="calc.gone"), 70, "INTERNAL"),
]
IDS = [type(e).__name__ + str(i) for i, (e, _, _) in enumerate(CASES)]


@pytest.fixture
def failing(monkeypatch):
    """Make `calc verify` raise."""

    def arrange(error: BaseException) -> None:
        def verify(*args, **kwargs):
            raise error

        monkeypatch.setattr("calc.api.verify", verify)

    return arrange


@pytest.mark.parametrize(("error", "code", "said"), CASES, ids=IDS)
def test_people_read_every_problem(run, failing, error, code, said):
    failing(error)
    result = run("verify", "x.calbin")
    assert (result.exit_code, result.stdout) == (code, "")
    assert f"[{said}]" in result.stderr
    assert "\x1b" not in result.stderr
    assert ("Traceback" in result.stderr) == (code == 70)
    assert ("please report it" in result.stderr) == (code == 70)


@pytest.mark.parametrize(("error", "code", "said"), CASES, ids=IDS)
def test_programs_read_one_object(run, failing, error, code, said):
    failing(error)
    result = run("verify", "x.calbin", "--format", "json")
    assert (result.exit_code, result.stdout) == (code, "")
    body = fits_schema(result.stderr, "error")["error"]
    assert body["exit_code"] == code
    assert said in [p["code"] for p in body["problems"]]


def test_every_problem_is_told_in_full():
    text = failed(CapacityError(TWO)).text()
    assert text.splitlines() == [
        "[A_CODE] here: first",
        "    expected: 1",
        "    got: 2",
        "    hint: do this",
        "    offset: 7",
        "[B_CODE] there: second \\x1b[31m",
    ]


def test_without_package_data_the_version_is_not_guessed(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert "calc not installed" in failed(InternalError("x")).text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize(("verb", "option"), [("inspect", "--html"), ("verify", "--junit")])
def test_a_full_disk_is_5(run, tiny_two_chips, verb, option):
    result = run(verb, tiny_two_chips, option, "/dev/full")
    assert result.exit_code == 5
    assert "[DISK_FULL]" in result.stderr


@pytest.mark.parametrize(
    ("offset", "content", "code", "said"),
    [
        (0, b"ZIP", 3, "CALBIN_MAGIC"),
        (8, b"\x02\0", 4, "CALBIN_VERSION"),
        (-20, b"\xff\xff\xff\xff", 3, "CALBIN_"),
    ],
)
@pytest.mark.parametrize("verb", [["verify"], ["inspect"], ["bench"], ["run", "-p", "a"]], ids=lambda v: v[0])
def test_no_verb_reads_a_bad_file(run, tiny_two_chips, tmp_path, verb, offset, content, code, said):
    at = offset if offset >= 0 else tiny_two_chips.stat().st_size + offset
    bad = damage(tiny_two_chips, tmp_path / "bad.calbin", at, content)
    result = run(verb[0], bad, *verb[1:])
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


def test_a_missing_file_and_a_missing_model_are_3(run):
    assert run("inspect", "/nowhere/x.calbin").exit_code == 3
    result = run("compile", "./no-such-model", "--dry-run")
    assert result.exit_code == 3
    assert "MODEL_DIR_MISSING" in result.stderr


def test_a_reader_that_leaves_ends_the_verb_quietly(tiny_two_chips):
    if not (bash := shutil.which("bash")):
        pytest.skip("needs bash")
    script = (
        f"set -o pipefail; {sys.executable} -m calc inspect {tiny_two_chips} --disassemble prefill_b1_s16 | head -1"
    )
    done = subprocess.run([bash, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 141
    assert done.stderr == ""
    assert done.stdout.startswith("; prefill_b1_s16, chip 0")


@pytest.mark.parametrize("verb", ["verify", "inspect", "bench"])
def test_a_pipe_gets_no_colour_and_no_animation(tiny_two_chips, verb):
    env = {k: v for k, v in os.environ.items() if k != "FORCE_COLOR"} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "calc", verb, str(tiny_two_chips)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0
    assert done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
