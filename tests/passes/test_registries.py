"""What is registered is what the directories hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import calc.core.schemes
import calc.kernels
import calc.passes.fuse
from calc.core.errors import InternalError
from calc.core.isa import Tile
from calc.core.packing import FORMATS
from calc.core.schemes import Scheme, UnknownSchemeError, parse, scheme, schemes
from calc.core.target import TARGET_DIR, load_target, target_names
from calc.kernels import registry
from calc.kernels.base import DOMAIN, Kernel
from calc.passes.base import Rule
from calc.passes.order import fusion_passes

SHARED = {"__init__", "base", "emit", "functions", "lowering", "program"}


def files(package: object) -> set[str]:
    return {p.stem for p in Path(package.__path__[0]).glob("*.py")} - {"__init__"}


def test_every_kernel_file_is_one_op() -> None:
    modules = [type(k).__module__.rsplit(".", 1)[1] for k in registry().values()]
    assert sorted(modules) == sorted(files(calc.kernels) - SHARED)
    for name, kernel in registry().items():
        assert isinstance(kernel, Kernel)
        assert (kernel.name, type(kernel).__name__) == (name, name)
        assert kernel.__doc__
        assert all(c.__doc__ for c in kernel.constraints)
        assert kernel.examples()


def test_every_scheme_file_is_registered() -> None:
    assert list(schemes()) == sorted(files(calc.core.schemes) - {"base"})
    for name, cls in schemes().items():
        assert cls.name == name == cls.__module__.rsplit(".", 1)[1]
        assert cls.activations in ("bf16", "int8")
        assert cls.__doc__ and cls.why
        assert (cls.gate > 0) == (name != "bf16")
    assert {f.tile for f in FORMATS.values()} == set(Tile) - {Tile.NONE}
    assert {cls.format.name for cls in schemes().values()} == set(FORMATS)


def test_a_scheme_is_a_value_with_one_text() -> None:
    every = [cls(g) for cls in schemes().values() for g in cls.format.groups]
    assert len({str(s) for s in every}) == len(set(every)) == len(every)
    for s in every:
        assert parse(str(s)) == s == scheme(s.name, s.group)
        assert hash(parse(str(s))) == hash(s)
        assert (s.zero_point, s.row_scaled) == (s.name == "w4z", s.format.per == "row")
    assert str(scheme("w4a16", 64)) == "w4a16/64"
    assert str(scheme("w8a8", 64)) == "w8a8"  # a recipe's group is of no concern to a scheme without
    assert scheme("w4a8", 64) != scheme("w4a16", 64)


@pytest.mark.parametrize(
    "text", ["", "w4", "w4a16", "w4a16/", "w4a16/48", "w4a16/064", "w8a8/", "w8a8/0", "bf16/32", "W8A8"]
)
def test_texts_that_are_no_scheme(text: str) -> None:
    with pytest.raises(UnknownSchemeError, match="no scheme"):
        parse(text)


def test_schemes_that_do_not_exist() -> None:
    with pytest.raises(UnknownSchemeError, match="no scheme 'w2'"):
        scheme("w2")
    with pytest.raises(InternalError, match="no group size 48"):
        scheme("w4z", 48)
    assert issubclass(UnknownSchemeError, InternalError)
    assert isinstance(scheme("bf16"), Scheme)


def test_every_fusion_file_is_in_the_order_once() -> None:
    rules = [p for p in fusion_passes() if isinstance(p, Rule)]
    assert sorted(type(r).__module__.rsplit(".", 1)[1] for r in rules) == sorted(files(calc.passes.fuse))
    names = [p.name for p in fusion_passes()]
    assert len(set(names)) == len(names)
    made = {"".join(part.title() for part in name.removeprefix("fuse-").split("-")) for name in names}
    transfers = {n for n, k in registry().items() if k.crosses} | {"Send"}  # what a partition puts in
    assert made >= set(registry()) - {"Attention"} - transfers
    assert all(r.anchor[0] in ("", DOMAIN) for r in rules)


def test_every_target_file_loads_under_its_name() -> None:
    assert set(target_names()) == {p.stem for p in TARGET_DIR.iterdir()}
    digests = {load_target(n).digest for n in target_names()}
    assert len(digests) == len(target_names())
    assert all(load_target(n).name == n for n in target_names())


@pytest.mark.parametrize("name", registry())
def test_kernels_describe_their_examples(name: str) -> None:
    """Formals, weights and shapes agree, and no example breaks the op's own constraints."""
    kernel = registry()[name]
    for example in kernel.examples():
        ins, outs = kernel.formals(example.attrs)
        assert set(kernel.weights(example.attrs)) <= set(ins)
        assert set(example.shapes) == set(ins)
        assert len(set(ins + outs)) == len(ins + outs)
        shapes = {**example.shapes, **dict.fromkeys(outs, ())}
        call = calc.kernels.base.Call(name, "n", example.attrs, {i: i for i in ins}, outs, shapes)
        assert kernel.refusals(call) == []
