"""Every malformed input is refused with its code, in time, and with all that its reader needs to act."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import malformed_file  # noqa: F401 - registers its cases
import malformed_meaning  # noqa: F401 - registers its cases
import pytest
from calbin_tiny import assemble, tiny
from malformed import CASES, Case

from calc.calbin.layout import FORMAT
from calc.calbin.reader import open_calbin
from calc.calbin.report import MAX_PROBLEMS
from calc.calbin.validate import validate
from calc.core.errors import CalcError, FormatError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_malformed(case: Case, tmp_path):
    data = case.damage(tiny(case.chips))
    path = tmp_path / "x.calbin"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(case.kind) as e:
        open_calbin(path, deep=case.deep)
    assert time.process_time() - start < 2
    assert case.code in e.value.codes
    assert len(e.value.problems) <= MAX_PROBLEMS + 1
    for problem in e.value.problems[:MAX_PROBLEMS]:
        assert problem.what and problem.where and problem.hint
        assert problem.offset is not None and 0 <= problem.offset <= len(data)


@pytest.mark.parametrize("case", [c for c in CASES if "claims" in c.name or "deep" in c.name], ids=lambda c: c.name)
def test_memory_is_bounded_by_the_file_not_by_its_claims(case: Case):
    data = case.damage(tiny(case.chips))
    tracemalloc.start()
    with pytest.raises(FormatError):
        validate(memoryview(data), len(data), deep=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000 + 3 * len(data)


def test_every_item_has_a_case():
    numbers = {int(m[0]) for c in CASES if (m := re.match(r"\d\d", c.name))}
    # 41 and 53 are about the path: test_calbin_paths.py.
    assert set(range(1, 57)) - numbers == {41, 53}
    assert len({c.name for c in CASES}) == len(CASES)


def test_every_code_has_a_case_and_is_documented():
    found = set()
    for source in (ROOT / "calc/calbin").rglob("*.py"):
        text = source.read_text()
        found |= set(re.findall(r'"((?:CALBIN|DISK)_[A-Z0-9_]+)"', text))
        found |= {f"CALBIN_MSGPACK_{c}" for c in re.findall(r'\.bad\(\s*"([A-Z0-9]+)"', text)}
    documented = set(re.findall(r"\b(?:CALBIN|DISK)_[A-Z0-9_]+\b", (ROOT / "docs/calbin.md").read_text()))
    assert found == documented
    elsewhere = {
        "CALBIN_NO_SUCH",
        "CALBIN_CLOSED",
        "CALBIN_NOT_FOUND",
        "CALBIN_NOT_A_FILE",
        "CALBIN_CHANGED",
        "CALBIN_MORE",
    }
    elsewhere |= {"CALBIN_UNBOUNDED", "CALBIN_ANONYMOUS"}
    assert {c for c in found if c.startswith("CALBIN")} - elsewhere - {c.code for c in CASES} == set()


def test_many_problems_are_told_together_and_capped():
    parts = tiny()

    def several(m):
        m["submodels"][0]["model_type"] = "encoder"
        m["submodels"][0]["target_chips"] = (1,)
        m["golden"]["prompt"] = 99

    data = assemble(parts, edit=several)
    with pytest.raises(FormatError) as e:
        validate(memoryview(data), len(data), deep=False)
    assert {"CALBIN_ROLE", "CALBIN_CHIP", "CALBIN_GOLDEN"} <= set(e.value.codes)

    def hundreds(m):
        m["golden"]["tokens"] = [10**6] * 500

    data = assemble(parts, edit=hundreds)
    with pytest.raises(FormatError) as e:
        validate(memoryview(data), len(data), deep=False)
    assert len(e.value.problems) == MAX_PROBLEMS + 1 and e.value.codes[-1] == "CALBIN_MORE"


def test_offsets_point_at_the_field():
    parts = tiny()

    def edit(m):
        m["submodels"][1]["outputs"][0]["dtype"] = "quux"

    data = assemble(parts, edit=edit)
    with pytest.raises(CalcError) as e:
        validate(memoryview(data), len(data), deep=False)
    (problem,) = e.value.problems
    assert problem.where == "submodels[1].outputs[0].dtype"
    assert data[problem.offset :].startswith(b"\xa4quux")


def test_a_newer_minor_is_read_without_what_it_added():
    parts = tiny()
    newer = (FORMAT[0], FORMAT[1] + 1)

    def edit(m):
        m["format"] = m["compatibility"]["calbin"] = newer
        m["novelty"] = {"a": 1}
        m["submodels"][1]["inputs"][0]["colour"] = "red"

    data = assemble(parts, edit=edit, version=newer)
    assert validate(memoryview(data), len(data), deep=True).format == newer

    def worse(m):
        edit(m)
        m["submodels"][1]["batch"] = 0

    data = assemble(parts, edit=worse, version=newer)
    with pytest.raises(FormatError) as e:
        validate(memoryview(data), len(data), deep=True)
    assert set(e.value.codes) == {"CALBIN_BATCH"}
