"""A program that has nothing to decompose is translated as it is, to the same bytes; every other is decomposed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import transformers
from frontend_models import save_model, t0
from test_parity import FAMILIES

from calc.core.variant import Variant
from calc.frontend import translate
from calc.frontend.export import export

VARIANTS = [Variant("prefill", 1, 16), Variant("decode", 2, 1)]
NEEDED = {
    "phi": "aten.dropout.default is a composite",
    "glm4": "aten.chunk.default is a composite",
}
MODELS = {
    **FAMILIES,
    "qwen3_moe_normed": lambda: transformers.Qwen3MoeConfig(
        **t0(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    ),
    "phi": lambda: transformers.PhiConfig(**t0(num_key_value_heads=4, head_dim=...)),
    "glm4": lambda: transformers.Glm4Config(**t0(head_dim=...)),
}


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """What was found out about each program."""
    found: list[str | None] = []
    real = translate.to_decompose

    def spy(program: torch.export.ExportedProgram) -> str | None:
        found.append(real(program))
        return found[-1]

    monkeypatch.setattr(translate, "to_decompose", spy)
    yield found


def graphs(model: Path) -> list[bytes]:
    exported = export(model, VARIANTS, 48)
    return [ir.to_proto(g).SerializeToString(deterministic=True) for g in exported.graphs.values()]


@pytest.mark.parametrize("family", MODELS)
def test_the_same_bytes_as_with_decomposition(
    family: str, tmp_path: Path, reasons: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(MODELS[family](), tmp_path / family)
    spared = graphs(model)
    assert reasons == [NEEDED.get(family)] * 2
    with monkeypatch.context() as patch:
        patch.setattr(translate, "simplify", lambda _: None)
        patch.setattr(translate, "to_decompose", lambda _: "always")
        assert graphs(model) == spared


class Cases(torch.nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.case == "buffer":
            self.seen.add_(x[0])
        if self.case == "control":
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
        if self.case == "unknown":
            return torch.special.bessel_j0(x)
        if self.case.startswith("write"):
            y = {"write": x + 1, "write view": (x + 1)[1:], "write seen": x + 1}[self.case]
            z = y.sum(-1, keepdim=True)
            view = y[0] if self.case == "write seen" else None
            y.div_(z)
            return y + 1 if view is None else y + view
        if self.case == "cast":
            return x.to(torch.float64)
        y = x.reshape(2, 6).to(torch.float32)
        return y if self.case == "output" else y + 1


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("buffer", "a buffer or an input is written"),
        ("control", "cond is no plain operator"),
        ("unknown", "aten.special_bessel_j0.default has no translation"),
        ("cast", "aten.to.dtype has no translation"),
        ("write", None),
        ("write view", "aten.div_.Tensor writes into its input"),
        ("write seen", "aten.div_.Tensor writes into its input"),
        ("output", "aten.to.dtype has no translation"),
        ("plain", None),
    ],
)
def test_what_has_to_be_decomposed(case: str, reason: str | None) -> None:
    program = torch.export.export(Cases(case), (torch.ones(3, 4),), strict=False)
    if case == "buffer":
        program = program.run_decompositions({})
    assert translate.to_decompose(program) == reason
