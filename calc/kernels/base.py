"""What a kernel is: one NPU op, everything about it in one file.

A kernel's truth is its ONNX function body: standard ops, run by ONNX Runtime. `body` gives it twice: in FP32, and with
the NPU's numerics (the same ops with a rounding at every store). `lower` writes the program. Tests compare the two for
every example, so that no kernel's reference was written by the code it checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, get_type_hints

from typing_extensions import TypeVar

from calc.core.errors import InternalError
from calc.core.schemes import Scheme, UnknownSchemeError, parse, scheme
from calc.core.state import StateSpec

if TYPE_CHECKING:
    from calc.kernels.lowering import Lowering

Numerics = Literal["fp32", "npu"]
Attr = int | float | str | tuple[str, ...]
"""An attribute as an ONNX node has it."""

DOMAIN = "calc"
SCHEMES = "schemes"
"""The attribute of a node that names its matrices' schemes, once they are bound. It belongs to no kernel."""


# -- attributes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attrs:
    """What distinguishes one call of a kernel from another.

    Each kernel has a frozen dataclass of its own: int, float, str and bool fields (a bool is 0 or 1 in ONNX). A kernel
    without attributes takes this one. A field with a default may be absent from a node, and is not written at its
    default.
    """


@dataclass(frozen=True)
class AttrFault:
    """What is wrong with one attribute of a node."""

    what: str
    expected: str
    got: str = ""


class AttrsError(InternalError):
    """The attributes are not those of the kernel. Ours always are; those of a node made elsewhere may not be.

    Attributes:
        faults: every attribute that is unknown, missing or of another type.
    """

    def __init__(self, kind: type[Attrs], faults: Sequence[AttrFault]) -> None:
        self.faults = tuple(faults)
        super().__init__(f"{kind.__name__}: " + "; ".join(f"{f.what} (expected {f.expected})" for f in faults))


A = TypeVar("A", bound=Attrs, default=Attrs)
A_co = TypeVar("A_co", covariant=True, default=Attrs)


def parse_attrs(kind: type[A], values: Mapping[str, Attr]) -> A:
    """The typed value of a node's attributes.

    Args:
        kind: the kernel's dataclass.
        values: by name, without `SCHEMES`.

    Raises:
        AttrsError: attributes are unknown, missing or of another type; all of them are named.
    """
    known = _fields_of(kind)
    names = ", ".join(known) or "no attributes"
    faults = [AttrFault(f"it has no attribute {n}", names, f"{n}={values[n]!r}") for n in values if n not in known]
    out: dict[str, object] = {}
    for name, (spec, wanted) in known.items():
        if name not in values:
            if spec.default is MISSING:
                faults.append(AttrFault(f"the attribute {name} is missing", f"{name}: {wanted.__name__}"))
            continue
        value = _as(wanted, values[name])
        if value is None:
            shown = "0 or 1" if wanted is bool else wanted.__name__
            faults.append(AttrFault(f"the attribute {name} has another type", f"{name}: {shown}", repr(values[name])))
        out[name] = value
    if faults:
        raise AttrsError(kind, faults)
    return kind(**out)


def _fields_of(kind: type[Attrs]) -> dict[str, tuple[Field[Any], type]]:
    types = get_type_hints(kind)
    return {f.name: (f, types[f.name]) for f in fields(kind)}


def _as(wanted: type, value: Attr) -> int | float | str | None:
    """The value as the field has it; None where it is of another type. A whole number is a float too."""
    if wanted is bool:
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if wanted is float and isinstance(value, int | float):
        return float(value)
    return value if isinstance(value, int | str) and type(value) is wanted else None


def attr_values(attrs: Attrs) -> dict[str, int | float | str]:
    """What a node is given: the fields in their order, those at their default left out."""
    out: dict[str, int | float | str] = {}
    for f in fields(attrs):
        value = getattr(attrs, f.name)
        if f.default is MISSING or value != f.default:
            out[f.name] = int(value) if isinstance(value, bool) else value
    return out


# -- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call(Generic[A_co]):
    """One node of the fused graph.

    Attributes:
        op: the kernel's name.
        name: the node's name, with the module it comes from.
        attrs: its kernel's attributes.
        inputs: value names by formal name; a missing optional input is absent.
        outputs: value names, in order.
        shapes: dimensions of every input and output, by value name.
        layer: decoder layer, None outside of the layers.
        chip: the chip that runs it.
        schemes: the scheme of each matrix, by formal name.
    """

    op: str
    name: str
    attrs: A_co
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    layer: int | None = None
    chip: int = 0
    schemes: Mapping[str, Scheme] = field(default_factory=dict)

    def shape(self, formal: str) -> tuple[int, ...]:
        """Dimensions of the input with that formal name."""
        return self.shapes[self.inputs[formal]]


@dataclass(frozen=True)
class Work:
    """What a call costs, without a clock: multiply-accumulates and vector elements."""

    macs: int
    vector_ops: int


Constraint = Callable[[Call[A]], str | None]
"""Says why a call is refused (expected and got), or None. Its docstring is the rule in one sentence."""


class Capped(Protocol):
    """Attributes with a softcap, 0 for none."""

    @property
    def softcap(self) -> float:
        """What the capped values stay below."""


class Activated(Protocol):
    """Attributes with an activation."""

    @property
    def act(self) -> str:
        """A name in `ACTIVATION_BODIES`."""


def softcap_positive(call: Call[Capped]) -> str | None:
    """The softcap is 0 (none) or a positive finite number."""
    c = call.attrs.softcap
    return None if 0 <= c < float("inf") else f"softcap {c}"


@dataclass(frozen=True)
class Example(Generic[A_co]):
    """A sample call: attributes and input shapes, from which tests draw values."""

    attrs: A_co
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, object] = field(default_factory=dict)


class Kernel(ABC, Generic[A]):
    """One NPU op of domain ``calc``, with attributes of type `A`."""

    name: str
    attributes: type[A]
    """The dataclass of its attributes."""
    constraints: tuple[Constraint[A], ...] = ()
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
    def formals(self, attrs: A) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Formal input and output names of the ONNX function for these attributes, without the matrices' scales."""

    @abstractmethod
    def weights(self, attrs: A) -> tuple[str, ...]:
        """Formal names of the inputs that are matrices, in the order of the ``schemes`` attribute."""

    def vectors(self, attrs: A) -> tuple[str, ...]:
        """Formal names of the inputs that are small f32 weights, kept as plain arrays."""
        return ()

    def states(self, call: Call[A]) -> Mapping[str, StateSpec]:
        """The states behind formal inputs; none for most ops."""
        return {}

    @abstractmethod
    def body(self, attrs: A, schemes: Mapping[str, Scheme], numerics: Numerics) -> str:
        """The ONNX function's body (ONNX text format), from formal inputs to formal outputs.

        Args:
            attrs: of the call.
            schemes: the scheme of each matrix, by formal name.
            numerics: FP32, or with the NPU's roundings.
        """

    @abstractmethod
    def work(self, call: Call[A], rows: int, context: int) -> Work:
        """What the call costs for `rows` valid rows that see `context` keys each."""

    @abstractmethod
    def lower(self, low: Lowering, call: Call[A]) -> None:
        """Write the program."""

    @abstractmethod
    def examples(self) -> tuple[Example[A], ...]:
        """Sample calls for the tests: boundary and ragged shapes among them."""

    def refusals(self, call: Call[A]) -> list[str]:
        """Every constraint the call breaks."""
        return [r for c in self.constraints if (r := c(call)) is not None]

    def inputs(self, attrs: A, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
        """Formal inputs of a node: `formals`, each matrix followed by its scales where its scheme has one per row."""
        out: list[str] = []
        for name in self.formals(attrs)[0]:
            out.append(name)
            if name in schemes and schemes[name].row_scaled:
                out.append(f"{name}_scale")
        return tuple(out)

    def overload(self, attrs: A, bound: Sequence[str] | None, numerics: Numerics) -> str:
        """The ONNX function overload's name: one for each distinct body.

        Args:
            attrs: of the call.
            bound: what the node's ``schemes`` attribute says; None where it has none.
            numerics: of the body.
        """
        values: dict[str, object] = {**attr_values(attrs)}
        if bound is not None:
            values[SCHEMES] = ".".join(bound)
        return ",".join([numerics, *(f"{k}={values[k]}" for k in sorted(values))])

    def schemes(self, attrs: A, bound: Sequence[str] | None = None) -> dict[str, Scheme]:
        """The scheme of each matrix, by formal name; bf16 where none has been bound yet.

        Args:
            attrs: of the call.
            bound: what the node's ``schemes`` attribute says; None where it has none.

        Raises:
            UnknownSchemeError: `bound` names one that does not exist, or not one per matrix.
        """
        names = self.weights(attrs)
        if bound is None:
            return dict.fromkeys(names, scheme("bf16"))
        if len(bound) != len(names):
            raise UnknownSchemeError(f"{len(bound)} schemes for {len(names)} matrices")
        return dict(zip(names, map(parse, bound), strict=True))


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


def activation_known(call: Call[Activated]) -> str | None:
    """The activation is one the vector engine has."""
    act = call.attrs.act
    return None if act in ACTIVATION_BODIES else f"activation {act}, not one of {', '.join(sorted(ACTIVATION_BODIES))}"
