"""What a kernel is: one NPU op, everything about it in one file.

A kernel's truth is its ONNX function body: standard ops, run by ONNX Runtime. `body` gives it twice: in FP32, and with
the NPU's numerics (the same ops with a rounding at every store). `lower` writes the program. Tests compare the two for
every example, so that no kernel's reference was written by the code it checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from calc.core.errors import InternalError
from calc.core.schemes import Scheme, UnknownSchemeError, parse, scheme
from calc.core.state import StateSpec

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering

Numerics = Literal["fp32", "npu"]
Attr = int | float | str | tuple[str, ...]

DOMAIN = "calc"


@dataclass(frozen=True)
class Call:
    """One node of the fused graph.

    Attributes:
        op: the kernel's name.
        name: the node's name, with the module it comes from.
        attrs: what distinguishes this call.
        inputs: value names by formal name; a missing optional input is absent.
        outputs: value names, in order.
        shapes: dimensions of every input and output, by value name.
        layer: decoder layer, None outside of the layers.
        chip: the chip that runs it.
        schemes: the scheme of each matrix, by formal name.
    """

    op: str
    name: str
    attrs: Mapping[str, Attr]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    layer: int | None = None
    chip: int = 0
    schemes: Mapping[str, Scheme] = field(default_factory=dict)

    def shape(self, formal: str) -> tuple[int, ...]:
        """Dimensions of the input with that formal name."""
        return self.shapes[self.inputs[formal]]

    def int(self, name: str) -> int:
        """An integer attribute."""
        value = self.attrs[name]
        assert isinstance(value, int)
        return value

    def float(self, name: str) -> float:
        """A number attribute."""
        value = self.attrs[name]
        assert isinstance(value, int | float)
        return float(value)

    def str(self, name: str) -> str:
        """A text attribute."""
        value = self.attrs[name]
        assert isinstance(value, str)
        return value


@dataclass(frozen=True)
class Work:
    """What a call costs, without a clock: multiply-accumulates and vector elements."""

    macs: int
    vector_ops: int


Constraint = Callable[[Call], str | None]
"""Says why a call is refused (expected and got), or None. Its docstring is the rule in one sentence."""


def softcap_positive(call: Call) -> str | None:
    """The softcap is 0 (none) or a positive finite number."""
    c = call.float("softcap")
    return None if 0 <= c < float("inf") else f"softcap {c}"


@dataclass(frozen=True)
class Example:
    """A sample call: attributes and input shapes, from which tests draw values."""

    attrs: Mapping[str, Attr]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, object] = field(default_factory=dict)


class Kernel(ABC):
    """One NPU op of domain ``calc``."""

    name: str
    constraints: tuple[Constraint, ...] = ()
    loads: str | None = None
    """The role's input that the kernel reads from DRAM itself."""
    stores: str | None = None
    """The role's output that it writes to DRAM itself, or its chip's columns of it."""
    crosses: bool = False
    """Whether the kernel reads what another chip has made, over the link."""
    by_row: tuple[str, ...] = ()
    """Inputs of which the kernel picks rows itself: they need not lie in SRAM."""
    gathers: tuple[str, ...] = ()
    """Matrices of which it reads a row per token and not all."""

    @abstractmethod
    def formals(self, attrs: Mapping[str, Attr]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Formal input and output names of the ONNX function for these attributes."""

    @abstractmethod
    def weights(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        """Formal names of the inputs that are matrices, in the order of the ``schemes`` attribute."""

    def vectors(self, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        """Formal names of the inputs that are small f32 weights, kept as plain arrays."""
        return ()

    def states(self, call: Call) -> Mapping[str, StateSpec]:
        """The states behind formal inputs; none for most ops."""
        return {}

    @abstractmethod
    def body(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        """The ONNX function's body (ONNX text format), from formal inputs to formal outputs."""

    @abstractmethod
    def work(self, call: Call, rows: int, context: int) -> Work:
        """What the call costs for `rows` valid rows that see `context` keys each."""

    @abstractmethod
    def lower(self, low: Lowering, call: Call) -> None:
        """Write the program."""

    @abstractmethod
    def examples(self) -> tuple[Example, ...]:
        """Sample calls for the tests: boundary and ragged shapes among them."""

    def refusals(self, call: Call) -> list[str]:
        """Every constraint the call breaks."""
        return [r for c in self.constraints if (r := c(call)) is not None]

    def overload(self, attrs: Mapping[str, Attr], numerics: Numerics) -> str:
        """The ONNX function overload's name: one for each distinct body."""
        parts: list[str] = [numerics]
        for k in sorted(attrs):
            v = attrs[k]
            parts.append(f"{k}={'.'.join(v) if isinstance(v, tuple) else v}")
        return ",".join(parts)

    def schemes(self, attrs: Mapping[str, Attr]) -> dict[str, Scheme]:
        """The scheme of each matrix, by formal name; bf16 where none has been bound yet.

        Raises:
            UnknownSchemeError: the ``schemes`` attribute names one that does not exist, or not one per matrix.
        """
        names, value = self.weights(attrs), attrs.get("schemes")
        if not isinstance(value, tuple):
            return dict.fromkeys(names, scheme("bf16"))
        if len(value) != len(names):
            raise UnknownSchemeError(f"{len(value)} schemes for {len(names)} matrices")
        return dict(zip(names, map(parse, value), strict=True))


# -- pieces of ONNX text ---------------------------------------------------------------------------------------------


def store(src: str, dst: str, numerics: Numerics) -> str:
    """`dst` is `src` as it is after a store to memory: rounded to BF16 in the NPU's numerics."""
    if numerics == "fp32":
        return f"{dst} = Identity({src})"
    return f"{dst}_b16 = Cast<to: int = 16>({src})\n{dst} = Cast<to: int = 1>({dst}_b16)"


def rms_norm(x: str, gamma: str, eps: float, dst: str) -> str:
    """RMS norm over the last axis in FP32."""
    return f"{dst} = RMSNormalization<axis: int = -1, epsilon: float = {eps!r}, stash_type: int = 1>({x}, {gamma})"


def int8_rows(x: str, dst: str) -> list[str]:
    """Dynamic int8 of each row of `x`: ``<dst>_codes`` (whole numbers in FP32) and ``<dst>_s`` (scales, [..., 1])."""
    return [
        f"{dst}_abs = Abs({x})",
        f"{dst}_ax = Constant<value_ints: ints = [-1]>()",
        f"{dst}_max = ReduceMax<keepdims: int = 1>({dst}_abs, {dst}_ax)",
        f"{dst}_127 = Constant<value_float: float = 127.0>()",
        f"{dst}_one = Constant<value_float: float = 1.0>()",
        f"{dst}_zero = Constant<value_float: float = 0.0>()",
        f"{dst}_tiny = Constant<value_float: float = 1.1754943508222875e-38>()",
        f"{dst}_s0 = Div({dst}_max, {dst}_127)",
        f"{dst}_s1 = Max({dst}_s0, {dst}_tiny)",
        f"{dst}_isz = Equal({dst}_max, {dst}_zero)",
        f"{dst}_s = Where({dst}_isz, {dst}_one, {dst}_s1)",
        f"{dst}_q0 = Div({x}, {dst}_s)",
        f"{dst}_q1 = Round({dst}_q0)",
        f"{dst}_n127 = Neg({dst}_127)",
        f"{dst}_codes = Clip({dst}_q1, {dst}_n127, {dst}_127)",
    ]


def matmul(x: str, w: str, dst: str, scheme: Scheme) -> str:
    """``dst = x @ w.T`` under a weight's scheme.

    Of a scheme with a scale per row, `w` is int8 codes and ``<w>_scale`` their scales [N]; else `w` is f32 values.
    """
    wt = f"{dst}_wt = Transpose<perm: ints = [1, 0]>({w})"
    if scheme.activations == "bf16" and not scheme.row_scaled:
        return f"{wt}\n{dst} = MatMul({x}, {dst}_wt)"
    if scheme.activations == "bf16":
        wide = f"{dst}_wf = Cast<to: int = 1>({dst}_wt)"
        return f"{wt}\n{wide}\n{dst}_f = MatMul({x}, {dst}_wf)\n{dst} = Mul({dst}_f, {w}_scale)"
    if not scheme.row_scaled:
        lines = [*int8_rows(x, dst), wt, f"{dst}_f = MatMul({dst}_codes, {dst}_wt)", f"{dst} = Mul({dst}_f, {dst}_s)"]
        return "\n".join(lines)
    return "\n".join(
        (
            *int8_rows(x, dst),
            f"{dst}_q = Cast<to: int = 3>({dst}_codes)",
            wt,
            f"{dst}_i = MatMulInteger({dst}_q, {dst}_wt)",
            f"{dst}_f = Cast<to: int = 1>({dst}_i)",
            f"{dst}_fa = Mul({dst}_f, {dst}_s)",
            f"{dst} = Mul({dst}_fa, {w}_scale)",
        )
    )


ACTIVATION_BODIES: dict[str, Callable[[str, str], str]] = {
    "silu": lambda x, dst: f"{dst}_sg = Sigmoid({x})\n{dst} = Mul({x}, {dst}_sg)",
    "gelu": lambda x, dst: f'{dst} = Gelu<approximate: string = "none">({x})',
    "gelu_tanh": lambda x, dst: f'{dst} = Gelu<approximate: string = "tanh">({x})',
    "sigmoid": lambda x, dst: f"{dst} = Sigmoid({x})",
    "tanh": lambda x, dst: f"{dst} = Tanh({x})",
}
"""The activations the vector engine has, as ONNX text in FP32."""


def activation(kind: str, x: str, dst: str) -> str:
    """An activation in FP32.

    Raises:
        InternalError: one that is not in `ACTIVATION_BODIES`; `activation_known` refuses such calls before.
    """
    if kind not in ACTIVATION_BODIES:
        raise InternalError(f"no activation {kind!r} among {sorted(ACTIVATION_BODIES)}")
    return ACTIVATION_BODIES[kind](x, dst)


def activation_known(call: Call) -> str | None:
    """The activation is one the vector engine has."""
    act = call.str("act")
    return None if act in ACTIVATION_BODIES else f"activation {act}, not one of {', '.join(sorted(ACTIVATION_BODIES))}"


def weight_formals(schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
    """Formal inputs of the weights: each name, followed by its scales where the scheme has one per row."""
    out: list[str] = []
    for name, s in schemes.items():
        out.append(name)
        if s.row_scaled:
            out.append(f"{name}_scale")
    return tuple(out)
