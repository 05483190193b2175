"""What is registered is what the directories hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import calc.kernels
import calc.passes.fuse
import calc.passes.quantize
from calc.core.target import TARGET_DIR, load_target, target_names
from calc.kernels import registry
from calc.kernels.base import DOMAIN, Kernel
from calc.passes.base import Rule
from calc.passes.order import fusion_passes
from calc.passes.quantize import schemes

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
    assert set(schemes()) == files(calc.passes.quantize)
    for name, module in schemes().items():
        assert module.NAME == name == module.__name__.rsplit(".", 1)[1]
        assert module.FORMAT in ("bf16", "w8", "w4")


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
