"""Which scheme each weight gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from calc.core.errors import UsageError
from calc.core.schemes import scheme, schemes
from calc.kernels.base import Attrs, Call
from calc.kernels.linear import LinearAttrs
from calc.passes.recipe import assign, bits, load_recipe

NAMES = ("l.0.gate", "l.0.up", "l.0.down", "l.1.gate", "l.1.up", "l.1.down")


def call(op: str, **inputs: str) -> Call:
    attrs = LinearAttrs(1, bias=False, add=False) if op == "Linear" else Attrs()
    return Call(op, op, attrs, inputs, (), {}, 0)


CALLS = [
    call("Embed", ids="ids", table="embed"),
    *(call("Glu", x="x", gate=f"l.{i}.gate", up=f"l.{i}.up") for i in (0, 1)),
    *(call("Linear", x="x", w0=f"l.{i}.down") for i in (0, 1)),
    call("Moe", x="x", router="l.2.router", gate="l.2.e.gate", up="l.2.e.up", down="l.2.e.down"),
    call("LmHead", x="x", cur="cur", w="head"),
]


def assigned(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return {n: str(s) for n, s in assign(load_recipe(str(path)), CALLS).items()}


@pytest.mark.parametrize("name", schemes())
def test_a_scheme_by_name_spares_tables_heads_and_routers(name: str) -> None:
    chosen = assign(load_recipe(name), CALLS)
    assert {chosen[n] for n in ("embed", "head", "l.2.router")} == {scheme("bf16")}
    assert {s for n, s in chosen.items() if n not in ("embed", "head", "l.2.router")} == {scheme(name, 64)}
    assert bits(chosen) == "+".join(sorted({"bf16", name}))


def test_the_last_match_wins(tmp_path: Path) -> None:
    text = """default = "w8a8"
group = 32
[[override]]
match = "l.*"
scheme = "w4a16"
[[override]]
match = "l.1.*"
scheme = "bf16"
[[override]]
match = "*.down"
scheme = "w4a16"
group = 128
[[override]]
match = "head"
scheme = "w8a8"
"""
    chosen = assigned(tmp_path, text)
    assert [chosen[n] for n in NAMES] == ["w4a16/32", "w4a16/32", "w4a16/128", "bf16", "bf16", "w4a16/128"]
    assert chosen["l.2.router"] == "w4a16/32"
    assert (chosen["head"], chosen["embed"]) == ("w8a8", "bf16")


def test_patterns_match_whole_names_and_mind_the_case(tmp_path: Path) -> None:
    for pattern in ("gate", "L.0.*", "l.0", "l.[5-9].*"):
        with pytest.raises(UsageError) as caught:
            assigned(tmp_path, f'default = "bf16"\n[[override]]\nmatch = "{pattern}"\nscheme = "w8a8"')
        assert caught.value.codes == ("RECIPE_NO_MATCH",)
        assert caught.value.problems[0].got == pattern
    chosen = assigned(tmp_path, 'default = "bf16"\n[[override]]\nmatch = "l.[01].?own"\nscheme = "w8a8"')
    assert [n for n, s in chosen.items() if s == "w8a8"] == ["l.0.down", "l.1.down"]


def test_an_override_that_a_later_one_undoes_still_matches(tmp_path: Path) -> None:
    text = 'default = "bf16"\n' + 2 * '[[override]]\nmatch = "l.0.down"\nscheme = "w8a8"\n'
    assert assigned(tmp_path, text)["l.0.down"] == "w8a8"


def test_gate_and_up_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        assigned(tmp_path, 'default = "w8a8"\n[[override]]\nmatch = "*.up"\nscheme = "w4a16"')
    assert caught.value.codes == ("RECIPE_PAIR",) * 3
    assert "l.2.e.gate and l.2.e.up" in {p.where for p in caught.value.problems}
