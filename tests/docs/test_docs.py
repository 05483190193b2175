"""The docs say what the code does: generated parts are current, and what pages name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from calc.core.optable import FUNCTIONS, SPECS
from calc.kernels.base import Attrs, Call
from calc.kernels.linear import LinearAttrs
from calc.passes.recipe import assign, load_recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = re.compile(r"<!-- generated: .*?<!-- end: [a-z-]+ -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`((?:calc|docs|examples|scripts|tests|schemas)/[^`\s]*)`")
SIM_CODE = re.compile(r"\bSIM_[A-Z_]+\b")


def written(page: Path) -> str:
    """A page without its generated parts."""
    return GENERATED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def test_generated_parts_are_current():
    done = subprocess.run(
        [sys.executable, "scripts/gen_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_paths_exist(page):
    for path in CODE.findall(page.read_text(encoding="utf-8")):
        if "NAME" in path:
            continue
        parts = [p for p in path.split("/") if "*" not in p]
        assert (ROOT / Path(*parts)).exists(), path


def test_every_opcode_and_function_has_a_meaning():
    rows = [
        line.split(" | ") for line in (DOCS / "isa.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    for op, spec in SPECS.items():
        (row,) = [r for r in rows if r[:2] == [f"| {op}", f"`{spec.name}`"]]
        assert row[-1].removesuffix(" |") == spec.meaning
    for kind, functions in FUNCTIONS.items():
        for fn, function in functions.items():
            (row,) = [r for r in rows if r[:3] == [f"| {kind.__name__}", str(int(fn)), f"`{kind(fn).name}`"]]
            assert row[-1].startswith(function.meaning)
    assert "### Matrix: GEMM" in written(DOCS / "isa.md")


def test_every_fault_of_the_simulator_is_listed():
    raised = set()
    for source in (ROOT / "calc/sim").glob("*.py"):
        raised |= set(re.findall(r'"(SIM_[A-Z_]+)"', source.read_text(encoding="utf-8")))
    table = {line.split("|")[1].strip() for line in written(DOCS / "isa.md").splitlines() if line.startswith("| SIM_")}
    assert table == raised


def test_every_decision_is_listed():
    index = (DOCS / "decisions/README.md").read_text(encoding="utf-8")
    files = sorted(p.name for p in (DOCS / "decisions").glob("0*.md"))
    assert LINK.findall(index) == files
    for name in files:
        text = (DOCS / "decisions" / name).read_text(encoding="utf-8")
        number, title = re.match(r"# (\d+)\. (.+)\n", text).groups()
        assert name.startswith(f"{int(number):04d}-")
        assert f"[{title}]({name})" in index
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences"))


def test_the_example_recipe_gives_what_it_says():
    experts = "model.layers.0.mlp.experts"
    names = {
        "router": "model.layers.0.mlp.gate.weight",
        "gate": f"{experts}.gate_up_proj/gate/Reshape",
        "up": f"{experts}.gate_up_proj/up/Reshape",
        "down": f"{experts}.down_proj/down/Reshape",
    }
    attention = {f"w{i}": f"model.layers.0.self_attn.{p}_proj.weight" for i, p in enumerate("qkvo")}
    calls = [
        Call("Embed", "embed", Attrs(), {"table": "model.embed_tokens.weight"}, (), {}),
        Call("Linear", "attention", LinearAttrs(4, bias=False, add=False), attention, (), {}, 0),
        Call("Moe", "moe", Attrs(), names, (), {}, 0),
        Call("LmHead", "head", Attrs(), {"w": "lm_head.weight"}, (), {}),
    ]
    schemes = assign(load_recipe(str(ROOT / "examples/recipes/qwen3-30b-a3b.toml")), calls)
    assert {n: str(s) for n, s in schemes.items()} == {
        "model.embed_tokens.weight": "bf16",
        **dict.fromkeys(attention.values(), "w8a8"),
        names["router"]: "bf16",
        **{names[n]: "w4a16/64" for n in ("gate", "up", "down")},
        "lm_head.weight": "w8a8",
    }
