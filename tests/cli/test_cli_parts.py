"""Numbers, progress and tables by themselves."""

from __future__ import annotations

import io
import sys

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from calc.cli import main, output
from calc.cli.app import Verbs, _silence_stdout, cli
from calc.cli.progress import Lines, progress
from calc.cli.text import clean, count, duration, gated, ms, rate, size


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1024), "1.00 KiB"),
        (size(3 << 30), "3.00 GiB"),
        (size(1 << 70), "1024.00 EiB"),
        (count(9999), "9999"),
        (count(12_345), "12.3 k"),
        (count(999_400), "999 k"),
        (count(999_999), "1 M"),
        (count(1e22), "10000 E"),
        (ms(0.0123456), "12.346"),
        (ms(1.5), "1500.0"),
        (rate(58.254), "58.25"),
        (rate(184.27), "184.3"),
        (rate(46557.5), "46558"),
        (gated(None, 1, ok=True), "not measured"),
        (gated(0.1, 0.05, ok=False), "0.1 > 0.05"),
        (gated(5.72e-6, 2e-4, ok=True), "5.72e-06 <= 0.0002"),
        (duration(8.2), "8 s"),
        (duration(185), "3 min 05 s"),
        (duration(4320), "1 h 12 min"),
    ],
)
def test_numbers(got, want):
    assert got == want


@given(st.text())
def test_clean_text_has_no_control_characters(text):
    assert clean(text).isprintable()
    assert clean(clean(text)) == clean(text)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_log_gets_a_line_per_stage_and_every_ten_seconds():
    lines, clock = [], Clock()
    tell = Lines(lines.append, clock)
    tell("export: a", 0, 2)
    tell("export: b", 1, 2)
    for step in range(1, 41):
        clock.now += 1
        tell("weights", step * 100, 4000)
    assert [line[12:] for line in lines] == [
        "export: a",
        "weights",
        "weights, 27%, 29 s left",
        "weights, 52%, 19 s left",
        "weights, 77%, 9 s left",
    ]
    assert lines[2].startswith("[   11.0 s] ")


def test_a_stage_of_unknown_length_has_no_time_left():
    lines, clock = [], Clock()
    tell = Lines(lines.append, clock)
    for step in range(3):
        tell("ladder", step, 0)
        clock.now += 11
    assert [line[12:] for line in lines] == ["ladder"] * 3


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_a_terminal_gets_a_live_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress("json") as tell:
        tell("reading [weights]\x1b", 1, 4)
        tell("reading [weights]\x1b", 2, 4)
        tell("thinking", 0, 0)
    text = terminal.getvalue()
    assert "thinking" in text
    assert "left" in text
    assert "\x1b[?25l" in text, "the cursor is hidden"
    assert text.count("\x1b[?25h") == 1, "and shown again"


def test_a_table_for_a_narrow_terminal_wraps_its_last_column_only(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    output.table("", ("name", ">value", "why"), [("n" * 40, "5.72e-06 <= 0.0002", "a reason of several words")])
    text = click.unstyle(terminal.getvalue())
    assert "n" * 40 + "   5.72e-06 <= 0.0002" in text
    assert "words" in text


def test_an_empty_table_is_a_heading():
    with CliRunner().isolation() as (out, *_):
        output.table("Title", ("a", ">b"), [])
        assert out.getvalue().decode().split() == ["Title", "a", "b", "─" * 5]


def test_main_replaces_what_stdout_cannot_encode(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["calc", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert sys.stdout.errors == "replace"


def test_a_stdout_without_a_descriptor_needs_no_silencing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    _silence_stdout()


def test_unknown_verbs_are_none():
    assert isinstance(cli, Verbs)
    assert cli.get_command(click.Context(cli), "failures") is None


def test_click_keeps_its_own_errors(monkeypatch):
    def aborted(*args, **kwargs):
        raise click.Abort

    monkeypatch.setattr("calc.api.verify", aborted)
    assert CliRunner().invoke(cli, ["verify", "x"]).exit_code == 1
