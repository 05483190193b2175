"""A verification as JUnit XML, the form that CI systems show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from calc.cli.text import clean
from calc.core.errors import CalcError

if TYPE_CHECKING:
    from calc.sim.verify import VerifyReport


def suite(report: VerifyReport) -> Element:
    """One testcase per check; a failed check has a `failure` with metric, value and gate."""
    failures = sum(not c.ok for c in report.checks)
    root, tests = _suites(f"calc verify {report.model}", len(report.checks), failures, 0)
    tests.set("time", f"{sum(c.seconds for c in report.checks):.3f}")
    for c in report.checks:
        case = SubElement(tests, "testcase", classname="calc.verify", name=clean(c.name), time=f"{c.seconds:.3f}")
        if not c.ok:
            failure = SubElement(case, "failure", type=c.metric, message=f"{c.metric} {c.value:.6g} > {c.gate:.6g}")
            failure.text = clean(f"metric {c.metric}, value {c.value!r}, gate {c.gate!r}; {c.detail}")
    return root


def error_suite(calbin: str, e: CalcError) -> Element:
    """One testcase with an `error`: the artefact could not be verified at all."""
    root, tests = _suites(f"calc verify {calbin}", 1, 0, 1)
    case = SubElement(tests, "testcase", classname="calc.verify", name="open and verify", time="0.000")
    error = SubElement(case, "error", type=e.code, message=clean(e.problems[0].what))
    error.text = "\n".join(clean(text) for text in str(e).splitlines())
    return root


def write(root: Element, path: Path) -> None:
    """Write the document."""
    indent(root)
    ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suites(name: str, tests: int, failures: int, errors: int) -> tuple[Element, Element]:
    counts = {"tests": str(tests), "failures": str(failures), "errors": str(errors)}
    root = Element("testsuites", counts)
    return root, SubElement(root, "testsuite", {"name": clean(name), **counts})
