"""Kernels as model-local ONNX functions: what makes every intermediate graph run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.parser

from calc.core.errors import InternalError
from calc.kernels.base import DOMAIN, A, Kernel, Numerics

OPSET = 25
"""Opset of the function bodies: the first with Attention's `left_window_size`."""


def function_proto(kernel: Kernel[A], attrs: A, bound: Sequence[str] | None, numerics: Numerics) -> onnx.FunctionProto:
    """The ONNX function of a kernel.

    Args:
        kernel: the op.
        attrs: the call's attributes.
        bound: what the node's ``schemes`` attribute says; None where it has none.
        numerics: FP32, or with the NPU's roundings.

    Raises:
        InternalError: the body is not valid ONNX text.
    """
    schemes = kernel.schemes(attrs, bound)
    ins, outs = kernel.inputs(attrs, schemes), kernel.formals(attrs)[1]
    overload = kernel.overload(attrs, bound, numerics)
    text = (
        f'<domain: "{DOMAIN}", overload: "{overload}", opset_import: ["" : {OPSET}]>\n'
        f"{kernel.name} ({', '.join(ins)}) => ({', '.join(outs)}) {{\n{kernel.body(attrs, schemes, numerics)}\n}}"
    )
    try:
        return onnx.parser.parse_function(text)
    except onnx.parser.ParseError as e:
        raise InternalError(f"kernel {kernel.name}: {e}\n{text}") from e
